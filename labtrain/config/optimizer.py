"""Options of the optimizer: how many steps it takes, and how large ones."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from labtrain.config.values import check_numbers

OF_RATES = ("learning_rate", "min_learning_rate", "weight_decay", "clip_norm")


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW's numbers. The learning rate rises linearly, then falls along half a cosine."""

    steps: int = 100  # Steps of the optimizer.
    # Type of weights and activations; with bfloat16 the optimizer keeps float32 master weights.
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    learning_rate: float = 3e-3  # The highest learning rate of AdamW.
    # The rate after a cosine's last step; by default a tenth of learning_rate.
    min_learning_rate: float | None = None
    warmup_steps: int = 10  # Steps in which the learning rate rises to its highest value.
    weight_decay: float = 0.1  # Weight decay of AdamW, for matrices only.
    # Gradients are scaled down to this global norm; 0 leaves them as they are.
    clip_norm: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        """The precision as a torch dtype."""
        return getattr(torch, self.precision)

    @property
    def lowest_learning_rate(self) -> float:
        """The learning rate after the last step."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of a step, counted from 0: it rises linearly, then falls along half a
        cosine.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.lowest_learning_rate + (self.learning_rate - self.lowest_learning_rate) * cosine

    def _check_rates(self) -> None:
        check_numbers(self, OF_RATES, most=1000)
        if self.learning_rate == 0:
            raise ValueError("learning_rate=0 learns nothing: use a number above 0, such as 0.003")
        if self.lowest_learning_rate > self.learning_rate:
            lowest = f"min_learning_rate={self.min_learning_rate}"
            fault = f"{lowest} is above learning_rate={self.learning_rate}, so the rate would rise"
            raise ValueError(f"{fault}: use at most that, or leave it out for a tenth of it")
