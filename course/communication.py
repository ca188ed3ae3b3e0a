"""Logs every collective and message that a rank takes part in: operation, group, size and time.

It hears torch's functional collectives and DTensor, too: see `labkit.c10d` for what it hears and what it cannot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from labkit.c10d import Call
from labkit.collectives import trace_calls
from labkit.schedules import Op
from labkit.sizes import ranks_text
from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace, seconds_between


@dataclass
class Communication:
    """One call: its operation, the global ranks of its group, its size, and how long it took.

    ``message_bytes`` is the size of the full buffer, as nccl-tests counts: all ranks' shards for all-gather,
    reduce-scatter, gather and scatter; the tensor itself for the others; 0 for a barrier. What leaves the rank in a
    collective depends on the library's algorithm (a ring all-reduce sends 2(n-1)/n times the message).

    ``seconds`` run from the call to the end of its wait, so an early rank counts its waiting for the late ones. They
    are None if nobody has waited inside the block, and for messages that NCCL sends as one batch. Where C++ started the
    call and waits by itself, as DistributedDataParallel does, they run to the end of the call, if torch has said when
    before the block ends.

    ``has_handle`` is False for what C++ started: nobody must wait for it. The result of a functional collective waits
    where it is used.
    """

    operation: str
    group: tuple[int, ...]
    message_bytes: int
    seconds: float | None = None
    has_handle: bool = True


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
        lines = [f"{'operation':<15}{'group':<26}{'calls':>6}{'message bytes':>17}{'ms':>10}"]
        for operation, group in dict.fromkeys((record.operation, record.group) for record in self.records):
            chosen = CommunicationLog([r for r in self.records if (r.operation, r.group) == (operation, group)])
            cells = f"{len(chosen):>6}{chosen.total_bytes():>17,}{chosen.total_seconds() * 1e3:>10.2f}"
            lines.append(f"{operation:<15}{ranks_text(group, most=4):<26}{cells}")
        return "\n".join(lines)

    def _of(self, operations: tuple[str, ...]) -> list[Communication]:
        return [record for record in self.records if not operations or record.operation in operations]


@contextmanager
def communication_log() -> Iterator[CommunicationLog]:
    """Record what this rank communicates until the block ends. Use it on a rank; the log can be returned from there.

    >>> with communication_log() as log:
    ...     pass  # dist.all_reduce(x) here would be one record
    >>> len(log), log.total_bytes()
    (0, 0)
    """
    log, calls = CommunicationLog(), []

    def trace_of(call: Call) -> "_CallTrace":
        num_shards = call.group.size() if call.operation in ("gather", "scatter") else 1  # the tensors are one rank's
        message_bytes = num_shards * sum(tensor.nbytes for tensor in call.tensors)
        ranks = tuple(dist.get_process_group_ranks(call.group))
        record = Communication(call.operation, ranks, message_bytes, has_handle=call.has_handle)
        log.records.append(record)
        device = next((tensor.device for tensor in call.tensors if tensor.is_cuda), torch.device("cpu"))
        calls.append(_CallTrace(record, device))
        return calls[-1]

    try:
        with trace_calls(trace_of):
            yield log
    finally:
        for call in calls:
            call.read_clock()


class _CallTrace(Trace):
    """Times one call to the end of its wait. On a GPU, reading the clock waits for the stream, so that comes last."""

    def __init__(self, record: Communication, device: torch.device):  # without a zero, for which a GPU would wait
        self.device, self._record = device, record
        self._end_of_call = self._end_of_wait = None
        self._start = self.now()

    def add(self, kind: str, label: str, start, end, op: Op | None = None) -> None:
        """Note the end of the call and that of the first wait."""
        if kind == COMMUNICATION:
            self._end_of_call = end
        if kind == WAIT and self._end_of_wait is None:
            self._end_of_wait = end
            if self.device.type == "cpu":
                self.read_clock()

    def read_clock(self) -> None:
        """Write the seconds into the record: to the end of the wait, or of a call that nobody has to wait for."""
        end = self._end_of_wait
        if end is None and not self._record.has_handle:
            end = self._end_of_call
        if end is not None:
            self._record.seconds = seconds_between(self._start, end)
