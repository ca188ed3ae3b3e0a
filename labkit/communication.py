"""What the ranks say to each other: a log of every collective and message that a rank takes part in.

The log listens at the process group, through which the functions of `dist` and FSDP2 pass. It does not hear what C++
starts by itself: DistributedDataParallel, and the functional collectives of DTensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from labkit.sizes import ranks_text
from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace, moment, seconds_between


@dataclass
class Communication:
    """One call: its operation, the global ranks of its group, its size, and how long it took.

    ``message_bytes`` is the size of the full buffer, as nccl-tests counts: all ranks' pieces for all-gather,
    reduce-scatter, gather and scatter; the tensor itself for the others; 0 for a barrier. What leaves the rank in a
    collective depends on the library's algorithm (a ring all-reduce sends 2(n-1)/n times the message).

    ``seconds`` run from the call to the end of its wait, so an early rank counts its waiting for the late ones. They
    are None while nobody has waited, and for messages that NCCL sends as one batch.
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

    def __str__(self) -> str:
        """Return one row per operation and group, with its calls, bytes and milliseconds."""
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
    settle: list[Callable[[], None]] = []
    originals = {}
    for operation, (buffer, names) in _METHODS.items():
        for name in vars(dist.ProcessGroup).keys() & set(names):
            originals[name] = method = vars(dist.ProcessGroup)[name]
            setattr(dist.ProcessGroup, name, _recorded(operation, buffer, method, log, settle, trace))
    try:
        yield log
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)
        for read_clock in settle:
            read_clock()


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


def _recorded(operation: str, buffer: int | None, method, log, settle: list, trace: Trace | None) -> Callable:
    def record_and_call(group, *args, **kwargs):
        tensors = [] if buffer is None else list(_tensors([*args, *kwargs.values()][buffer]))
        pieces = group.size() if operation in ("gather", "scatter") else 1
        message_bytes = pieces * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        record = Communication(operation, tuple(dist.get_process_group_ranks(group)), message_bytes)
        log.records.append(record)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        return _Call(record, device, settle, trace).under_way(method(group, *args, **kwargs))

    return record_and_call


class _Call:
    """A call and its times; where torch gives a handle of it, this stands for it, and `wait` also stops the clock.

    On a GPU the times are the stream's, since the host's calls return early. Reading them waits for the stream, so
    ``settle`` does that at the end of the block.
    """

    def __init__(self, record: Communication, device: torch.device, settle: list, trace: Trace | None):
        self._record, self._device, self._settle, self._trace = record, device, settle, trace
        self._work: Any = None
        self._has_ended = self._notes_its_end = False
        self._start = moment(device)
        self._started = trace.now() if trace else None  # the same on the clock of the trace

    def under_way(self, work):
        """Take torch's handle, and return what the caller gets in its place."""
        self._work = work
        operation, trace, started = self._record.operation, self._trace, self._started
        if work is None:  # NCCL: its stream runs the call where it stands; or it is one message of a batch
            if operation not in ("send", "recv"):
                self._stop(waited_since=started)
            return None
        if trace and self._device.type == "cpu":  # where gloo's thread says when the call has ended
            with suppress(RuntimeError):  # not implemented
                work.get_future().add_done_callback(lambda _: trace.add(COMMUNICATION, operation, started, trace.now()))
                self._notes_its_end = True
        return self

    def wait(self, *args, **kwargs):
        begin = self._trace.now() if self._trace else None
        result = self._work.wait(*args, **kwargs)
        self._stop(begin)
        return result

    def _stop(self, waited_since) -> None:
        if not self._has_ended:
            self._has_ended, record, start, end = True, self._record, self._start, moment(self._device)

            def read_clock():  # not a method: `settle` must not keep this call, and so its tensors, alive
                record.seconds = seconds_between(start, end)

            if self._device.type == "cpu":
                read_clock()
            else:
                self._settle.append(read_clock)
        if self._trace:
            now = self._trace.now()
            if not self._notes_its_end:
                self._notes_its_end = True  # a second wait has nothing to note
                self._trace.add(COMMUNICATION, self._record.operation, self._started, now)
            self._trace.add(WAIT, self._record.operation, waited_since, now)

    def __getattr__(self, name: str):
        return getattr(self._work, name)

    def __eq__(self, other) -> bool:  # who keeps handles, as the launcher does, finds this one by torch's
        return other is self or other is self._work

    def __hash__(self) -> int:
        return hash(self._work)


def _tensors(nested) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)
