"""Decides in which ops gradients leave: to a chunk's replicas, and to the other copy of a tied
weight.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from labkit.data_parallel.replicas import DataParallelBase, grad_dtype_of
from labkit.groups import ProcessGroups
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule


class Averaging:
    """Averages gradients over replicas: starting in the op that completes a chunk's gradients, at
    the latest in `finish`.

    A chunk that is sharded and whose backward is split is averaged after all ops. With
    ``every_micro_batch``, a chunk sends in each of its backwards.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        chunks: Sequence[nn.Module],
        average: bool,
        every_micro_batch: bool,
    ):
        self.every_micro_batch = average and every_micro_batch
        self.replicas = {
            index: chunk
            for index, chunk in enumerate(chunks)
            if isinstance(chunk, DataParallelBase)
        }
        self.last_backward = _last_gradient_ops(schedule, rank) if average else {}

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Let no backward inside the block send gradients, but in `during`."""
        with ExitStack() as stack:
            for replica in self.replicas.values():
                stack.enter_context(replica.no_sync())
            yield

    def during(self, op: Op) -> AbstractContextManager:
        """Return a block in which ``op`` sends the gradients that it computes, if it should."""
        is_last = op == self.last_backward.get(op.chunk)
        is_early = self.every_micro_batch and op.kind != FORWARD
        if not (is_last or is_early):
            return nullcontext()
        replica = self.replicas[op.chunk]
        # A W is a backward for each node with weights, and whole units would be reduced after each.
        if op.kind == WEIGHT_GRADIENT and replica.reduces_whole_units:
            return nullcontext()
        return replica.reducing(is_last)

    def finish(self) -> None:
        """Wait until all gradients are averages."""
        for index in self.last_backward:
            self.replicas[index].sync_gradients()


def _last_gradient_ops(schedule: Schedule, rank: int) -> dict[int, Op]:
    """Return the op after which each chunk's gradients are complete."""
    backwards = [op for op in schedule.ranks[rank] if op.kind != FORWARD]
    last = {op.chunk: op for op in backwards}
    # One rank has both ends: the last stage may add to the embedding of the first.
    if backwards and schedule.end_ranks == {rank}:
        last[schedule.chunk_of_stage(0)] = backwards[-1]
    return last


@contextmanager
def all_reduce_tied_grads(
    tied: Sequence[nn.Parameter], schedule: Schedule, groups: ProcessGroups
) -> Iterator[None]:
    """Give all copies of a shared weight, on this rank and on its partner, the sum of the gradients
    from this block.
    """
    trained = tied if BACKWARD in schedule.kinds else ()
    earlier: dict[nn.Parameter, torch.Tensor | None] = {}  # in these the copies agree
    for weight in trained:
        if weight.requires_grad:
            # A clone, as a wrapper may reuse the memory
            earlier[weight] = None if weight.grad is None else weight.grad.clone()
            weight.grad = None
    yield
    if not earlier:
        return
    total = torch.zeros_like(tied[0], dtype=grad_dtype_of(tied[0]))
    for weight in earlier:
        if weight.grad is not None:
            total = total + weight.grad
    if len(schedule.end_ranks) > 1:
        dist.all_reduce(total, group=groups.embedding)
    for weight, grad in earlier.items():
        gradient = total if grad is None else total + grad
        weight.grad = gradient.clone() if weight.grad is None else weight.grad.copy_(gradient)
