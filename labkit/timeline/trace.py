"""A stopwatch on a rank: what it did from when to when, as it happens.

Ranks of one machine read the same clock (CLOCK_MONOTONIC), so their spans fit together as they are. On a GPU, where
the host runs ahead of the work, the times are the stream's, by CUDA events.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from labkit.timeline.spans import Span


class Trace:
    """The spans of one rank while it works.

    >>> trace = Trace(rank=0)
    >>> with trace.span("forward", "F0"):
    ...     pass  # loss = model(x)
    >>> [span.label for span in trace.spans()]
    ['F0']
    """

    def __init__(self, rank: int, device: torch.device | str = "cpu"):
        self.rank, self._notes = rank, []
        self.now: Callable = time.perf_counter
        """A point in time, to be given to `add`."""
        if torch.device(device).type == "cuda":
            self.now = self._event
            torch.cuda.synchronize(device)
            self._zero, self._zero_seconds = self._event(), time.perf_counter()

    @contextmanager
    def span(self, kind: str, label: str) -> Iterator[None]:
        """Note the time that the block takes."""
        start = self.now()
        try:
            yield
        finally:
            self.add(kind, label, start, self.now())

    def add(self, kind: str, label: str, start, end) -> None:
        """Note a span between two points in time that `now` gave."""
        self._notes.append((kind, label, start, end))

    def spans(self) -> list[Span]:
        """What was noted, in seconds of this machine's clock; on a GPU, waits until the work is done."""
        return [
            Span(self.rank, kind, label, self._seconds(start), self._seconds(end))
            for kind, label, start, end in self._notes
        ]

    def _event(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, point) -> float:
        if isinstance(point, float):
            return point
        point.synchronize()
        return self._zero_seconds + self._zero.elapsed_time(point) / 1e3
