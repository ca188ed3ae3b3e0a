"""What the ranks say to each other: a log of every collective and message that a rank takes part in.

The log listens at the process group, through which the functions of `dist` and FSDP2 pass. It does not hear what C++
starts by itself: DistributedDataParallel, and the functional collectives of DTensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from labkit.sizes import ranks_text
from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace, moment, seconds_between

# torch 2.13 renamed the forms that take one tensor, and warns about the older names.
all_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Communication:
    """One call: its operation, the global ranks of its group, its size, and how long it took.

    ``message_bytes`` is the size of the full buffer, as nccl-tests counts: all ranks' pieces for all-gather,
    reduce-scatter, gather and scatter; the tensor itself for the others; 0 for a barrier. What leaves the rank in a
    collective depends on the library's algorithm (a ring all-reduce sends 2(n-1)/n times the message).

    ``seconds`` run from the call to the end of its wait, so an early rank counts its waiting for the late ones. They
    are None if nobody has waited inside the block, and for messages that NCCL sends as one batch.
    """

    operation: str
    group: tuple[int, ...]
    message_bytes: int
    seconds: float | None = None


@dataclass
class CommunicationLog:
    """What one rank communicated inside a `communication_log()` block, in order of the calls."""

    records: list[Communication] = field(default_factory=list)

    def total_bytes(self, *operations: str) -> int:
        """Return the sum of the message bytes of these operations, or of all when none is named."""
        return sum(record.message_bytes for record in self._of(operations))

    def total_seconds(self, *operations: str) -> float:
        """Return the sum of their seconds; calls that overlap count in full."""
        return sum(record.seconds or 0.0 for record in self._of(operations))

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:  # one row per operation and group
        lines = [f"{'operation':<15}{'group':<20}{'calls':>6}{'message bytes':>15}{'ms':>10}"]
        for operation, group in dict.fromkeys((record.operation, record.group) for record in self.records):
            chosen = CommunicationLog([r for r in self.records if (r.operation, r.group) == (operation, group)])
            cells = f"{len(chosen):>6}{chosen.total_bytes():>15,}{chosen.total_seconds() * 1e3:>10.2f}"
            lines.append(f"{operation:<15}{ranks_text(group, most=4):<20}{cells}")
        return "\n".join(lines)

    def _of(self, operations: tuple[str, ...]) -> list[Communication]:
        return [record for record in self.records if not operations or record.operation in operations]


@contextmanager
def communication_log(trace: Trace | None = None) -> Iterator[CommunicationLog]:
    """Record what this rank communicates until the block ends; afterwards torch is as it was.

    Use it inside a rank; the log can be returned from there. A ``trace`` gets two spans of each call: one while it is
    under way, and one while this rank waits for it. (Where torch does not say when a call was done, as for gloo's
    reduce-scatter and messages and all of NCCL, the first span lasts until the end of the wait.)

    >>> with communication_log() as log:
    ...     pass  # dist.all_reduce(x) here would be one record
    >>> len(log), log.total_bytes()
    (0, 0)
    """
    log = CommunicationLog()
    calls: list[_Call] = []
    call_of: WeakKeyDictionary[dist.Work, _Call] = WeakKeyDictionary()  # weak: a call that is dropped frees its tensors
    originals, wait = {}, vars(dist.Work)["wait"]
    dist.Work.wait = _timed(wait, call_of, trace)  # pyright: ignore - pinned by a test
    for operation, (buffer, names) in _METHODS.items():
        for name in vars(dist.ProcessGroup).keys() & set(names):
            originals[name] = method = vars(dist.ProcessGroup)[name]
            setattr(dist.ProcessGroup, name, _recorded(operation, buffer, method, log, calls, call_of, trace))
    try:
        yield log
    finally:
        dist.Work.wait = wait
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)
        for call in calls:
            call.read_clock()


_METHODS: dict[str, tuple[int | None, tuple[str, ...]]] = {
    "all_reduce": (0, ("allreduce",)),
    "broadcast": (0, ("broadcast",)),
    "reduce": (0, ("reduce",)),
    "all_gather": (0, ("allgather", "all_gather_single", "_allgather_base")),
    "reduce_scatter": (1, ("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base")),
    "all_to_all": (1, ("alltoall", "all_to_all_single", "alltoall_base")),
    "gather": (1, ("gather",)),
    "scatter": (0, ("scatter",)),
    "send": (0, ("send",)),
    "recv": (0, ("recv", "recv_anysource")),
    "barrier": (None, ("barrier",)),
}
"""For each operation: which argument is the full buffer (of gather and scatter, a rank's piece of it), and its methods
of ProcessGroup, under older and newer names."""


def _recorded(operation: str, buffer: int | None, method, log, calls, call_of, trace: Trace | None):
    def record_and_call(group, *args, **kwargs):
        tensors = [] if buffer is None else tree_leaves([*args, *kwargs.values()][buffer])
        pieces = group.size() if operation in ("gather", "scatter") else 1
        message_bytes = pieces * sum(tensor.nbytes for tensor in tensors)
        record = Communication(operation, tuple(dist.get_process_group_ranks(group)), message_bytes)
        log.records.append(record)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        calls.append(call := _Call(record, device, trace))
        work = method(group, *args, **kwargs)
        if work is not None:
            call_of[work] = call
            call.is_under_way(work)
        elif operation not in ("send", "recv"):  # NCCL: its stream runs the call where it stands
            call.stop(call.started)
        return work

    return record_and_call


def _timed(wait, call_of, trace: Trace | None):
    def wait_and_stop(work, *args, **kwargs):
        begin = trace.now() if trace else None
        result = wait(work, *args, **kwargs)
        if call := call_of.get(work):
            call.stop(begin)
        return result

    return wait_and_stop


class _Call:
    """A call and its times. On a GPU these are the stream's; reading them waits for it, so that is left to the end."""

    def __init__(self, record: Communication, device: torch.device, trace: Trace | None):
        self._record, self._device, self._trace = record, device, trace
        self._notes_its_end = False
        self._start, self._end = moment(device), None
        self.started = trace.now() if trace else None  # the same on the clock of the trace

    def is_under_way(self, work) -> None:
        """Have gloo's thread note when the call ends, if this kind of call allows that."""
        operation, trace, started = self._record.operation, self._trace, self.started
        if trace and self._device.type == "cpu":
            with suppress(RuntimeError):  # not implemented
                work.get_future().add_done_callback(lambda _: trace.add(COMMUNICATION, operation, started, trace.now()))
                self._notes_its_end = True

    def stop(self, waited_since) -> None:
        if self._end is None:
            self._end = moment(self._device)
            if self._device.type == "cpu":
                self.read_clock()
        if self._trace:
            now = self._trace.now()
            if not self._notes_its_end:
                self._notes_its_end = True  # a second wait has nothing to note
                self._trace.add(COMMUNICATION, self._record.operation, self.started, now)
            self._trace.add(WAIT, self._record.operation, waited_since, now)

    def read_clock(self) -> None:
        if self._end is not None:
            self._record.seconds = seconds_between(self._start, self._end)
