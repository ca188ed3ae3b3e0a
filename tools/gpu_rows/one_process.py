"""Rows that need one process only: kernels, types, events, memory, checkpoints, generation, the profiler, faults."""

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.init import xavier_normal_
from torch.profiler import ProfilerActivity, profile

from course.parity import compare, gradients
from labkit.device import wait_for_gpu
from labkit.expert_parallel import Experts, MoELayer
from labkit.groups import groups_of_one, init_groups, local_device
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import TrainConfig, training
from labtrain.generation import generate
from labtrain.model import ParallelGPT
from tools.gpu_rows.row import Found, LeftOut, Where, judged

LARGEST_ERRORS = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2**-7, "float8_e4m3fn": 2**-3}
MEMORY_IS_NEAR = 0.7, 1.4  # what is counted, as a share of what was said


def product(where: Where, name: str) -> Found:
    """Multiply matrices of a type, and compare with float64 on the CPU."""
    device = where.torch_device
    torch.manual_seed(0)
    a = torch.randn(256, 256, dtype=torch.float64)
    b = torch.randn(256, 256, dtype=torch.float64)
    dtype = getattr(torch, name)
    if name == "float8_e4m3fn":
        if where.is_gpu and torch.cuda.get_device_capability(device) < (8, 9):
            raise LeftOut("this GPU has no fp8: that begins with compute capability 8.9")
        one = torch.ones((), device=device)
        columns = b.to(device, dtype).t().contiguous().t()  # the kernel wants the second matrix by columns
        got = torch._scaled_mm(a.to(device, dtype), columns, one, one, out_dtype=torch.bfloat16)
    else:
        got = a.to(device, dtype) @ b.to(device, dtype)
    return judged([compare({name: got.double()}, {name: a @ b})], LARGEST_ERRORS[name])


def attention(where: Where) -> Found:
    """Run torch's attention in bfloat16, forward and backward."""
    device = where.torch_device
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 128, 64, dtype=torch.float64) for heads in (4, 2, 2)]
    grad = torch.randn(2, 4, 128, 64, dtype=torch.float64)
    found = []
    for place, dtype in ((torch.device("cpu"), torch.float64), (device, torch.bfloat16)):
        q, k, v = (x.to(place, dtype, copy=True).requires_grad_() for x in inputs)
        output = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output.backward(grad.to(place, dtype))
        found.append({"output": output.double(), "q": q.grad.double(), "k": k.grad.double(), "v": v.grad.double()})
    expected, got = found
    return judged([compare(got, expected)], 2**-5)


def experts(where: Where) -> Found:
    """Compute experts in bfloat16, for which GPUs have one kernel: also one without rows, and no multiple of 8."""
    ends = torch.tensor([5, 5, 12, 37]).int()
    sizes = (len(ends), 64, 128)
    x, grad = torch.randn(2, 37, 64).bfloat16()
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float64), (where.torch_device, torch.bfloat16)):
        torch.manual_seed(0)
        made = Experts(sizes, groups_of_one(), False, "none", [xavier_normal_] * 2, dtype=torch.bfloat16)
        here = made.to(device, dtype)
        rows = x.to(device, dtype, copy=True).requires_grad_()
        output = here(rows, ends.to(device))
        output.backward(grad.to(device, dtype))
        tensors = {"output": output, "gradient of the input": rows.grad, **gradients(here)}
        found.append({name: tensor.double() for name, tensor in tensors.items()})
    expected, got = found
    return judged([compare(got, expected)], 2**-5)


def waits(where: Where) -> Found:
    """Count for how many operations of a layer with experts the host waits for its GPU."""
    device = where.torch_device
    layer = MoELayer(64, 128, 4, 2, groups_of_one(), device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 37, 64).to(device, torch.bfloat16).requires_grad_()

    def step() -> None:
        output, load = layer(x)
        (output.float().square().mean() + layer.router.loss(load)).backward()

    step()  # makes handles and loads kernels
    if where.is_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    if where.is_gpu:
        torch.cuda.set_sync_debug_mode("default")
    count = sum("synchronizing" in str(warning.message) for warning in seen)
    return Found(count <= 1, f"the host waits {count} times", "at most once: for the number of rows of each expert")


def seconds_by_events(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":  # a CPU has no events
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def events(where: Where) -> Found:
    """Time products by the GPU's events, and around that by the host's clock."""
    device = where.torch_device
    width = 4096 if where.is_gpu else 256
    matrix = torch.randn(width, width, device=device)

    def products() -> None:
        for _ in range(10):
            torch.mm(matrix, matrix)

    products()
    wait_for_gpu()
    start = time.perf_counter()
    by_events = seconds_by_events(products, device)
    by_clock = time.perf_counter() - start
    measured = f"{by_events * 1e3:.2f} ms by events, {by_clock * 1e3:.2f} ms by the clock"
    return Found(0 < by_events < by_clock, measured, "less by events than by the clock around them")


def memory_config(is_gpu: bool) -> TrainConfig:
    sizes = dict(hidden_size=1024, num_layers=8, num_attention_heads=16, seq_length=512)
    if not is_gpu:
        sizes = dict(hidden_size=32, num_layers=2, num_attention_heads=2, seq_length=16)
    return TrainConfig(steps=2, batch_size=4, micro_batch_size=4, precision="bfloat16", warmup_steps=0, **sizes)


def train_and_count(config: TrainConfig) -> int:
    """On a rank: return the most bytes that torch has had allocated during the steps; 0 on the CPU."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    with training(config) as trainer:
        for _ in trainer.steps():
            pass
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def memory(where: Where) -> Found:
    """Count the memory of a training step, and compare with what ``--check`` said."""
    from labtrain.estimate import what_a_rank_holds

    config = memory_config(where.is_gpu)
    _, held = what_a_rank_holds(config, 1, 0, on_gpu=True)
    said = sum(astuple(held))
    [counted] = where.run(1, train_and_count, config)
    if not where.is_gpu:
        return Found(True, "a CPU's memory is not counted", f"{held}")
    least, most = MEMORY_IS_NEAR
    share = counted / said
    expected = f"{held}: counted is {least} to {most} times that"
    return Found(least < share < most, f"{counted / 2**20:,.1f} MiB, {share:.2f} times what was said", expected)


def losses_of(config: TrainConfig) -> dict[str, torch.Tensor]:
    """On a rank: return what must not depend on the layout."""
    with training(config) as trainer:
        numbers = [[step.loss, step.grad_norm] for step in trainer.steps()]
    losses, norms = torch.tensor(numbers, dtype=torch.float64).T
    return {"losses": losses, "gradient norms": norms}


def checkpoint(where: Where, in_background: bool) -> Found:
    """Save each step, lose the last, and train it again."""
    return resumed(where, small_config(), 1, in_background)


def resumed(where: Where, config: TrainConfig, num_ranks: int, in_background: bool = True) -> Found:
    """Save each step, lose the last, and train it again: it must come to the same."""
    with tempfile.TemporaryDirectory() as folder:
        saving = replace(config, checkpoint_dir=folder, save_interval=1, async_save=in_background)
        through = where.run(num_ranks, losses_of, saving)
        shutil.rmtree(Path(folder, f"step_{config.steps:08d}"))
        again = where.run(num_ranks, losses_of, replace(saving, resume=True))
    last = [{name: values[-1:] for name, values in rank.items()} for rank in through]
    return judged([compare(got, expected) for got, expected in zip(again, last)])


def small_config() -> TrainConfig:
    return TrainConfig(
        steps=3, batch_size=4, micro_batch_size=2, seq_length=16, hidden_size=32, num_attention_heads=4,
        num_layers=2, precision="float64", warmup_steps=0,
    )  # fmt: skip


def written(device_name: str) -> list[list[int]]:
    """On a rank of a world of one: write 16 tokens with a model whose weights are drawn by names."""
    shape = GPT(num_layers=2, hidden_size=32, seq_length=32, vocab_size=64, num_attention_heads=4)
    device = torch.device(device_name)
    with init_groups(ParallelLayout(1)) as groups:
        model = ParallelGPT(shape, groups.tp, dtype=torch.float64, device=device)
        start = torch.zeros(2, 1, dtype=torch.int64, device=device)
        return generate(model, start, groups, 16, temperature=1.0, seed=0).tolist()


def generation(where: Where) -> Found:
    """Write with one model on the device and on the CPU: the same words."""
    [got] = where.run(1, written_on_local_device)
    key = "generation"
    if key not in where.in_one_process:
        cpu = Where("cpu", 0)
        [where.in_one_process[key]] = cpu.run(1, written, "cpu")
        cpu.close()
    expected = where.in_one_process[key]
    num_same = sum(a == b for row, other in zip(got, expected) for a, b in zip(row, other))
    return Found(got == expected, f"{num_same} tokens are the same", f"{sum(map(len, expected))}, as on the CPU")


def written_on_local_device() -> list[list[int]]:
    return written(str(local_device()))


def profiler(where: Where) -> Found:
    """Let torch.profiler see a product."""
    device = where.torch_device
    activities = [ProfilerActivity.CPU]
    if where.is_gpu:
        activities.append(ProfilerActivity.CUDA)
    matrix = torch.randn(512, 512, device=device)
    with profile(activities=activities) as seen:
        torch.mm(matrix, matrix)
        wait_for_gpu()
    kernels = [event for event in seen.events() if str(event.device_type).endswith("CUDA")]
    operations = [event for event in seen.events() if event.name == "aten::mm"]
    measured = f"{len(operations)} operations aten::mm, {len(kernels)} kernels"
    is_right = bool(operations) and bool(kernels) == where.is_gpu
    return Found(is_right, measured, "at least one of each" if where.is_gpu else "one operation, and no kernel")


def out_of_memory(where: Where) -> Found:
    """Ask for too much memory, and compute something afterwards."""
    device = where.torch_device
    try:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        name = type(error).__name__
        after = torch.ones(4, device=device).sum().item()
        return Found(after == 4, f"{name}; the next sum is {after:g}", "an error, and the next sum is 4")
    return Found(False, "2**50 bytes were given", "an error")


def wrong_index(index: int) -> float:
    """On a rank: look up a row; on a GPU a wrong index is an assertion in a kernel, and ends the context."""
    table = torch.arange(8.0, device=local_device())
    row = torch.tensor([index], device=local_device())
    return table[row].sum().item()


def device_assert(where: Where) -> Found:
    """Fail in a kernel on a rank: the error is reported, and new ranks compute."""
    with where.world(1) as world:
        try:
            world.run(wrong_index, 100)
        except Exception as error:
            said = first_line(error)
        else:
            return Found(False, "no error", "an error")
        ended = world.ended
    [after] = where.run(1, wrong_index, 3)
    expected = "an error that names the rank; row 3 of new ranks is 3"
    kept = f"the world ended: {ended}" if ended else "the world goes on"
    return Found(after == 3 and "rank 0" in said, f"{said}; {kept}; then {after:g}", expected)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
