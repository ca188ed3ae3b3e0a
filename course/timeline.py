"""Sets the spans of all ranks side by side: simulated from a schedule or measured, in one form, drawn alike.

Plain data, no torch.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from labkit.timeline.spans import COMMUNICATION, WAIT, Span, computing_seconds, covered_seconds


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks; ``source`` says where they come from: measured, simulated or paced.

    >>> spans = [Span(0, "forward", "F0", 0, 1), Span(1, "wait", "recv", 0, 1), Span(1, "forward", "F0", 1, 2)]
    >>> timeline = Timeline(spans, "simulated")
    >>> timeline.makespan_seconds, timeline.computing_seconds(1), timeline.bubble_share
    (2, 1, 0.5)
    """

    spans: Sequence[Span]
    source: str

    def __post_init__(self):
        object.__setattr__(self, "spans", tuple(sorted(self.spans, key=lambda s: (s.rank, s.start, -s.end))))

    def of(self, rank: int, *kinds: str) -> Iterator[Span]:
        """Return the spans of one rank by their start: those of these kinds, or all of them when no kind is named."""
        return (span for span in self._of_rank.get(rank, ()) if not kinds or span.kind in kinds)

    @cached_property
    def _of_rank(self) -> dict[int, list[Span]]:
        return {rank: list(spans) for rank, spans in groupby(self.spans, key=lambda span: span.rank)}

    @property
    def ranks(self) -> list[int]:
        """The ranks that did anything."""
        return list(self._of_rank)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the first start on any rank to the last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def computing_seconds(self, rank: int) -> float:
        """How long this rank computed: its spans of work, without the waits inside them."""
        return computing_seconds(self.of(rank))

    def waiting_seconds(self, rank: int) -> float:
        """How long this rank stood still for a message: communication that nothing hid."""
        return covered_seconds(self.of(rank), WAIT)

    def communicating_seconds(self, rank: int) -> float:
        """How long any message of this rank was under way, whether it computed meanwhile or not."""
        return covered_seconds(self.of(rank), COMMUNICATION)

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return how many micro-batches' activations this rank holds, from each change on: [(seconds, count), ...].

        They count as in `Schedule.peak_in_flight`, from the start of the forward to the end of the last op.
        """
        kinds = {span.kind for span in self.of(rank)}
        last = next((kind for kind in ("weight_gradient", "backward") if kind in kinds), "forward")
        changes = [(span.start, 1) for span in self.of(rank, "forward")]
        changes += [(span.end, -1) for span in self.of(rank, last)]
        held, steps = 0, {0.0: 0}
        for seconds, change in sorted(changes):  # at the same moment, one leaves before the next comes
            held += change
            steps[seconds] = held
        return list(steps.items())

    def utilisation(self, rank: int) -> float:
        """The share of the makespan in which this rank computed; 1 if the makespan is zero."""
        return self.computing_seconds(rank) / self.makespan_seconds if self.makespan_seconds else 1.0

    @cached_property
    def bubble_share(self) -> float:
        """Idle over total: the share of all ranks' time in which they did not compute."""
        return 1.0 - sum(map(self.utilisation, self.ranks)) / len(self.ranks) if self.ranks else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over ideal: the same idle time as a multiple of the time spent computing; infinite if none was."""
        return self.bubble_share / (1.0 - self.bubble_share) if self.bubble_share < 1.0 else math.inf

    def __str__(self) -> str:
        """Return a table with one row per rank: computing, waiting and messages in milliseconds, and utilisation."""
        lines = [f"rank{'computing':>12}{'waiting':>12}{'messages':>12}{'utilisation':>14}    ms, {self.source}"]
        for rank in self.ranks:
            parts = self.computing_seconds(rank), self.waiting_seconds(rank), self.communicating_seconds(rank)
            cells = "".join(f"{seconds * 1e3:>12.2f}" for seconds in parts)
            lines.append(f"{rank:>4}{cells}{self.utilisation(rank):>13.0%}")
        return "\n".join(lines)

    def save_chrome_trace(self, path: str | Path) -> Path:
        """Write a file that "Open trace file" in https://ui.perfetto.dev reads, with one process per rank."""
        events: list[dict] = []
        for rank in self.ranks:
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "work and waits"}})
        for number, span in enumerate(self.spans):
            event = {"name": span.label, "cat": span.kind, "pid": span.rank, "tid": 0, "ts": span.start * 1e6}  # us
            if span.kind == COMMUNICATION:  # several may be under way at once, which only async events can show
                events.append({**event, "ph": "b", "id": number})
                events.append({**event, "ph": "e", "id": number, "ts": span.end * 1e6})
            else:
                events.append({**event, "ph": "X", "dur": span.seconds * 1e6})
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": self.source}}
        path = Path(path)
        path.write_text(json.dumps(trace))
        return path


def measured(spans_of_ranks: list[list[Span]], source: str = "measured") -> Timeline:
    """Return one timeline of what `labkit.timeline.trace.Trace.spans` gave on each rank, starting at zero."""
    spans = [span for spans in spans_of_ranks for span in spans]
    begin = min((span.start for span in spans), default=0.0)
    return Timeline([replace(span, start=span.start - begin, end=span.end - begin) for span in spans], source)
