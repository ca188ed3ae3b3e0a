"""Stages that sleep a stated time instead of computing, so that two cores can show the schedule of eight ranks.

What runs is real: ranks, messages, the schedule and autograd. Only the work is replaced by sleep, which needs no core.
A timeline made with it must say "paced".
"""

import time

import torch
from torch import nn


class PacedStage(nn.Module):
    """Return the input after a sleep; the backward sleeps too. Their times include their own Python.

    ``weight_gradient_share`` of the backward's time is for the weight gradient, which comes first, the rest for the
    input gradient. ``weight`` is zeros, there so that the stage has a gradient to compute, and to send.

    Raises:
        ValueError: the input is on a GPU.
    """

    def __init__(
        self, forward_seconds: float, backward_seconds: float, weight_gradient_share: float = 0.5, num_weights: int = 1
    ):
        super().__init__()
        self.forward_seconds = forward_seconds
        self.weight_seconds = backward_seconds * weight_gradient_share
        self.input_seconds = backward_seconds - self.weight_seconds
        self.weight = nn.Parameter(torch.zeros(num_weights))
        self._end = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            raise ValueError(
                f"a paced stage got an input on {x.device}, where it would sleep before the input has arrived: "
                "use CPU ranks, backend='gloo'"
            )
        start = time.perf_counter()
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the first stage takes as long as the others
        output = self._paced(x, self.input_seconds) + self._paced(self.weight, self.weight_seconds).sum()
        if output.requires_grad:
            output.register_hook(self._begin_backward)
        time.sleep(max(0.0, start + self.forward_seconds - time.perf_counter()))
        return output

    def _begin_backward(self, _: torch.Tensor) -> None:
        self._end = time.perf_counter()  # of what was done so far

    def _paced(self, x: torch.Tensor, seconds: float) -> torch.Tensor:
        def sleep(_: torch.Tensor) -> None:
            self._end += seconds
            time.sleep(max(0.0, self._end - time.perf_counter()))

        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(sleep)
        return x
