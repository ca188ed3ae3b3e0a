"""`make gpu-check`: does every GPU compute what one process computes? Writes a report that can be sent.

Collectives, sharded layers, pipeline schedules, training runs and a deadlock run over NCCL with one rank per GPU, and
an all-reduce is timed: two minutes. `python -m tests.gpu_check --backend gloo --world-size 4` does so on CPU ranks.
"""

import argparse
import copy
import platform
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.init import xavier_normal_

from course.measure.bandwidth import measure
from course.measure.environment import facts, look_at_machine
from course.measure.operations import WITH_ROOT, WITHOUT_ROOT
from course.parity import Difference, Parity, compare, gradients
from labkit import pipeline, tensor_parallel
from labkit.command_line import run_command
from labkit.context_parallel import positions
from labkit.expert_parallel import Experts, MoELayer
from labkit.groups import groups_of_one, init_groups, local_device
from labkit.launch import RankFailed, World, launch
from labkit.layout import ParallelLayout
from labkit.model import CONTEXT_PARALLEL
from labkit.sizes import counted, divisors
from labkit.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard_like
from labkit.train import TrainConfig, steps
from labkit.train.config import SCHEDULES
from tests.support.pipelines import mean_square, model_chunks

LARGEST_ERROR = 1e-9  # in float64 a different order of sums makes errors of about 1e-15
LARGEST_ERROR_IN_BFLOAT16 = 2**-5
OPERATIONS = WITH_ROOT | WITHOUT_ROOT
LAYERS = ("column", "row", "vocabulary and loss", "column and row, sequence parallel")
HYBRID = "hybrid shards, zero_stage = 3"
Outcome = tuple[float | None, str]  # the worst relative error, and a note


# --- on a rank: what it has, compared with one process on the CPU ---------------------------------------------------


def collective(name: str) -> list[Difference]:
    """Run one operation on one row of numbers per rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(4.0 * n * n, dtype=torch.float64).reshape(n, 4 * n)
    total = rows.sum(0)
    expected = {
        "broadcast": rows[0],
        "scatter": rows[0].chunk(n)[rank],
        "gather": rows.flatten() if rank == 0 else None,
        "reduce": total if rank == 0 else None,
        "all-gather": rows.flatten(),
        "reduce-scatter": total.chunk(n)[rank],
        "all-reduce": total,
        "all-to-all": torch.cat([row.chunk(n)[rank] for row in rows]),
        "send and receive": rows[rank - 1],
    }
    return compare({name: OPERATIONS[name](rows[rank].to(local_device()))}, expected)


def layer(name: str) -> list[Difference]:
    """Run a layer, or two, forward and backward."""
    group, device = dist.group.WORLD, local_device()
    n, rank = group.size(), group.rank()
    width, has_words, is_pair = 8 * n, name == LAYERS[2], name == LAYERS[3]
    options = dict(device=device, dtype=torch.float64, **({"sequence_parallel": True} if is_pair else {}))
    column, row = (partial(kind, width, width, group, **options) for kind in (ColumnParallelLinear, RowParallelLinear))
    torch.manual_seed(0)
    if has_words:
        cut = [VocabParallelEmbedding(width, width, group, **options), column(gather_output=False)]
        uncut = [nn.Embedding(width, width), nn.Linear(width, width)]
    elif is_pair:
        cut = [column(gather_output=False), nn.GELU(), row(input_is_parallel=True)]
        uncut = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)]
    else:
        cut, uncut = [column() if name == LAYERS[0] else row()], [nn.Linear(width, width)]
    one, many = nn.Sequential(*uncut).double(), nn.Sequential(*cut)
    whole = dict(one.named_parameters())
    with torch.no_grad():
        for key, parameter in many.named_parameters():
            parameter.copy_(shard_like(whole[key], parameter))

    def own(tensor, dim):  # this rank's part, where there are parts
        return tensor if dim is None else tensor.chunk(n, dim)[rank]

    sequence_dim, word_dim = 1 if is_pair else None, -1 if has_words else None
    words, targets = torch.randint(width, (2, 2, 4 * n))
    vectors, grad = torch.randn(2, 2, 4 * n, width, dtype=torch.float64)
    x = words if has_words else vectors.requires_grad_()
    got = mine = own(x.detach(), sequence_dim).to(device, copy=True).requires_grad_(x.requires_grad)
    for each in many:
        got = each(got)
        got = got[0] if isinstance(got, tuple) else got  # layers also return a bias, here None
    expected = one(x)
    if has_words:
        tensor_parallel.vocab_parallel_cross_entropy(got, targets.to(device), group).backward()
        nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    else:
        got.backward(own(grad, sequence_dim).to(device))
        expected.backward(grad)
    wanted = {key: shard_like(whole[key].grad, parameter) for key, parameter in many.named_parameters()}
    wanted["output"] = own(own(expected, sequence_dim), word_dim)
    wanted["gradient of the input"] = None if has_words else own(x.grad, sequence_dim)
    return compare({"output": got, "gradient of the input": mine.grad, **gradients(many)}, wanted)


def attention(name: str, dtype: torch.dtype = torch.float64) -> list[Difference]:
    """Attend to a sequence that is cut across the ranks, forward and backward; on GPUs bfloat16 has flash kernels."""
    group, device = dist.group.WORLD, local_device()
    n = group.size()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads * n, 4 * n, 8, dtype=torch.float64) for heads in (2, 1, 1, 2))
    whole = [x.requires_grad_() for x in (q, k, v)]
    held = positions(4 * n, n, group.rank())
    mine = [x.detach()[:, :, held].to(device, dtype).requires_grad_() for x in whole]
    expected = nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(grad)
    got = CONTEXT_PARALLEL[name](*mine, group)
    got.backward(grad[:, :, held].to(device, dtype))
    names = "output", "gradient of q", "gradient of k", "gradient of v"
    wanted = [expected, *(x.grad for x in whole)]
    found = [got, *(x.grad for x in mine)]
    return compare(
        {name: x.double() for name, x in zip(names, found)}, {name: x[:, :, held] for name, x in zip(names, wanted)}
    )


def experts() -> list[Difference]:
    """Compute experts in bfloat16, for which GPUs have one kernel: also one without rows, and no multiple of 8."""
    ends = torch.tensor([5, 5, 12, 37]).int()
    torch.manual_seed(0)
    made = Experts((len(ends), 64, 128), groups_of_one(), False, "none", [xavier_normal_] * 2, dtype=torch.bfloat16)
    x, grad = torch.randn(2, 37, 64).bfloat16()
    found = []
    for device, dtype in ((torch.device("cpu"), torch.float64), (local_device(), torch.bfloat16)):  # a loop, the kernel
        here, rows = copy.deepcopy(made).to(device, dtype), x.to(device, dtype, copy=True).requires_grad_()
        output = here(rows, ends.to(device))
        output.backward(grad.to(device, dtype))
        found.append({"output": output, "gradient of the input": rows.grad, **gradients(here)})
    return compare({name: tensor.double() for name, tensor in found[1].items()}, found[0])


def waits() -> int:
    """Return for how many operations of a layer with experts the host waits for its GPU; 1 is meant."""
    layer = MoELayer(64, 128, 4, 2, groups_of_one(), device=local_device(), dtype=torch.bfloat16)
    x = torch.randn(2, 37, 64).to(local_device(), torch.bfloat16).requires_grad_()
    for _ in range(2):  # the first makes handles and loads kernels
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            output, load = layer(x)
            (output.float().square().mean() + layer.router.loss(load)).backward()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def schedule(name: str) -> list[Difference]:
    """Run one step of a pipeline over all ranks."""
    p, device = dist.get_world_size(), local_device()
    made = SCHEDULES[name](p, 2 * p, 2 if name == "interleaved" else 1)
    whole, copies = (nn.ModuleList(model_chunks(made.num_stages)).double() for _ in range(2))
    x = torch.randn(4 * p, 6, dtype=torch.float64)
    expected = mean_square(nn.Sequential(*whole)(x), None)
    expected.backward()
    with init_groups(ParallelLayout(p, pp_size=p)) as groups:
        numbers = [made.stage_of(groups.coords.pp, chunk) for chunk in range(made.num_chunks)]
        mine = nn.ModuleDict({str(number): copies[number].to(device) for number in numbers})
        loss = pipeline.run(made, list(mine.values()), groups, x.to(device).split(2), loss=mean_square)
    return compare(gradients(mine) | ({} if loss is None else {"loss": loss}), gradients(whole) | {"loss": expected})


def training(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Return what must not depend on the layout."""
    numbers = torch.tensor([[step.loss, step.grad_norm] for step in steps(config)], dtype=torch.float64)
    return dict(zip(("losses", "gradient norms"), numbers.T))


def meet() -> None:
    """Add up across all ranks, and look at the sum: until somebody looks, a GPU waits alone."""
    x = torch.ones(3, device=local_device())
    dist.all_reduce(x)
    x.sum().item()


def stay_away() -> None:
    """Leave rank 0 out of an all-reduce, for which the others then wait."""
    if dist.get_rank():
        meet()


# --- in this process: the rows of a report --------------------------------------------------------------------------


@dataclass
class Ranks:
    """Ranks for all rows; a fault ends them, and the next row gets new ones."""

    num: int
    backend: str
    world: World | None = None
    in_one_process: dict[TrainConfig, dict[str, torch.Tensor]] = field(default_factory=dict)  # each is run once

    def run(self, fn, *args) -> list:
        if self.world is None or self.world.ended:
            self.world = World(self.num, backend=self.backend, timeout_seconds=30)
        return self.world.run(fn, *args)

    def compared(self, fn, *args) -> Outcome:
        return worst(self.run(fn, *args))

    def rounded(self, fn, *args) -> Outcome:
        """As `compared`, for numbers of 8 bits."""
        error, where = worst(self.run(fn, *args))
        if error is None or not error < LARGEST_ERROR_IN_BFLOAT16:
            raise AssertionError(f"the relative error is {error}, {where}")
        return None, f"error {error:.1e}, of at most {LARGEST_ERROR_IN_BFLOAT16:.1e}, {where}"

    def trained(self, config: TrainConfig) -> Outcome:
        sizes = dict.fromkeys(("tp_size", "cp_size", "pp_size", "ep_size"), 1)
        alone = replace(config, **sizes, schedule="1f1b", sequence_parallel=False, zero_stage=0, shard_size=None)
        if alone not in self.in_one_process:
            [self.in_one_process[alone]] = launch(training, alone, world_size=1, backend="gloo")
        expected = self.in_one_process[alone]
        return worst([compare(found, expected) for found in self.run(training, config)])

    def resumed(self, config: TrainConfig) -> Outcome:
        """Save each step in the background, lose the last, and train it again: it must come to the same."""
        with tempfile.TemporaryDirectory() as folder:
            saving = replace(config, checkpoint_dir=folder, save_interval=1, async_save=True)
            through = self.run(training, saving)
            shutil.rmtree(Path(folder, f"step_{config.steps:08d}"))
            again = self.run(training, replace(saving, resume=True))
        last = [{name: values[-1:] for name, values in rank.items()} for rank in through]
        return worst([compare(found, expected) for found, expected in zip(again, last)])

    def waited(self) -> Outcome:
        """Count waits; nothing is right or wrong about them."""
        return None, "only on GPUs" if self.backend == "gloo" else f"{self.run(waits)[0]} for a layer, 1 is meant"

    def deadlock(self) -> Outcome:
        with World(self.num, backend=self.backend, timeout_seconds=10) as world:
            world.run(meet)
            try:
                world.run(stay_away)
            except RankFailed as failed:
                return None, f"{type(failed).__name__}: {str(failed).strip().splitlines()[0]}"
        raise AssertionError("rank 0 stayed away from an all-reduce, and nobody noticed")

    def bandwidth(self) -> Outcome:
        size = (1 << (28 if self.backend == "nccl" else 22)) // (4 * self.num) * 4 * self.num
        [measured], *_ = self.run(measure, "all_reduce", [size])
        speed = f"{measured.algorithm_gb_per_second:.2f} GB/s, {measured.bus_gb_per_second:.2f} GB/s on each link"
        return None, f"{size / 1e6:.0f} MB in {measured.seconds * 1e3:.2f} ms: {speed}"

    def rows(self) -> dict[str, Callable[[], Outcome]]:
        rows = {f"collective: {name}": partial(self.compared, collective, name) for name in OPERATIONS}
        rows |= {f"layer: {name}": partial(self.compared, layer, name) for name in LAYERS}
        rows |= {f"attention: {name}": partial(self.compared, attention, name) for name in CONTEXT_PARALLEL}
        rows |= {"attention: ring, bfloat16": partial(self.rounded, attention, "ring", torch.bfloat16)}
        rows |= {
            "experts: bfloat16, one kernel": partial(self.rounded, experts),
            "experts: waits of the host": self.waited,
        }
        rows |= {f"schedule: {name}": partial(self.compared, schedule, name) for name in SCHEDULES}
        rows |= {f"trainer: {name}": partial(self.trained, config) for name, config in layouts(self.num).items()}
        rows |= {"trainer: resumed, async_save": partial(self.resumed, layouts(self.num)[HYBRID])}
        rows |= {"deadlock, reported or stopped": self.deadlock, "all-reduce, speed only": self.bandwidth}
        alone = ("collective: send and receive", "deadlock, reported or stopped") if self.num == 1 else ()
        return {name: row for name, row in rows.items() if name not in alone}  # those need two


def worst(ranks: list[list[Difference]]) -> Outcome:
    """Return the largest error of all ranks, and where it is."""
    found = [Parity(ranks).worst(rank) for rank in range(len(ranks))]
    rank = max(range(len(ranks)), key=lambda rank: found[rank].error)
    return found[rank].error, f"rank {rank}, {found[rank].name}"


def layouts(n: int) -> dict[str, TrainConfig]:
    """Return small runs for n ranks: along one axis each, in each ZeRO stage, and along as many axes as n allows."""
    tp_size, pp_size = 2 if n % 4 == 0 else 1, 2 if n % 2 == 0 else n
    base = TrainConfig(
        steps=3, batch_size=4 * n, micro_batch_size=2, seq_length=4 * n, hidden_size=8 * n, num_attention_heads=n,
        num_layers=max(2, pp_size), precision="float64", warmup_steps=0,
    )  # fmt: skip
    return {
        **{f"d = {n}, zero_stage = {stage}": replace(base, zero_stage=stage) for stage in (1, 2, 3)},
        HYBRID: replace(base, zero_stage=3, shard_size=divisors(n)[-2:][0]),
        f"t = {n}, sequence parallel": replace(base, tp_size=n, sequence_parallel=True),
        f"c = {n}, model of today": replace(
            base, cp_size=n, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False
        ),
        f"t = {tp_size}, p = {pp_size}, d = {n // tp_size // pp_size}": replace(base, tp_size=tp_size, pp_size=pp_size),
        f"experts, ep = {n // pp_size}, p = {pp_size} in a V": replace(
            base,
            pp_size=pp_size,
            ep_size=n // pp_size,
            schedule="zero-bubble-v",
            num_layers=2 * pp_size,
            zero_stage=1,
            num_experts=2 * n,
            aux_loss="sequence",
            aux_loss_coefficient=0.1,
            bias_update_rate=0.01,
        ),
    }


def judge(name: str, row: Callable[[], Outcome]) -> tuple[str, str, str]:
    """Run a row; return its verdict, its line of the report, and what its error said. No error ends the check."""
    start, error, said = time.monotonic(), None, ""
    try:
        error, note = row()
        verdict = "right" if error is None or error < LARGEST_ERROR else "WRONG"
    except Exception as failure:
        verdict, note, said = "WRONG", f"{type(failure).__name__}, see below", f"## {name}\n\n```\n{failure}\n```"
    size = "" if error is None else f"{error:.1e}"
    return verdict, f"| {name} | {verdict} | {size} | {time.monotonic() - start:.1f} | {note} |", said


def check(world_size: int, backend: str, report: Path) -> Iterator[tuple[str, str]]:
    """Yield verdict and line of each row; write the report anew after each."""
    machine, ranks = look_at_machine(), Ranks(world_size, backend)
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    on_gpus = f"{world_size} of {len(machine.gpus)} GPUs ({names}) over NCCL"
    on = on_gpus if backend == "nccl" else f"{counted(world_size, 'CPU rank')} over gloo. This says nothing about GPUs"
    asked = "timeout 20 nvidia-smi topo -m" if shutil.which("nvidia-smi") else "echo no nvidia-smi on this machine"
    commit, topology = map(subprocess.getoutput, ("git rev-parse HEAD", asked))
    versions = f"Python {platform.python_version()}, CUDA {torch.version.cuda}, lab {commit}"
    judged = []
    report.parent.mkdir(parents=True, exist_ok=True)
    for name, row in ranks.rows().items():
        judged.append(judge(name, row))
        verdicts, lines, said = zip(*judged)
        head = f"# GPU check\n\nRan on {on}.\n{verdicts.count('right')} of {len(judged)} rows are right."
        table = "| what | | worst relative error | seconds | where, or what was seen |\n|---|---|---|---|---|\n"
        parts = [head, table + "\n".join(lines), f"```\n{facts(machine)}\n{versions}\n\n{topology}\n```"]
        report.write_text("\n\n".join([*parts, *filter(None, said)]) + "\n")
        yield verdicts[-1], lines[-1]
    if ranks.world:
        ranks.world.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    num_gpus = torch.cuda.device_count()
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--world-size", type=int, default=num_gpus, help="ranks; by default one per GPU")
    given, report = parser.parse_args(), Path("build/gpu_check.md")
    if given.backend == "nccl" and not 1 <= given.world_size <= num_gpus:
        parser.error(f"torch sees {num_gpus} GPUs here; on the CPU: --backend gloo --world-size 4")
    wrong = 0
    for verdict, line in check(given.world_size, given.backend, report):
        print(line, flush=True)
        wrong += verdict == "WRONG"
    print(f"The report is in {report}.")
    return min(wrong, 1)


if __name__ == "__main__":
    run_command(main)
