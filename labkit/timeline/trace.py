"""A stopwatch on a rank: what it did from when to when, as it happens.

All ranks of one machine read the same clock (CLOCK_MONOTONIC), so their spans fit together as they
are. On a GPU, where the host runs ahead of the work, the times are the stream's, taken by CUDA
events.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit.schedules import Op
from labkit.timeline.spans import Span


def seconds_between(start, end) -> float:
    """Return the time between two moments of a `Trace`; on a GPU, wait until it has reached the
    second.
    """
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Trace:
    """The spans of one rank while it works.

    >>> trace = Trace(rank=0)
    >>> with trace.span("forward", "F0"):
    ...     pass  # loss = model(x)
    >>> [span.label for span in trace.spans()]
    ['F0']
    """

    def __init__(self, rank: int, device: torch.device | str = "cpu"):
        self.rank = rank
        self.device = torch.device(device)
        self._notes = []
        self._zero = 0.0
        self._zero_seconds = 0.0
        if self.device.type == "cuda":  # events only know the time between two of them
            torch.cuda.synchronize(device)
            self._zero = self.now()
            self._zero_seconds = time.perf_counter()

    def now(self):
        """Return the present, for `add`: on the CPU in seconds, on a GPU an event in its stream."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, kind: str, label: str, op: Op | None = None) -> Iterator[None]:
        """Note the time that the block takes."""
        start = self.now()
        try:
            yield
        finally:
            self.add(kind, label, start, self.now(), op)

    def add(self, kind: str, label: str, start, end, op: Op | None = None) -> None:
        """Note a span between two moments that `now` gave."""
        self._notes.append((kind, label, start, end, op))

    def spans(self) -> list[Span]:
        """Return what was noted, in seconds of this machine's clock; on a GPU, wait until the work
        is done.
        """
        found = []
        for kind, label, *points, op in self._notes:
            start, end = (
                self._zero_seconds + seconds_between(self._zero, point) for point in points
            )
            found.append(Span(self.rank, kind, label, start, end, op))
        return found
