"""Shows a run on stdout, as a bar or as lines in a log, with a line before and after; writes its
metrics to files.
"""

import json
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit.groups import local_device
from labkit.launch import progress
from labkit.layout import ParallelLayout
from labkit.sizes import counted, ranks_text
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
    with ExitStack() as open_files:
        console = _Console(config, steps_done, open_files)

        def show(step: Step) -> Step:
            memory = None
            if console.is_logged(step):
                memory = peak_memory_bytes()  # every rank takes part
            if dist.get_rank() == 0:
                console.show(step, memory)
            return step

        yield show


class _Console:
    """What a run shows and writes of its steps; only the first rank does."""

    def __init__(self, config: TrainConfig, steps_done: int, open_files: ExitStack):
        self.config = config
        self.steps_done = steps_done
        self.in_a_cell = progress(steps_done, config.steps)
        self.metrics = open_metrics(config, steps_done)
        if self.metrics is not None:
            open_files.enter_context(self.metrics)
        self.board = open_tensorboard(config, steps_done)
        if self.board is not None:
            open_files.enter_context(self.board)
        is_shown = dist.get_rank() == 0 and not self.in_a_cell
        bar = tqdm(
            initial=steps_done,
            total=config.steps,
            unit="step",
            disable=None if is_shown else True,  # None: unless it is a terminal
            file=sys.stdout,
        )
        self.bar = open_files.enter_context(bar)

    def is_logged(self, step: Step) -> bool:
        is_first_or_last = step.step in (self.steps_done + 1, self.config.steps)
        is_due = step.step % self.config.log_interval == 0
        return is_first_or_last or is_due or bool(step.exit_reason)

    def show(self, step: Step, memory_bytes: int | None) -> None:
        self._show_progress(step, memory_bytes)
        if step.evaluation_loss is not None:
            self.bar.write(f"step {step.step}: evaluation loss {step.evaluation_loss:.4f}")
        if self.metrics is not None:
            self._write_metrics(step, memory_bytes)
        if self.board is not None:
            for name, value in asdict(step).items():
                if isinstance(value, float):
                    self.board.add_scalar(name, value, step.step)

    def _show_progress(self, step: Step, memory_bytes: int | None) -> None:
        last = self.config.steps
        short = f"loss {step.loss:.4f}, {step.tokens_per_second:,.0f} tokens/s"
        progress(step.step, last, short)  # where ranks run for a cell
        facts = describe_step(step, self.config, memory_bytes)
        self.bar.set_postfix_str(facts, refresh=False)
        self.bar.update()
        if self.bar.disable and not self.in_a_cell and memory_bytes is not None:
            left = tqdm.format_interval((last - step.step) * step.seconds)
            print(f"step {step.step}/{last}: {facts}, {left} left", flush=True)

    def _write_metrics(self, step: Step, memory_bytes: int | None) -> None:
        assert self.metrics is not None
        about = asdict(step)
        about["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        about["peak_memory_bytes"] = memory_bytes
        if self.steps_done and step.step == self.steps_done + 1:
            about["resumed_after"] = self.steps_done
        try:
            self.metrics.write(f"{json.dumps(about)}\n".encode())
        except OSError as error:  # no reason to end a run
            fault = f"{self.config.metrics} cannot be written ({error.strerror})"
            self.bar.write(f"{fault}: the run goes on without metrics")
            self.metrics = None


def describe_step(step: Step, config: TrainConfig, memory_bytes: int | None) -> str:
    """Return the facts of a step, with the peak memory of the worst rank if it is known, and MFU on
    a known GPU.

    MFU is the share of the GPU's peak that the model's own products take, without what is
    recomputed.
    """
    tokens_per_second = step.tokens_per_second / dist.get_world_size()
    facts = [
        f"loss {step.loss:.4f}",
        f"norm {step.grad_norm:.3g}",
        f"lr {step.learning_rate:.2e}",
        f"{1000 * step.seconds:,.0f} ms",
        f"{tokens_per_second:,.0f} tokens/s per rank",
    ]
    if local_device().type == "cuda" and config.precision == "bfloat16":
        gpu = torch.cuda.get_device_name()
        for name, peak in PEAK_FLOPS.items():
            if name in gpu:
                flops = tokens_per_second * config.shape.flops_per_token
                facts.append(f"MFU {flops / peak:.0%}")
    if memory_bytes is not None:
        facts.append(f"peak {memory_bytes / 2**30:.2f} GiB")
    return ", ".join(facts)


def peak_memory_bytes() -> int:
    """Return the most memory that any rank has had: in tensors on a GPU, in all on the CPU. All
    ranks call it.
    """
    device = local_device()
    if device.type == "cuda":
        num_bytes = torch.cuda.max_memory_allocated()
    else:
        num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux
    peak = torch.tensor(num_bytes, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def describe_start(config: TrainConfig, world_size: int, floor_nats: float | None) -> str:
    """Return one line that says what is about to run; raise a ValueError if it does not fit the
    number of ranks.
    """
    resized = config.resize_to(world_size)
    threads = counted(torch.get_num_threads(), "thread")
    on_gpu = local_device().type == "cuda"
    parts = [
        _describe_layout(config, resized, world_size),
        "NCCL on GPUs" if on_gpu else f"gloo on the CPU, {threads} per rank",
    ]
    layers = resized.layers_per_stage(config.num_layers)
    if len(set(layers)) > 1:
        parts.append(f"stages of {ranks_text(layers)} layers")
    floor = f"no floor is known for {config.tokens or config.text}"
    if floor_nats:
        floor = f"the text's floor is {floor_nats:.4f}"
    parts += [
        _describe_model(config),
        f"{config.batch_size * config.seq_length:,} tokens per step",
        floor,
        *_of_the_rate(config),
        f"seed {config.seed}; host {socket.gethostname()}",
        f"torch {torch.__version__}, Python {platform.python_version()}",
    ]
    return "; ".join(parts)


def _describe_layout(config: TrainConfig, resized: TrainConfig, world_size: int) -> str:
    layout = resized.layout(world_size)
    sizes = f"{_sizes(layout)}, dp {layout.dp_size}"
    if resized is not config:
        sizes += f" instead of {_sizes(config)}"
    zero = f", ZeRO stage {config.zero_stage}" if config.zero_stage else ""
    return f"{counted(world_size, 'rank')} ({sizes}){zero}"


def _describe_model(config: TrainConfig) -> str:
    text = f"{config.shape.num_parameters:,} parameters"
    if config.num_experts:
        text += f", {config.shape.num_active_parameters:,} of them for a token,"
    text += f" in {config.precision}"
    if config.init_from:
        text += f", weights from {config.init_from}"
    return text


def _of_the_rate(config: TrainConfig) -> list[str]:
    """Return what somebody who set the learning rate would want to know, if anything."""
    if config.warmup_steps <= config.steps:
        return []
    highest = config.learning_rate_at(config.steps - 1)
    steps = f"--warmup-steps {config.warmup_steps} of --steps {config.steps}"
    instead = f"to {highest:.2g} instead of {config.learning_rate:.2g}"
    return [f"the learning rate only rises ({steps}), {instead}"]


def _sizes(of: TrainConfig | ParallelLayout) -> str:
    cp = f"cp {of.cp_size}, " if of.cp_size > 1 else ""
    ep = f", ep {of.ep_size}" if of.ep_size > 1 else ""
    return f"tp {of.tp_size}, {cp}pp {of.pp_size}{ep}"


def describe_end(config: TrainConfig, steps: Sequence[Step], floor_nats: float | None) -> str:
    """Return one line that says how low the loss has come, and what it took."""
    if not steps:
        return _describe_nothing(config)
    last = steps[-1]
    text = f"Step {last.step}: loss {last.loss:.4f}"
    if floor_nats:
        text += f", {last.loss - floor_nats:.4f} above the text's floor"
    tokens = len(steps) * config.batch_size * config.seq_length
    seconds = tqdm.format_interval(sum(step.seconds for step in steps))
    text += f"; {counted(len(steps), 'step')} and {tokens:,} tokens in {seconds}"
    if last.exit_reason:
        saved = "nothing is saved"
        if config.checkpoint_dir:
            saved = "a checkpoint is saved, --resume continues from it"
        text += f". Ended early ({last.exit_reason}): {saved}"
    return text


def _describe_nothing(config: TrainConfig) -> str:
    from labtrain import checkpoint  # it imports half of torch

    newest = checkpoint.newest(str(config.checkpoint_dir))
    done = checkpoint.step_of(newest) if newest else config.steps
    fault = f"Nothing to do: the checkpoint has {counted(done, 'step')}"
    return f"{fault}: use --steps {done + 1} or more"
