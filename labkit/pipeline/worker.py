"""Executes one rank's ops of a pipeline schedule: receive, compute, send.

The order is the schedule's, messages included (`labkit.schedules.lowered`): `Messages` sends and
receives while a `Stage` computes. A rank waits where it needs what has not come yet.

Communication: the activations and gradients of `Messages`; the gradients of replicas, and before
them how many targets each has; at the end one all-reduce of the gradient of a tied weight.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from labkit.data_parallel.replicas import DataParallelBase
from labkit.groups import ProcessGroups
from labkit.pipeline.averaging import Averaging, all_reduce_tied_grads
from labkit.pipeline.messages import ActivationSpec, Messages
from labkit.pipeline.split_backward import split_backward
from labkit.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Message,
    Op,
    Schedule,
    lowered,
)
from labkit.schedules import check as check_schedule
from labkit.timeline.trace import Trace

Loss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def run(
    schedule: Schedule,
    chunks: Sequence[nn.Module],  # of this rank, in the order of their numbers
    groups: ProcessGroups,
    inputs: Sequence[torch.Tensor],  # m micro-batches, [rows, ...]; later stages use their shapes
    *,
    loss: Loss,  # of the last stage's output and a target (or None), the mean over rows or targets
    targets: Sequence[torch.Tensor] | None = None,  # m of them, for the last stage
    ignore_index: int | None = -100,  # the integer target that `loss` leaves out; None: all count
    tied: Sequence[nn.Parameter] = (),  # local copies of a weight that first and last stage share
    average: bool = False,  # gradients over replicas: each chunk must be a `DataParallelBase`
    reduce_every_micro_batch: bool = False,  # in each backward, so shards have no unsharded sums
    trace: Trace | None = None,  # gets a span for each op and each wait
    activation_spec: ActivationSpec | None = None,  # between stages; None: as inputs[0]
    recv_ahead: bool = True,  # False where a pair of ranks has one queue for all its messages
    allow_deadlock: bool = False,  # run it even if it deadlocks, to see what is reported
) -> torch.Tensor | None:
    """Run one step of a pipeline: forward and backward of all micro-batches.

    Every rank of the pipeline calls it. Gradients are added to ``parameter.grad``: those of the
    mean loss over all rows of all micro-batches, or over all targets that count. The rank of the
    last stage returns that mean, the others None.

    With ``average``, targets are counted over all replicas: the mean over the replicas of what they
    return is the mean over all targets. If rows count, all replicas must have equally many.

    Raises:
        ValueError: before any communication: sizes do not fit, or the schedule cannot run.
    """
    check_schedule(schedule, allow_deadlock)
    _check_arguments(
        schedule, chunks, groups, inputs, targets, tied, average, reduce_every_micro_batch
    )
    if schedule.pp_size > 1:
        _check_activation_spec(activation_spec, inputs[0].dtype)
    pp_rank = groups.coords.pp
    span = trace.span if trace else lambda *_: nullcontext()
    messages = Messages(schedule, groups, inputs, activation_spec, span)
    averaging = Averaging(schedule, pp_rank, chunks, average, reduce_every_micro_batch)
    stages = [
        Stage(chunk, number, schedule, inputs, targets, loss, ignore_index, average)
        for chunk, number in zip(chunks, schedule.stages[pp_rank])
    ]
    ops = lowered(schedule, recv_ahead)[pp_rank]  # with its sends and receives between them
    with all_reduce_tied_grads(tied, schedule, groups):  # at its end
        with averaging.postponed():  # only the ops that `averaging` chooses send gradients
            _do_all(ops, stages, messages, averaging, span)
        messages.flush()  # this rank's last sends
        averaging.finish()  # wait for the averages
    return next((stage.total for stage in stages if stage.is_last), None)


def _do_all(ops: Sequence[Op | Message], stages, messages: Messages, averaging: Averaging, span):
    """Do what one rank has to do, in its order: messages, and passes of micro-batches."""
    for op in ops:
        if isinstance(op, Message):
            messages.do(op)
            continue
        arrived = messages.take(op)
        with span(op.kind, str(op), op), averaging.during(op):
            result = stages[op.chunk].do(op, arrived)
        messages.give(op, result)


class Stage:
    """Forward and backward of the model's stage ``number``, and the activations that it keeps in
    between.

    The first stage takes its input from ``inputs``; the last one computes the loss. ``total`` adds
    up its shares of the mean loss: after all micro-batches, it is the mean.
    """

    def __init__(
        self,
        chunk: nn.Module,
        number: int,
        schedule: Schedule,
        inputs,
        targets,
        loss,
        ignore_index,
        average,
    ):
        self.chunk = chunk
        self.inputs = inputs
        self.targets = targets
        self.loss = loss
        self.is_first = number == 0
        self.is_last = number == schedule.num_stages - 1
        self.trains = BACKWARD in schedule.kinds
        self.splits_backward = WEIGHT_GRADIENT in schedule.kinds
        replica_groups: Sequence[dist.ProcessGroup] = ()
        if average and isinstance(chunk, DataParallelBase):
            replica_groups = chunk.groups
        self.loss_weights: list[float] = []
        if self.is_last:
            self.loss_weights = _loss_weights(inputs, targets, ignore_index, replica_groups)
        self.total: torch.Tensor | None = None
        # By micro-batch: the input, and the root of the output's graph, if it has one. Not the
        # output: its memory is free once it is sent (Megatron-LM: deallocate_pipeline_outputs).
        self._held: dict[int, tuple[torch.Tensor, GradientEdge | None]] = {}
        # By micro-batch: what computes them
        self._weight_gradients: dict[int, Callable[[], None]] = {}

    def do(self, op: Op, arrived: torch.Tensor | None) -> torch.Tensor | None:
        """Run ``op`` on what arrived for it, and return what a neighbouring stage needs: the next
        one in forward, the one before in backward.
        """
        if op.kind == FORWARD:
            return self.forward(op, arrived)
        if op.kind == BACKWARD:
            return self.backward(op, arrived)
        compute_weight_gradients = self._weight_gradients.pop(op.micro_batch, None)
        if compute_weight_gradients is not None:  # None: nothing on this stage is trained
            compute_weight_gradients()
        return None

    def forward(self, op: Op, x: Any) -> torch.Tensor:
        """Return the chunk's output, on the last stage its share of the loss."""
        x = (self.inputs[op.micro_batch] if self.is_first else x).detach()
        # The first stage's input needs no gradient. But a split backward follows the path from the
        # output to x.
        if self.trains and x.is_floating_point() and (not self.is_first or self.splits_backward):
            x.requires_grad_()
        with torch.set_grad_enabled(self.trains):
            output = self.chunk(x)
            if self.is_last:
                output = self._share_of_loss(op, output)
        if self.is_last:
            self.total = output.detach() if self.total is None else self.total + output.detach()
        else:
            _check_output(op, output)
        if self.trains:
            root = get_gradient_edge(output) if output.requires_grad else None
            self._held[op.micro_batch] = x, root
        return output

    def _share_of_loss(self, op: Op, output: torch.Tensor) -> torch.Tensor:
        """Return what a micro-batch adds to the mean loss: this is the one place where losses are
        averaged.
        """
        weight = self.loss_weights[op.micro_batch]
        if weight == 0:  # nothing counts, and the mean over nothing would be NaN
            return output.flatten()[:0].sum()  # zero, with a graph: backward runs as usual
        target = None if self.targets is None else self.targets[op.micro_batch]
        return self.loss(output, target) * weight  # 1/m, if micro-batches count alike

    def backward(self, op: Op, grad: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the input; add up those of the weights too, unless they are an op
        of their own.
        """
        x, root = self._held.pop(op.micro_batch)
        if root is not None and self.splits_backward:
            self._weight_gradients[op.micro_batch] = split_backward(root, x, grad)
        elif root is not None:
            torch.autograd.backward(root, grad)
        # None on a first stage, where nobody takes it, or if the output does not depend on x
        return torch.zeros_like(x) if x.grad is None else x.grad


def _check_output(op: Op, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return
    is_tensor = isinstance(output, torch.Tensor)
    what = f"{output.dtype} tensor" if is_tensor else type(output).__name__
    raise ValueError(f"{op} gave a {what}: a stage must give one tensor of floats")


def _loss_weights(
    inputs: Sequence[torch.Tensor],
    targets,
    ignore_index: int | None,
    replica_groups: Sequence[dist.ProcessGroup],
) -> list[float]:
    """Return each micro-batch's share of the mean over all: by its rows, or by its targets that
    count.

    With d replicas, whose gradients are then averaged, the shares of all of them add up to d.
    """
    num_rows = [len(rows) for rows in inputs]
    by_rows = [count / sum(num_rows) for count in num_rows]
    if targets is None or ignore_index is None or targets[0].is_floating_point():
        return by_rows
    counts = torch.stack([(target != ignore_index).sum() for target in targets])
    total = counts.sum(0, keepdim=True)
    for group in replica_groups:
        dist.all_reduce(total, group=group)
    # One tensor, so that the host waits for the device once
    *local, everywhere = torch.cat([counts, total]).tolist()
    if everywhere == 0:
        return by_rows  # the loss decides the result
    num_replicas = math.prod(group.size() for group in replica_groups)
    return [count * num_replicas / everywhere for count in local]


def _check_arguments(
    schedule: Schedule, chunks, groups, inputs, targets, tied, average, reduce_every_micro_batch
):
    m = schedule.num_micro_batches
    p = groups.layout.pp_size
    if schedule.pp_size != p:
        raise ValueError(
            f"{schedule.name!r} is for {schedule.pp_size} ranks, but pp_size={p}: they must agree"
        )
    if tied and schedule.end_ranks not in ({0}, {0, p - 1}):
        fault = f"the tied stages of {schedule.name!r} live on ranks {sorted(schedule.end_ranks)}"
        raise ValueError(f"{fault}: place the first on rank 0, and the last on rank 0 or {p - 1}")
    if len(chunks) != schedule.num_chunks:
        raise ValueError(
            f"{len(chunks)} chunks for a schedule of num_chunks={schedule.num_chunks}: give "
            "that many"
        )
    if average and not all(isinstance(chunk, DataParallelBase) for chunk in chunks):
        raise ValueError(
            "average=True needs chunks that average: wrap each one, for example in a DataParallel"
        )
    frees = reduce_every_micro_batch or any(
        getattr(chunk, "reshard_after_forward", False) for chunk in chunks
    )
    if frees and WEIGHT_GRADIENT in schedule.kinds:
        fault = (
            f"{schedule.name!r} computes weights' gradients after layers were freed, or "
            "their gradients sent"
        )
        way_out = (
            "use reduce_every_micro_batch=False and reshard_after_forward=False, or a "
            "different schedule"
        )
        raise ValueError(f"{fault}: {way_out}")
    for name, given in (("inputs", inputs), ("targets", targets)):
        if given is not None and len(given) != m:
            raise ValueError(
                f"{len(given)} {name} for a schedule of num_micro_batches={m}: give that many"
            )
    for number, rows in enumerate(inputs):
        if len(rows) == 0:
            raise ValueError(
                f"micro-batch {number} of {m} has no rows: use fewer micro-batches or a "
                "larger batch"
            )
        if (rows.shape[1:], rows.dtype) != (inputs[0].shape[1:], inputs[0].dtype):
            this, first = (f"{str(x.dtype)[6:]} {list(x.shape)}" for x in (rows, inputs[0]))
            rule = "they may differ only in the number of rows, so pad them to one size"
            raise ValueError(f"micro-batch {number} is {this}, micro-batch 0 is {first}: {rule}")


def _check_activation_spec(activation_spec: ActivationSpec | None, input_dtype: torch.dtype):
    way_out = "give the dtype and shape of what a stage sends: activation_spec=(dtype, shape)"
    if activation_spec is None:
        if not input_dtype.is_floating_point:
            raise ValueError(f"inputs are {input_dtype}, and stages send floats: {way_out}")
    elif not activation_spec[0].is_floating_point:
        raise ValueError(f"activation_spec={activation_spec} must be of floats: {way_out}")
