"""What the ranks say to each other: a log of every collective and message that a rank takes part in.

The log listens at the process group, where torch's own functions pass: `dist.all_reduce`, the list and
the single-tensor forms, `batch_isend_irecv`, and FSDP2. It does not hear what C++ starts by itself:
DistributedDataParallel, and the functional collectives of DTensor.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from labkit.sizes import ranks_text
from labkit.timeline.spans import COMMUNICATION, WAIT
from labkit.timeline.trace import Trace


@dataclass
class Communication:
    """One call: its operation, the global ranks of its group, its size, and how long it took.

    ``message_bytes`` is the size of the full buffer, as nccl-tests counts: all ranks' pieces for
    all-gather, reduce-scatter, gather and scatter; the tensor itself for the others; 0 for a barrier.
    For `send` that is what left this rank. For a collective, what left depends on the library's algorithm,
    which nobody can see from here (a ring all-reduce sends 2(n-1)/n times the message).

    ``seconds`` run from the call to the end of its wait: a rank that arrives early counts its waiting for
    the late ones. On a GPU they are the stream's, by CUDA events. None while nobody has waited, and for
    messages that NCCL sends as one batch.
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
        """The sum of the message bytes of these operations; of all when none is named."""
        return sum(record.message_bytes for record in self._of(operations))

    def total_seconds(self, *operations: str) -> float:
        """The sum of their seconds; calls that overlap are counted each."""
        return sum(record.seconds or 0.0 for record in self._of(operations))

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        """One line for each operation and group, with its calls, bytes and milliseconds."""
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

    Use it inside a rank; the log can be returned from it. A ``trace`` gets each call too: a span while it is under
    way, and one while this rank waits for it. (Where torch does not say when a call was done, which is so for gloo's
    reduce-scatter and messages and for all of NCCL, the first span lasts until the end of the wait.)

    >>> with communication_log() as log:
    ...     pass  # dist.all_reduce(x) here would be one record
    >>> len(log), log.total_bytes()
    (0, 0)
    """
    log = CommunicationLog()
    settle: list[Callable[[], None]] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in _FULL_BUFFER if name in vars(dist.ProcessGroup)}
    for name, method in originals.items():
        setattr(dist.ProcessGroup, name, _recorded(name, method, log, settle, trace))
    try:
        yield log
    finally:
        for name, method in originals.items():
            setattr(dist.ProcessGroup, name, method)
        for read_clock in settle:
            read_clock()


_FULL_BUFFER: dict[str, tuple[str, Callable]] = {
    "allreduce": ("all_reduce", lambda group, tensor, *_: tensor),
    "broadcast": ("broadcast", lambda group, tensor, *_: tensor),
    "reduce": ("reduce", lambda group, tensor, *_: tensor),
    "allgather": ("all_gather", lambda group, output, *_: output),
    "all_gather_single": ("all_gather", lambda group, output, *_: output),
    "_allgather_base": ("all_gather", lambda group, output, *_: output),
    "reduce_scatter": ("reduce_scatter", lambda group, output, input, *_: input),
    "reduce_scatter_single": ("reduce_scatter", lambda group, output, input, *_: input),
    "_reduce_scatter_base": ("reduce_scatter", lambda group, output, input, *_: input),
    "alltoall": ("all_to_all", lambda group, output, input, *_: input),
    "all_to_all_single": ("all_to_all", lambda group, output, input, *_: input),
    "alltoall_base": ("all_to_all", lambda group, output, input, *_: input),
    "gather": ("gather", lambda group, output, input, *_: [input] * group.size()),
    "scatter": ("scatter", lambda group, output, *_: [output] * group.size()),
    "send": ("send", lambda group, tensor, *_: tensor),
    "recv": ("recv", lambda group, tensor, *_: tensor),
    "recv_anysource": ("recv", lambda group, tensor, *_: tensor),
    "barrier": ("barrier", lambda group, *_: []),
}
"""For each method of ProcessGroup (older and newer names): what to call it, and which argument is the full buffer."""


def _recorded(name: str, method: Callable, log: CommunicationLog, settle: list, trace: Trace | None) -> Callable:
    operation, full_buffer = _FULL_BUFFER[name]

    def record_and_call(group, *args, **kwargs):
        tensors = list(_tensors(full_buffer(group, *args, *kwargs.values())))
        message_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        ranks = tuple(dist.get_process_group_ranks(group))
        record = Communication(operation, ranks, message_bytes)
        log.records.append(record)
        clock = _GpuClock(record) if any(tensor.is_cuda for tensor in tensors) else _Clock(record)
        settle.append(clock.settle)
        start = trace.now() if trace else None
        work = method(group, *args, **kwargs)
        if work is None:  # NCCL: its stream runs the call where it stands; or it is one message of a batch
            if operation not in ("send", "recv"):
                clock.stop()
                if trace:
                    trace.add(COMMUNICATION, operation, start, end := trace.now())
                    trace.add(WAIT, operation, start, end)
            return None
        return _TracedWork(work, clock, trace, operation, start) if trace else _TimedWork(work, clock)

    return record_and_call


class _TimedWork:
    """torch's handle of a call under way; its `wait` also stops the clock."""

    def __init__(self, work, clock):
        self._work, self._clock = work, clock

    def wait(self, *args, **kwargs):
        result = self._work.wait(*args, **kwargs)
        self._clock.stop()
        return result

    def __getattr__(self, name: str):
        return getattr(self._work, name)


class _TracedWork(_TimedWork):
    """The same, which also notes in a trace when the call was under way, and when somebody waited."""

    def __init__(self, work, clock, trace: Trace, operation: str, start):
        super().__init__(work, clock)
        self._trace, self._operation, self._start = trace, operation, start
        self._tells_its_end = False
        if isinstance(clock, _Clock):  # on the CPU, where the end is when gloo's thread says so
            try:
                work.get_future().add_done_callback(lambda _: self._note_end())
                self._tells_its_end = True
            except RuntimeError:  # not implemented
                pass

    def wait(self, *args, **kwargs):
        begin = self._trace.now()
        result = super().wait(*args, **kwargs)
        self._trace.add(WAIT, self._operation, begin, self._trace.now())
        if not self._tells_its_end:
            self._tells_its_end = True  # whoever waits again waits for nothing
            self._note_end()
        return result

    def _note_end(self) -> None:
        self._trace.add(COMMUNICATION, self._operation, self._start, self._trace.now())


class _Clock:
    """Host time, from the call to the end of its first wait."""

    def __init__(self, record: Communication):
        self.record, self.start = record, time.perf_counter()

    def stop(self) -> None:
        if self.record.seconds is None:
            self.record.seconds = time.perf_counter() - self.start

    def settle(self) -> None:
        """Nothing left to do when the block ends."""


class _GpuClock:
    """Stream time: on a GPU the host's calls return long before the work is done."""

    def __init__(self, record: Communication):
        self.record, self.stopped = record, False
        self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.events[0].record()

    def stop(self) -> None:
        if not self.stopped:
            self.events[1].record()
            self.stopped = True

    def settle(self) -> None:
        if self.stopped:
            self.events[1].synchronize()
            self.record.seconds = self.events[0].elapsed_time(self.events[1]) / 1e3


def _tensors(nested) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    else:
        for item in nested:
            yield from _tensors(item)
