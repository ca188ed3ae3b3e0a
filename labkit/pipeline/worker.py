"""A rank obeys a schedule: op by op it takes what arrived, computes, and sends on.

Nothing is decided here: the order is the schedule's (`labkit.schedules`). Receives are posted ahead of the op that
needs them and sends are not waited for, so messages travel while the rank computes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups
from labkit.pipeline.messages import Messages
from labkit.pipeline.split_backward import SplitBackward
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, check_ops
from labkit.timeline.trace import Trace


def run(
    schedule: Schedule,
    chunks: Sequence[nn.Module],
    groups: ProcessGroups,
    inputs: Sequence[torch.Tensor],
    *,
    loss: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    targets: Sequence[torch.Tensor] | None = None,
    tied: Sequence[nn.Parameter] = (),
    trace: Trace | None = None,
    ahead: int = 4,
) -> torch.Tensor | None:
    """One step of a pipeline: forward and backward of all micro-batches; to be called on every rank of it.

    Gradients are added to ``parameter.grad`` and are those of the mean loss over all rows, as one process would
    get it from the whole batch. Returns that mean on the rank of the last stage, None on the others.

    Args:
        chunks: this rank's parts of the model, in the order of their numbers; one tensor in and one out each.
        inputs: the m micro-batches, [rows, ...], the same on every rank. Stages after the first read only how many rows
            there are, of which the last micro-batch may have fewer.
        loss: from a micro-batch's output and target, the mean over its rows.
        targets: the m targets, for the last stage; without, ``loss`` gets None.
        tied: this rank's copies of a weight that first and last stage share; their gradients are added up.
        trace: gets a span for each op, and one for each wait.
        ahead: for how many ops receives are posted in advance; 0 to post each when its op is next, and wait at once.
            With NCCL at most one of each kind and direction.

    Raises:
        ValueError: sizes that do not fit the schedule, or ops that are missing, before any communication.
    """
    _check(schedule, chunks, groups, inputs, targets)
    tied = [weight for weight in dict.fromkeys(tied) if weight.requires_grad and BACKWARD in schedule.kinds]
    earlier_gradients = _set_aside(tied)
    rank = groups.coords.pp
    numbers = [schedule.stage_of(rank, chunk) for chunk in range(schedule.num_chunks)]
    stages = [
        _Stage(chunk, number == 0, number == schedule.num_model_chunks - 1, schedule.kinds)
        for chunk, number in zip(chunks, numbers)
    ]
    messages = Messages(schedule, groups, [len(rows) for rows in inputs])
    num_rows = sum(len(rows) for rows in inputs)
    ops, total, num_posted = schedule.ranks[rank], None, 0

    for position, op in enumerate(ops):
        num_posted = max(num_posted, position)
        while num_posted < min(position + ahead, len(ops)) and messages.expect(ops[num_posted]):
            num_posted += 1  # in the order of the ops, as NCCL wants it, and as long as the message's size is known
        stage = stages[op.chunk]
        with trace.span("wait", f"for {op}") if trace and messages.comes_from_elsewhere(op) else nullcontext():
            arrived = messages.take(op)
        with trace.span(op.kind, str(op)) if trace else nullcontext():
            if op.kind == FORWARD:
                result = stage.forward(op, inputs[op.micro_batch] if stage.is_first else arrived)
                if stage.is_last:
                    target = None if targets is None else targets[op.micro_batch]
                    share = len(inputs[op.micro_batch]) / num_rows  # 1/m: the one place where losses are averaged
                    result = stage.outputs[op.micro_batch] = loss(result, target) * share
                    total = result.detach() if total is None else total + result.detach()
            elif op.kind == BACKWARD:
                result = stage.backward(op, arrived)
            else:
                stage.weight_gradient(op)
        if op.kind in (FORWARD, BACKWARD):
            messages.send(op, result)
    messages.flush()
    _add_up_tied(tied, earlier_gradients, groups)
    return total


@dataclass
class _Stage:
    """One chunk at work: for each micro-batch in flight, what went in and what came out."""

    chunk: nn.Module
    is_first: bool
    is_last: bool
    kinds: tuple[str, ...]
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    halves: dict[int, SplitBackward] = field(default_factory=dict)

    def forward(self, op: Op, x: torch.Tensor | None) -> torch.Tensor:
        """The chunk's output; kept with its graph if there will be a backward."""
        assert x is not None  # the first stage has its inputs, all others got something
        trains = BACKWARD in self.kinds
        x = x.detach()
        if trains and x.is_floating_point() and (not self.is_first or WEIGHT_GRADIENT in self.kinds):
            x.requires_grad_()
        with torch.set_grad_enabled(trains):
            output = self.chunk(x)
        if trains:
            self.inputs[op.micro_batch], self.outputs[op.micro_batch] = x, output
        return output

    def backward(self, op: Op, grad: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the input; those of the weights too, unless they are an op of their own."""
        x, output = self.inputs.pop(op.micro_batch), self.outputs.pop(op.micro_batch)
        if WEIGHT_GRADIENT in self.kinds:
            self.halves[op.micro_batch] = halves = SplitBackward(output, x)
            halves.input_gradient(grad)
        elif output.requires_grad:
            torch.autograd.backward(output, grad)
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight_gradient(self, op: Op) -> None:
        """The gradients of the weights, which `backward` left."""
        self.halves.pop(op.micro_batch).weight_gradient()


def _set_aside(tied: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Take away the gradients from before this step, and return them: the copies have them already alike."""
    earlier = [parameter.grad for parameter in tied]
    for parameter in tied:
        parameter.grad = None
    return earlier


def _add_up_tied(tied: Sequence[nn.Parameter], earlier: Sequence[torch.Tensor | None], groups: ProcessGroups) -> None:
    """Give all copies of a shared weight, on this rank and on its partner, the sum of their gradients."""
    if not tied:
        return
    total = torch.zeros_like(tied[0])
    for parameter in tied:
        if parameter.grad is not None:
            total += parameter.grad
    if groups.embedding.size() > 1:
        dist.all_reduce(total, group=groups.embedding)
    for parameter, before in zip(tied, earlier):
        parameter.grad = total.clone() if before is None else before.add_(total)


def _check(schedule: Schedule, chunks, groups: ProcessGroups, inputs, targets) -> None:
    m, p = schedule.num_micro_batches, groups.layout.pp_size
    if schedule.num_stages != p:
        raise ValueError(
            f"{schedule.name!r} is for {schedule.num_stages} ranks, the layout has pp_size={p}: they must agree"
        )
    check_ops(schedule)
    if len(chunks) != schedule.num_chunks:
        raise ValueError(f"{len(chunks)} chunks for a schedule of num_chunks={schedule.num_chunks}: give that many")
    for name, given in (("inputs", inputs), ("targets", targets)):
        if given is not None and len(given) != m:
            raise ValueError(f"{len(given)} {name} for a schedule of num_micro_batches={m}: give that many")
    for number, rows in enumerate(inputs):
        if len(rows) == 0:
            raise ValueError(f"micro-batch {number} of {m} has no rows: use fewer micro-batches or a larger batch")
        if (rows.shape[1:], rows.dtype) != (inputs[0].shape[1:], inputs[0].dtype):
            raise ValueError(
                f"micro-batch {number} is {_describe(rows)}, micro-batch 0 is {_describe(inputs[0])}: "
                "they may differ in the number of rows only, so pad them to one size"
            )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
