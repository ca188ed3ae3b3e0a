"""Stages that sleep a stated time instead of computing, so that two cores can show the schedule of eight ranks.

What runs is real: ranks, messages, the schedule and autograd. Only the work is replaced by sleep, which needs no core.
A timeline made with it must say "paced".
"""

import time

import torch
from torch import nn


class PacedStage(nn.Module):
    """Gives its input on, after a sleep; its backward sleeps too.

    Where the schedule splits the backward, ``weight_gradient_share`` of it is the weight gradient's, the rest the input
    gradient's. ``weight`` is a number that is zero, so that there is a gradient to compute.

    Raises:
        ValueError: an input on a GPU.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float, weight_gradient_share: float = 0.5):
        super().__init__()
        self.forward_seconds = forward_seconds
        self.weight_seconds = backward_seconds * weight_gradient_share
        self.input_seconds = backward_seconds - self.weight_seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            raise ValueError(
                f"a paced stage got an input on {x.device}, where it would sleep before that has arrived: "
                "use CPU ranks, backend='gloo'"
            )
        start = time.perf_counter()
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the first stage takes its time as the others do
        x = _SleepInBackward.apply(x, self.input_seconds)
        output = x + _SleepInBackward.apply(self.weight, self.weight_seconds)
        time.sleep(max(0.0, start + self.forward_seconds - time.perf_counter()))
        return output


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(ctx.seconds)
        return grad, None
