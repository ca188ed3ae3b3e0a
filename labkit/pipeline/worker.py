"""A rank obeys a schedule: op by op it takes what arrived, does its work, and sends on.

The order is the schedule's (`labkit.schedules`), and a `Stage` does the work. `Messages` receives ahead of need and
does not wait for what it sends, so messages travel while the rank computes.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from labkit.data_parallel.replicas import Replica, grad_dtype_of
from labkit.groups import ProcessGroups
from labkit.pipeline.messages import Messages
from labkit.pipeline.stage import Stage
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, check
from labkit.schedules.schedule import check_ops
from labkit.timeline.trace import Trace


def run(
    schedule: Schedule,
    chunks: Sequence[nn.Module],
    groups: ProcessGroups,
    inputs: Sequence[torch.Tensor],
    *,
    loss: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    targets: Sequence[torch.Tensor] | None = None,
    ignore_index: int = -100,
    tied: Sequence[nn.Parameter] = (),
    average: bool = False,
    every: bool = False,
    trace: Trace | None = None,
    ahead: int = 4,
    allow_deadlock: bool = False,
) -> torch.Tensor | None:
    """Run one step of a pipeline: forward and backward of all micro-batches. Every rank of the pipeline calls it.

    Gradients are added to ``parameter.grad``. They are those of one process with the whole batch: of the mean loss over
    all rows, or all targets that count. Returns that mean on the rank of the last stage, None on the others.

    Args:
        chunks: this rank's parts of the model, in the order of their numbers; each takes one tensor and gives one.
        inputs: the m micro-batches, [rows, ...], the same on every rank. Stages after the first only count their rows.
        loss: from a micro-batch's output and target, the mean over its rows, or over its targets that count.
        targets: the m targets, for the last stage; without them, ``loss`` gets None.
        ignore_index: the integer target that ``loss`` leaves out of its mean, as `F.cross_entropy` does.
        tied: this rank's copies of a weight that first and last stage share; their gradients are added up.
        average: the chunks are wrapped (`labkit.data_parallel`): each sends its gradients during its last backward, and
            they are the replicas' average when this returns. Otherwise they stay this replica's own.
        every: send them in every backward, so that a `FullyShardedDataParallel` never adds up whole gradients.
        trace: gets a span for each op, and one for each wait.
        ahead: for how many ops receives are posted in advance; 0 to post each when its op is next, and wait at once.
            With NCCL at most one of each kind and direction.
        allow_deadlock: run the schedule even if it deadlocks, to see what is reported.

    Raises:
        ValueError: before any communication, if sizes or chunks do not fit the schedule, or it cannot run.
    """
    _check(schedule, chunks, groups, inputs, targets, every)
    (check_ops if allow_deadlock else check)(schedule)
    tied = [weight for weight in dict.fromkeys(tied) if weight.requires_grad and BACKWARD in schedule.kinds]
    # Set earlier gradients aside: the copies agree in them. Clone them: a wrapper may reuse their memory.
    earlier_gradients = [None if weight.grad is None else weight.grad.clone() for weight in tied]
    for weight in tied:
        weight.grad = None
    rank, span = groups.coords.pp, trace.span if trace else lambda *_: nullcontext()
    given = inputs, targets, loss, ignore_index
    stages = [Stage(chunk, schedule.stage_of(rank, index), schedule, *given) for index, chunk in enumerate(chunks)]
    messages = Messages(schedule, groups, [len(rows) for rows in inputs], span, ahead)
    replicas = {index: chunk for index, chunk in enumerate(chunks) if isinstance(chunk, Replica)}
    last = {op.chunk: op for op in schedule.ranks[rank] if op.kind != FORWARD} if average else {}

    def sending(op: Op):
        is_last = op == last.get(op.chunk)
        sends = is_last or (average and every and op.kind != FORWARD)
        return replicas[op.chunk].reducing(is_last) if sends else nullcontext()

    with ExitStack() as stack:
        for replica in replicas.values():
            stack.enter_context(replica.no_sync())
        for op in schedule.ranks[rank]:
            arrived = messages.take(op)
            with span(op.kind, str(op), op), sending(op):
                result = stages[op.chunk].do(op, arrived)
            messages.send(op, result)
    messages.flush()
    for index in last:
        replicas[index].sync_gradients()
    _add_up_tied(tied, earlier_gradients, groups)
    return stages[-1].total


def _add_up_tied(tied: Sequence[nn.Parameter], earlier: Sequence[torch.Tensor | None], groups: ProcessGroups) -> None:
    """Give all copies of a shared weight, on this rank and on its partner, the sum of their gradients."""
    if not tied:
        return
    total = torch.zeros_like(tied[0], dtype=grad_dtype_of(tied[0]))
    for weight in tied:
        if weight.grad is not None:
            total += weight.grad
    if groups.embedding.size() > 1:
        dist.all_reduce(total, group=groups.embedding)
    for parameter, before in zip(tied, earlier):
        gradient = total if before is None else total + before
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.copy_(gradient)


def _check(schedule: Schedule, chunks, groups: ProcessGroups, inputs, targets, every: bool) -> None:
    m, p = schedule.num_micro_batches, groups.layout.pp_size
    if schedule.num_stages != p:
        raise ValueError(f"{schedule.name!r} is for {schedule.num_stages} ranks, but pp_size={p}: they must agree")
    if len(chunks) != schedule.num_chunks:
        raise ValueError(f"{len(chunks)} chunks for a schedule of num_chunks={schedule.num_chunks}: give that many")
    lets_go = every or any(getattr(chunk, "reshard_after_forward", False) for chunk in chunks)
    if lets_go and WEIGHT_GRADIENT in schedule.kinds:
        fault = f"{schedule.name!r} computes weights' gradients after layers were freed, or their gradients sent"
        raise ValueError(f"{fault}: use every=False and reshard_after_forward=False, or a different schedule")
    for name, given in (("inputs", inputs), ("targets", targets)):
        if given is not None and len(given) != m:
            raise ValueError(f"{len(given)} {name} for a schedule of num_micro_batches={m}: give that many")
    for number, rows in enumerate(inputs):
        if len(rows) == 0:
            raise ValueError(f"micro-batch {number} of {m} has no rows: use fewer micro-batches or a larger batch")
        if (rows.shape[1:], rows.dtype) != (inputs[0].shape[1:], inputs[0].dtype):
            this, first = (f"{str(x.dtype)[6:]} {list(x.shape)}" for x in (rows, inputs[0]))
            rule = "they may differ only in the number of rows, so pad them to one size"
            raise ValueError(f"micro-batch {number} is {this}, micro-batch 0 is {first}: {rule}")
