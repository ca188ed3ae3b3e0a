"""Traces what a rank sends, call by call; names torch's collectives of single tensors, and differentiates one.

The functions of `dist` and FSDP2 pass through a process group. What C++ starts by itself does not, and is not seen:
DistributedDataParallel, and the functional collectives of DTensor.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace

# torch 2.13 renamed the forms that take one tensor, and warns about the older names.
all_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(rows: torch.Tensor, group: dist.ProcessGroup, send_splits: Any = None, recv_splits: Any = None) -> Any:
    """Return the rows that the ranks of a group send to each other, by default equally many. Backward sends them back.

    ``send_splits`` are the numbers of consecutive rows for each rank, ``recv_splits`` those from each.
    """
    return _AllToAll.apply(rows, group, send_splits, recv_splits) if group.size() > 1 else rows


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, send_splits, recv_splits):
        ctx.inverse = group, recv_splits, send_splits
        received = rows.new_empty(len(rows) if recv_splits is None else sum(recv_splits), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_to_all(grad, *ctx.inverse), None, None, None


_METHODS: dict[str, tuple[Any, ...]] = {
    "all_reduce": (0, "allreduce"),
    "broadcast": (0, "broadcast"),
    "reduce": (0, "reduce"),
    "all_gather": (0, "allgather", "all_gather_single", "_allgather_base"),
    "reduce_scatter": (1, "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all": (1, "alltoall", "all_to_all_single", "alltoall_base"),
    "gather": (1, "gather"),
    "scatter": (0, "scatter"),
    "send": (0, "send"),
    "recv": (0, "recv", "recv_anysource"),
    "barrier": (None, "barrier"),
}
"""For each operation: which argument is the full buffer (of gather and scatter, one rank's shard of it), and its
methods of ProcessGroup, under older and newer names."""


def trace_communication(trace: Trace) -> AbstractContextManager[None]:
    """Add two spans of each collective and message to a trace: one while it is under way, one while this rank waits.

    Where torch does not say when a call was done, as for gloo's reduce-scatter and messages and all of NCCL, the first
    span lasts until the end of the wait.
    """
    return trace_calls(lambda operation, group, tensors: trace)


@contextmanager
def trace_calls(trace_of: Callable[[str, dist.ProcessGroup, list[torch.Tensor]], Trace]) -> Iterator[None]:
    """Do so in the trace that ``trace_of`` gives for a call, just before it: its operation, group, and full buffer."""
    calls: WeakKeyDictionary[dist.Work, _Call] = WeakKeyDictionary()  # weak: a work that is dropped frees its tensors
    wait, methods = dist.Work.wait, dict(vars(dist.ProcessGroup))

    def traced(operation: str, buffer: int | None, method: Callable):
        def call_method(group, *args, **kwargs):
            tensors = [] if buffer is None else tree_leaves([*args, *kwargs.values()][buffer])
            call = _Call(operation, trace_of(operation, group, tensors))
            work = method(group, *args, **kwargs)
            if work is not None:
                calls[work] = call
                call.note_end_of(work)
            elif operation not in ("send", "recv"):  # NCCL: its stream runs the call where it stands
                call.note_wait(call.started)
            return work

        return call_method

    def traced_wait(work, *args, **kwargs):
        call = calls.get(work)
        since = call and call.trace.now()
        result = wait(work, *args, **kwargs)
        if call:
            call.note_wait(since)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist.Work, "wait", traced_wait))
        for operation, (buffer, *names) in _METHODS.items():
            for name in methods.keys() & names:
                method = traced(operation, buffer, methods[name])
                stack.enter_context(patch.object(dist.ProcessGroup, name, method))
        yield


class _Call:
    def __init__(self, operation: str, trace: Trace):
        self.operation, self.trace, self.started, self.has_end = operation, trace, trace.now(), False

    def note_end_of(self, work: dist.Work) -> None:
        """Have gloo's thread note when the call ends, if this kind of call allows that."""
        if self.trace.device.type == "cpu":
            with suppress(RuntimeError):  # not implemented
                work.get_future().add_done_callback(lambda _: self._note(COMMUNICATION, self.started, self.trace.now()))
                self.has_end = True

    def note_wait(self, since: Any) -> None:
        end = self.trace.now()
        if not self.has_end:
            self._note(COMMUNICATION, self.started, end)
            self.has_end = True  # a second wait has nothing to note
        self._note(WAIT, since, end)

    def _note(self, kind: str, start: Any, end: Any) -> None:
        self.trace.add(kind, self.operation, start, end)
