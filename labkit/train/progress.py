"""What a run shows while it runs: a bar with the loss and the speed, in the cell that launched it or in a terminal."""

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit.groups import local_device
from labkit.launch import progress
from labkit.sizing import flops_per_step, peak_flops
from labkit.train.config import TrainConfig


class Progress:
    """The bar of a run, moved by rank 0."""

    def __init__(self, config: TrainConfig, steps_done: int):
        self.config, self.is_first_rank = config, dist.get_rank() == 0
        in_a_cell = progress(steps_done, config.steps)
        self.bar = tqdm(
            initial=steps_done, total=config.steps, unit="step", disable=in_a_cell or not self.is_first_rank
        )

    def show(self, step) -> None:
        """Move the bar to a step that is done."""
        if self.is_first_rank:
            text = f"loss {step.loss:.4f}, {step.tokens_per_second:,.0f} tokens/s{self._share_of_peak(step.seconds)}"
            progress(step.number, self.config.steps, text)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
            if step.evaluation_loss is not None:
                self.bar.write(f"step {step.number}: evaluation loss {step.evaluation_loss:.4f}")

    def close(self) -> None:
        self.bar.close()

    def _share_of_peak(self, seconds: float) -> str:
        """Model FLOP/s as a share of what the GPUs can do; nothing on a CPU, or on a GPU whose peak is not known."""
        peak = peak_flops(torch.cuda.get_device_name()) if local_device().type == "cuda" else None
        if peak is None:
            return ""
        achieved = flops_per_step(self.config.shape, self.config.batch_size, "none") / seconds
        return f", {achieved / (peak * dist.get_world_size()):.0%} of peak"
