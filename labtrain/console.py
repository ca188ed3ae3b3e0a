"""Shows a run on stdout, as a bar or as lines in a log, with a line before and after; writes its
metrics to files.
"""

import json
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
import torch.distributed as dist
from labkit.groups import local_device
from labkit.launch import progress
from labkit.layout import ParallelLayout
from labkit.sizes import counted, ranks_text
from tqdm import tqdm

from labtrain.config import TrainConfig
from labtrain.metrics import open_metrics, open_tensorboard

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 products per second of GPUs with these words in their names.

Source: NVIDIA's data sheets.
"""


@dataclass(frozen=True)
class Step:
    """The results of one step, the same on every rank; ``step`` counts from 1."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    evaluation_loss: float | None = None
    exit_reason: str = ""  # why the run ends with this step, before its time


@contextmanager
def progress_bar(config: TrainConfig, steps_done: int) -> Iterator[Callable[[Step], Step]]:
    """Show a run inside the block, as a bar or as lines; yield a function that takes each finished
    step and returns it.

    All ranks call it, with every step. The first one writes metrics.
    """
    is_first_rank, in_a_cell = dist.get_rank() == 0, progress(steps_done, config.steps)
    metrics = open_metrics(config, steps_done)
    board = open_tensorboard(config, steps_done)

    def show(step: Step) -> Step:
        nonlocal metrics
        is_logged = step.step % config.log_interval == 0 or step.step in (
            steps_done + 1,
            config.steps,
        )
        memory = peak_memory_bytes() if is_logged or step.exit_reason else None
        if is_first_rank:
            facts = describe_step(step, config, memory)
            progress(
                step.step,
                config.steps,
                f"loss {step.loss:.4f}, {step.tokens_per_second:,.0f} tokens/s",
            )
            bar.set_postfix_str(facts, refresh=False)
            bar.update()
            if bar.disable and not in_a_cell and memory is not None:
                left = tqdm.format_interval((config.steps - step.step) * step.seconds)
                print(f"step {step.step}/{config.steps}: {facts}, {left} left", flush=True)
            if step.evaluation_loss is not None:
                bar.write(f"step {step.step}: evaluation loss {step.evaluation_loss:.4f}")
            if metrics is not None:
                about = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "peak_memory_bytes": memory,
                }
                about |= (
                    {"resumed_after": steps_done}
                    if steps_done and step.step == steps_done + 1
                    else {}
                )
                try:
                    metrics.write(f"{json.dumps(asdict(step) | about)}\n".encode())
                except OSError as error:  # no reason to end a run
                    fault = f"{config.metrics} cannot be written ({error.strerror})"
                    bar.write(f"{fault}: the run goes on without metrics")
                    metrics = None
            for name, value in asdict(step).items():
                if board is not None and isinstance(value, float):
                    board.add_scalar(name, value, step.step)
        return step

    disable = True if in_a_cell or not is_first_rank else None  # None: unless it is a terminal
    bar = tqdm(
        initial=steps_done, total=config.steps, unit="step", disable=disable, file=sys.stdout
    )
    with metrics or nullcontext(), board or nullcontext(), bar:
        yield show


def describe_step(step: Step, config: TrainConfig, memory_bytes: int | None) -> str:
    """Return the facts of a step, with the peak memory of the worst rank if it is known, and MFU on
    a known GPU.

    MFU is the share of the GPU's peak that the model's own products take, without what is
    recomputed.
    """
    tokens_per_second = step.tokens_per_second / dist.get_world_size()
    facts = [f"loss {step.loss:.4f}", f"norm {step.grad_norm:.3g}", f"lr {step.learning_rate:.2e}"]
    facts += [f"{1000 * step.seconds:,.0f} ms", f"{tokens_per_second:,.0f} tokens/s per rank"]
    gpu = torch.cuda.get_device_name() if local_device().type == "cuda" else ""
    for peak in (
        peak for name, peak in PEAK_FLOPS.items() if name in gpu and config.precision == "bfloat16"
    ):
        facts.append(f"MFU {tokens_per_second * config.shape.flops_per_token / peak:.0%}")
    return ", ".join(
        [*facts, *([f"peak {memory_bytes / 2**30:.2f} GiB"] if memory_bytes is not None else [])]
    )


def peak_memory_bytes() -> int:
    """Return the most memory that any rank has had: in tensors on a GPU, in all on the CPU. All
    ranks call it.
    """
    device = local_device()
    on_gpu, kib = device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 1024 * kib, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def describe_start(config: TrainConfig, world_size: int, floor_nats: float | None) -> str:
    """Return one line that says what is about to run; raise a ValueError if it does not fit the
    number of ranks.
    """
    fitted = config.fitted(world_size)
    layout, threads = fitted.layout(world_size), counted(torch.get_num_threads(), "thread")
    text, instead = (
        config.tokens or config.text,
        "" if fitted is config else (f" instead of {_sizes(config)}"),
    )
    zero = f", ZeRO stage {config.zero_stage}" if config.zero_stage else ""
    layers = fitted.layers_per_stage
    split = [f"stages of {ranks_text(layers)} layers"] if len(set(layers)) > 1 else []
    active = (
        f", {config.shape.num_active_parameters:,} of them for a token,"
        if config.num_experts
        else ""
    )
    parts = [
        f"{counted(world_size, 'rank')} ({_sizes(layout)}, dp {layout.dp_size}{instead}){zero}",
        "NCCL on GPUs" if local_device().type == "cuda" else f"gloo on the CPU, {threads} per rank",
        *split,
        f"{config.shape.num_parameters:,} parameters{active} in {config.precision}"
        + (f", weights from {config.init_from}" if config.init_from else ""),
        f"{config.batch_size * config.seq_length:,} tokens per step",
        f"the text's floor is {floor_nats:.4f}" if floor_nats else f"no floor is known for {text}",
        *_of_the_rate(config),
        f"seed {config.seed}; host {socket.gethostname()}",
        f"torch {torch.__version__}, Python {platform.python_version()}",
    ]
    return "; ".join(parts)


def _of_the_rate(config: TrainConfig) -> list[str]:
    """Return what somebody who set the learning rate would want to know, if anything."""
    if config.warmup_steps <= config.steps:
        return []
    highest = config.learning_rate_at(config.steps - 1)
    steps = f"--warmup-steps {config.warmup_steps} of --steps {config.steps}"
    return [
        f"the learning rate only rises ({steps}), to {highest:.2g} instead of "
        f"{config.learning_rate:.2g}"
    ]


def _sizes(of: TrainConfig | ParallelLayout) -> str:
    cp = f"cp {of.cp_size}, " if of.cp_size > 1 else ""
    ep = f", ep {of.ep_size}" if of.ep_size > 1 else ""
    return f"tp {of.tp_size}, {cp}pp {of.pp_size}{ep}"


def describe_end(config: TrainConfig, steps: Sequence[Step], floor_nats: float | None) -> str:
    """Return one line that says how low the loss has come, and what it took."""
    if not steps:
        from labtrain import checkpoint  # it imports half of torch

        newest = checkpoint.newest(str(config.checkpoint_dir))
        done = checkpoint.step_of(newest) if newest else config.steps
        return (
            f"Nothing to do: the checkpoint has {counted(done, 'step')}: use --steps "
            f"{done + 1} or more"
        )
    last = steps[-1]
    above = f", {last.loss - floor_nats:.4f} above the text's floor" if floor_nats else ""
    saved = (
        "a checkpoint is saved, --resume continues from it"
        if config.checkpoint_dir
        else "nothing is saved"
    )
    early = f". Ended early ({last.exit_reason}): {saved}" if last.exit_reason else ""
    seconds, tokens = (
        sum(step.seconds for step in steps),
        len(steps) * config.batch_size * config.seq_length,
    )
    totals = (
        f"{counted(len(steps), 'step')} and {tokens:,} tokens in {tqdm.format_interval(seconds)}"
    )
    return f"Step {last.step}: loss {last.loss:.4f}{above}; {totals}{early}"
