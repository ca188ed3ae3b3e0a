"""A stage at work: forward and backward of one chunk of the model, micro-batch by micro-batch."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labkit.pipeline.split_backward import SplitBackward
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule


class Stage:
    """Model chunk ``number`` of a schedule; it keeps what went in and what came out until the backward.

    The first stage takes its input from ``inputs``; the last one computes the loss, and ``total`` is its mean so far.
    """

    def __init__(
        self,
        chunk: nn.Module,
        number: int,
        schedule: Schedule,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor] | None,
        loss: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        ignore_index: int,
    ):
        self.chunk, self.inputs, self.targets, self.loss = chunk, inputs, targets, loss
        self.is_first, self.is_last = number == 0, number == schedule.num_model_chunks - 1
        self.trains, self.splits_backward = BACKWARD in schedule.kinds, WEIGHT_GRADIENT in schedule.kinds
        self.shares = _shares(inputs, targets, ignore_index) if self.is_last else []
        self.total: torch.Tensor | None = None
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # micro-batch -> input, output with its graph
        self._halves: dict[int, SplitBackward] = {}

    def do(self, op: Op, arrived: torch.Tensor | None) -> torch.Tensor | None:
        """Run ``op`` on what arrived for it, and return what the next stage needs."""
        if op.kind == FORWARD:
            return self.forward(op, arrived)
        if op.kind == BACKWARD:
            return self.backward(op, arrived)
        return self.weight_gradient(op)

    def forward(self, op: Op, x: torch.Tensor | None) -> torch.Tensor:
        """Return the chunk's output, on the last stage its share of the loss."""
        x = self.inputs[op.micro_batch] if self.is_first else x
        assert x is not None  # every other stage was sent something
        x = x.detach()
        if self.trains and x.is_floating_point() and (not self.is_first or self.splits_backward):
            x.requires_grad_()
        with torch.set_grad_enabled(self.trains):
            output = self.chunk(x)
            if self.is_last:
                target = None if self.targets is None else self.targets[op.micro_batch]
                if share := self.shares[op.micro_batch]:  # 1/m: the one place where losses are averaged
                    output = self.loss(output, target) * share
                else:  # nothing counts, and the mean over nothing would be NaN
                    output = output.flatten()[:0].sum()
                self.total = output.detach() if self.total is None else self.total + output.detach()
        if self.trains:
            self._held[op.micro_batch] = x, output
        return output

    def backward(self, op: Op, grad: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the input; add up those of the weights too, unless they are an op of their own."""
        x, output = self._held.pop(op.micro_batch)
        if self.splits_backward:
            self._halves[op.micro_batch] = halves = SplitBackward(output, x)
            halves.input_gradient(grad)
        elif output.requires_grad:
            torch.autograd.backward(output, grad)
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight_gradient(self, op: Op) -> None:
        """Add up the gradients of the weights, which `backward` left for later."""
        self._halves.pop(op.micro_batch).weight_gradient()


def _shares(inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] | None, ignore_index: int) -> list[float]:
    """Return each micro-batch's share of the mean over all: by its rows, or by its targets that count."""
    counts = [len(rows) for rows in inputs]
    if targets is not None and not targets[0].is_floating_point():
        counted = torch.stack([(target != ignore_index).sum() for target in targets]).tolist()
        counts = counted if any(counted) else counts  # if no target counts, the loss decides the result
    return [count / sum(counts) for count in counts]
