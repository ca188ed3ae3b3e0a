"""Shows a run: a bar with loss and speed, or lines in a log; and a line before and after."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit.groups import local_device
from labkit.launch import progress
from labkit.layout import ParallelLayout
from labkit.sizes import counted
from labkit.train.config import TrainConfig


@dataclass(frozen=True)
class Step:
    """The results of one step, the same on every rank; ``number`` counts from 1."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    evaluation_loss: float | None = None
    ends_early: str = ""  # why the run ends with this step, before its time


@contextmanager
def progress_bar(config: TrainConfig, steps_done: int) -> Iterator[Callable[[Step], Step]]:
    """Show the bar of a run inside the block. It yields a function that takes each finished step and returns it."""
    is_first_rank, in_a_cell = dist.get_rank() == 0, progress(steps_done, config.steps)

    def show(step: Step) -> Step:
        if is_first_rank:
            text = f"loss {step.loss:.4f}, {step.tokens_per_second:,.0f} tokens/s"
            progress(step.number, config.steps, text)
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if bar.disable and not in_a_cell and (step.number == 1 or step.number % config.log_interval == 0):
                print(f"step {step.number}/{config.steps}: {text}", file=sys.stderr, flush=True)
            if step.evaluation_loss is not None:
                bar.write(f"step {step.number}: evaluation loss {step.evaluation_loss:.4f}")
        return step

    disable = True if in_a_cell or not is_first_rank else None  # None: unless it is a terminal
    with tqdm(initial=steps_done, total=config.steps, unit="step", disable=disable) as bar:
        yield show


def describe_start(config: TrainConfig, world_size: int, floor_nats: float | None) -> str:
    """Return one line that says what is about to run; raise a ValueError if it does not fit the number of ranks."""
    fitted = config.fitted(world_size)
    layout, threads = fitted.layout(world_size), counted(torch.get_num_threads(), "thread")
    text, instead = config.tokens or config.text, "" if fitted is config else f" instead of {_sizes(config)}"
    zero = f", ZeRO stage {config.zero_stage}" if config.zero_stage else ""
    parts = [
        f"{counted(world_size, 'rank')} ({_sizes(layout)}, dp {layout.dp_size}{instead}){zero}",
        "NCCL on GPUs" if local_device().type == "cuda" else f"gloo on the CPU, {threads} per rank",
        f"{config.shape.num_parameters:,} parameters in {config.precision}",
        f"{config.batch_size * config.seq_length:,} tokens per step",
        f"the text's floor is {floor_nats:.4f}" if floor_nats else f"no floor is known for {text}",
    ]
    return "; ".join(parts)


def _sizes(of: TrainConfig | ParallelLayout) -> str:
    cp = f"cp {of.cp_size}, " if of.cp_size > 1 else ""
    return f"tp {of.tp_size}, {cp}pp {of.pp_size}"


def describe_end(config: TrainConfig, steps: Sequence[Step], floor_nats: float | None) -> str:
    """Return one line that says how low the loss has come."""
    if not steps:
        return f"Nothing to do: the checkpoint has {config.steps} steps or more. Give more --steps"
    last = steps[-1]
    above = f", {last.loss - floor_nats:.4f} above the text's floor" if floor_nats else ""
    saved = "a checkpoint is saved, --resume continues from it" if config.checkpoint_dir else "nothing is saved"
    early = f". Ended early ({last.ends_early}): {saved}" if last.ends_early else ""
    return f"Step {last.number}: loss {last.loss:.4f}{above}{early}"
