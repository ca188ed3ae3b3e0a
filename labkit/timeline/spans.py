"""Spans of a rank's time: computing, messages under way (they may travel while it computes), and
waiting for them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.schedules import Op

COMPUTING = ("forward", "backward", "weight_gradient", "optimizer")
"""Kinds of work. Where the backward is split in two, ``backward`` is its first half, the gradient
of the input.
"""
COMMUNICATION = "communication"
WAIT = "wait"
KINDS = (*COMPUTING, COMMUNICATION, WAIT)


@dataclass(frozen=True)
class Span:
    """What a rank did from ``start`` to ``end``, in seconds; the ``label`` (F3, all_reduce) is what
    a picture shows.
    """

    rank: int
    kind: str
    label: str
    start: float
    end: float
    op: Op | None = (
        None  # of a schedule: the one that ran, whose result was sent, or that had to wait
    )

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is unknown: use {', '.join(KINDS)}")
        if self.end < self.start:
            raise ValueError(f"{self.label} ends at {self.end}, before it starts at {self.start}")

    @property
    def seconds(self) -> float:
        return self.end - self.start


def covered_seconds(spans: Iterable[Span], *kinds: str) -> float:
    """Return how long one rank had any span of these kinds; what two of them cover counts once."""
    total = 0
    reached = -math.inf
    for span in sorted((span for span in spans if span.kind in kinds), key=lambda span: span.start):
        total += max(0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def computing_seconds(spans: Iterable[Span]) -> float:
    """Return how long one rank computed: its spans of work, without the waits inside them."""
    spans = list(spans)
    return covered_seconds(spans, *COMPUTING, WAIT) - covered_seconds(spans, WAIT)
