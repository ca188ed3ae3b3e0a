"""Traces what a rank sends, call by call; names torch's collectives of single tensors, and
differentiates one.

What is heard, and what cannot be, is said in `labkit.c10d`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist

from labkit.autograd import first_derivative_only
from labkit.c10d import Call, listening
from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace
from labkit.torch_versions import all_gather_single as all_gather_single
from labkit.torch_versions import reduce_scatter_single as reduce_scatter_single


def all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, send_splits: Any = None, recv_splits: Any = None
) -> Any:
    """Return the rows that the ranks of a group send to each other, by default equally many.

    Backward sends them back.

    ``send_splits`` are the numbers of consecutive rows for each rank, ``recv_splits`` those from
    each.
    """
    if group.size() == 1:
        return rows
    return _AllToAll.apply(rows, group, send_splits, recv_splits)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, send_splits, recv_splits):
        ctx.inverse = group, recv_splits, send_splits
        num_received = len(rows) if recv_splits is None else sum(recv_splits)
        received = rows.new_empty(num_received, *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=group)
        return received

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_to_all(grad, *ctx.inverse), None, None, None


def trace_communication(trace: Trace) -> AbstractContextManager[None]:
    """Add two spans of each collective and message to a trace: one while it is under way, one while
    this rank waits.

    Where torch does not say when a call was done, as for gloo's reduce-scatter and messages and all
    of NCCL, the first span lasts until the end of the wait. A wait inside C++, as in
    DistributedDataParallel, is not heard.
    """
    return trace_calls(lambda call: trace)


def trace_calls(trace_of: Callable[[Call], Trace]) -> AbstractContextManager[None]:
    """Do so in the trace that ``trace_of`` gives for a call, just before it."""
    return listening(lambda call: _TracedCall(call.operation, trace_of(call)))


class _TracedCall:
    def __init__(self, operation: str, trace: Trace):
        self.operation = operation
        self.trace = trace
        self.started = trace.now()
        self.has_end = False

    def note_start(self, work: dist.Work | None) -> None:
        """Have gloo's thread note when the call ends, if this kind of call allows that."""
        if work is None:
            # This is NCCL: its stream runs the call where it stands, but messages wait for a peer.
            if self.operation not in ("send", "recv"):
                self._note_wait(self.started)
        elif self.trace.device.type == "cpu":
            with suppress(RuntimeError):  # not implemented
                work.get_future().add_done_callback(
                    lambda _: self._note(COMMUNICATION, self.started, self.trace.now())
                )
                self.has_end = True

    def note_wait(self) -> Callable[[], None]:
        """A wait begins: return what notes its end."""
        since = self.trace.now()
        return lambda: self._note_wait(since)

    def _note_wait(self, since: Any) -> None:
        end = self.trace.now()
        if not self.has_end:
            self._note(COMMUNICATION, self.started, end)
            self.has_end = True  # a second wait has nothing to note
        self._note(WAIT, since, end)

    def _note(self, kind: str, start: Any, end: Any) -> None:
        self.trace.add(kind, self.operation, start, end)
