"""Traces what a rank sends, call by call of its process groups; and names torch's collectives of single tensors.

The functions of `dist` and FSDP2 pass through a process group. What C++ starts by itself does not, and is not seen:
DistributedDataParallel, and the functional collectives of DTensor.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace

# torch 2.13 renamed the forms that take one tensor, and warns about the older names.
all_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    **dict.fromkeys(("allgather", "all_gather_single", "_allgather_base"), ("all_gather", 0)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"), ("reduce_scatter", 1)),
    **dict.fromkeys(("alltoall", "all_to_all_single", "alltoall_base"), ("all_to_all", 1)),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    **dict.fromkeys(("recv", "recv_anysource"), ("recv", 0)),
    "barrier": ("barrier", None),
}
"""For each method of ProcessGroup, under older and newer names: its operation, and which argument is the full buffer
(of gather and scatter, one rank's shard of it)."""


def trace_communication(trace: Trace) -> AbstractContextManager[None]:
    """Add two spans of each collective and message to a trace: one while it is under way, one while this rank waits.

    Where torch does not say when a call was done, as for gloo's reduce-scatter and messages and all of NCCL, the first
    span lasts until the end of the wait.
    """
    return trace_calls(lambda operation, group, tensors: trace)


@contextmanager
def trace_calls(trace_of: Callable[[str, dist.ProcessGroup, list[torch.Tensor]], Trace]) -> Iterator[None]:
    """Do so until the block ends, in the trace that each call gets; then torch is as it was.

    Just before the call, ``trace_of`` is given its operation, its group, and the tensors of its full buffer.
    """
    call_of: WeakKeyDictionary[dist.Work, _Call] = WeakKeyDictionary()  # weak: a work that is dropped frees its tensors
    methods = {name: vars(dist.ProcessGroup)[name] for name in _METHODS.keys() & vars(dist.ProcessGroup).keys()}
    wait = vars(dist.Work)["wait"]

    def traced(method, operation, buffer):
        def call_method(group, *args, **kwargs):
            tensors = [] if buffer is None else tree_leaves([*args, *kwargs.values()][buffer])
            call = _Call(operation, trace_of(operation, group, tensors))
            work = method(group, *args, **kwargs)
            if work is not None:
                call_of[work] = call
                call.note_end_of(work)
            elif operation not in ("send", "recv"):  # NCCL: its stream runs the call where it stands
                call.note_wait(call.started)
            return work

        return call_method

    def traced_wait(work, *args, **kwargs):
        call = call_of.get(work)
        since = call.trace.now() if call else None
        result = wait(work, *args, **kwargs)
        if call:
            call.note_wait(since)
        return result

    dist.Work.wait = traced_wait  # pyright: ignore - pinned by a test
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, traced(method, *_METHODS[name]))
    try:
        yield
    finally:
        dist.Work.wait = wait
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


class _Call:
    def __init__(self, operation: str, trace: Trace):
        self.operation, self.trace, self.started, self._notes_its_end = operation, trace, trace.now(), False

    def note_end_of(self, work: dist.Work) -> None:
        """Have gloo's thread note when the call ends, if this kind of call allows that."""
        if self.trace.device.type == "cpu":
            with suppress(RuntimeError):  # not implemented
                work.get_future().add_done_callback(lambda _: self._note(COMMUNICATION, self.started, self.trace.now()))
                self._notes_its_end = True

    def note_wait(self, since: Any) -> None:
        end = self.trace.now()
        if not self._notes_its_end:
            self._notes_its_end = True  # a second wait has nothing to note
            self._note(COMMUNICATION, self.started, end)
        self._note(WAIT, since, end)

    def _note(self, kind: str, start: Any, end: Any) -> None:
        self.trace.add(kind, self.operation, start, end)
