"""What a run shows while it runs: a bar with the loss and the speed, in the cell that launched it or in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tqdm import tqdm

from course.sizing import flops_per_step, peak_flops
from labkit.groups import local_device
from labkit.launch import progress
from labkit.train.config import TrainConfig

if TYPE_CHECKING:
    from labkit.train.trainer import Step


class Progress:
    """The bar of a run, moved by rank 0."""

    def __init__(self, config: TrainConfig, steps_done: int):
        self.config, self.is_first_rank = config, dist.get_rank() == 0
        in_a_cell = progress(steps_done, config.steps)
        self.bar = tqdm(
            initial=steps_done, total=config.steps, unit="step", disable=in_a_cell or not self.is_first_rank
        )

    def show(self, step: "Step") -> "Step":
        """Move the bar to a step that is done; returns the step."""
        if self.is_first_rank:
            text = f"loss {step.loss:.4f}, {step.tokens_per_second:,.0f} tokens/s{self._share_of_peak(step.seconds)}"
            progress(step.number, self.config.steps, text)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
            if step.evaluation_loss is not None:
                self.bar.write(f"step {step.number}: evaluation loss {step.evaluation_loss:.4f}")
        return step

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def _share_of_peak(self, seconds: float) -> str:
        """Model FLOP/s as a share of what the GPUs can do; nothing on a CPU, or on a GPU whose peak is not known."""
        peak = peak_flops(torch.cuda.get_device_name()) if local_device().type == "cuda" else None
        if peak is None:
            return ""
        achieved = flops_per_step(self.config.shape, self.config.batch_size, "none") / seconds
        return f", {achieved / (peak * dist.get_world_size()):.0%} of peak"


def describe_start(config: TrainConfig, world_size: int, floor_nats: float | None) -> str:
    """One line: what is about to run.

    Raises:
        ValueError: the config does not fit the number of ranks.
    """
    layout = config.layout(world_size)
    sizes = f"tp {layout.tp_size}, pp {layout.pp_size}, dp {layout.dp_size}"
    on_gpus, threads = local_device().type == "cuda", torch.get_num_threads()
    return "; ".join(
        [
            f"{world_size} {'rank' if world_size == 1 else 'ranks'} ({sizes})",
            "NCCL on GPUs"
            if on_gpus
            else f"gloo on the CPU, {threads} {'thread' if threads == 1 else 'threads'} a rank",
            f"{config.shape.num_parameters:,} parameters in {config.precision}",
            f"{config.batch_size * config.seq_length:,} tokens a step",
            f"the text's floor is {floor_nats:.4f}" if floor_nats else f"no floor is known for {config.text}",
        ]
    )


def describe_end(config: TrainConfig, steps: Sequence["Step"], floor_nats: float | None) -> str:
    """One line: where the loss has come to."""
    if not steps:
        return f"Nothing to do: the checkpoint has {config.steps} steps or more. Give more --steps"
    above = f", {steps[-1].loss - floor_nats:.4f} above the text's floor" if floor_nats else ""
    return f"Step {steps[-1].number}: loss {steps[-1].loss:.4f}{above}"
