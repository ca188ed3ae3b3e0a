"""Draw timelines: one row per rank, time to the right, one box per op, and grey where nothing is computed.

Predictions and measurements are drawn by the same function, and each picture says which it is.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, floor, log10
from operator import itemgetter
from typing import Any

from course.pictures.parts import legend
from course.pictures.scene import (
    LARGE,
    SMALLEST,
    WIDTH,
    Look,
    Mark,
    Scene,
    Traveller,
    arrow,
    box,
    fitting,
    label,
    line,
    text_width,
)  # fmt: skip
from course.pictures.style import GREY, IDLE, INK, KIND_COLOR, MUTED, three_digits, tint
from course.table import Table
from course.timeline import Timeline
from labkit.schedules import Op, Schedule, round_robin, v_shape
from labkit.schedules.schedule import LETTER
from labkit.timeline.spans import COMMUNICATION, COMPUTING, WAIT, Span

WORDS: dict[str, str] = dict(zip(COMPUTING, ("F forward", "B backward", "W gradient of the weights", "optimizer")))
CHUNK_STRENGTHS = (1.0, 0.72, 0.48, 0.26)  # how much of its colour an op gets by its chunk: a later one is paler
FOLDED_STRENGTHS = (1.0, 0.4)  # the same for a V, whose chunks are two: all that it is about
LEFT, HEAD, WORK, GAP, LANE = 66.0, 30.0, 30.0, 6.0, 15.0
NARROWEST_IDLE = 0.5  # pixels: a shorter idle stretch is rounding
WAITS = 9.0  # the height of a wait, at the foot of the work that it interrupts: their label is above it
BESIDE = 226.0  # the width of what stands beside a timeline: its states, and bars of what is held
HELD, BAR = 122.0, 14.0  # the longest of these bars; their height, at the foot of the row
FLIGHT = 0.8  # of the shortest op: what is sent at once travels so long, to be seen
FULL_LANES = 4  # messages under way at once are drawn below each other; more lanes than these share their height
MOST_ARROWS, MOST_OPS = 300, 100  # in a picture; in a cell of the table


def draw_timelines(
    timelines: Sequence[Timeline], titles: Sequence[str], *, in_flight: bool = False, unit: str | None = None
) -> Scene:
    """Draw timelines below each other on one scale: a prediction and a measurement, for example.

    Each shows what a rank computed, where it waited, and below that which messages it had under way. ``in_flight`` adds
    bars of the micro-batches that each rank holds. ``unit`` is "ms", "s" or "time units"; by default, a simulation of a
    second or more is in time units.
    """
    unit, right = unit or _unit_of(timelines), WIDTH - (BESIDE if in_flight else 12)
    most = max(peak for timeline in timelines for peak in peaks_in_flight(timeline)) if in_flight else 1
    end, marks = max(each.makespan_seconds for each in timelines) or 1.0, []
    for rows in (all_rows := stacked(timelines, titles, unit, end, right)):
        marks += rows.marks(f"{time_text(rows.timeline.makespan_seconds, unit)}, {rows.timeline.bubble_share:.1%} idle")
        if in_flight:
            marks += [label(f"{rows.key}held", right + 12, rows.top - 16, "micro-batches held"), *rows.bars(most)]
    beside = (right + 12, WIDTH) if in_flight else (0.0, 0.0)
    travellers = [each for rows in all_rows for each in rows.travellers(most if in_flight else 0)]
    return with_axis(all_rows, marks, _table(timelines, titles, unit, in_flight), beside, travellers)


class Rows:
    """The rows of one timeline in a picture: the first one's y is ``top``, and ``end`` seconds reach to ``right``."""

    def __init__(self, timeline: Timeline, title: str, key: str, top: float, end: float, right: float, unit: str):
        self.timeline, self.title, self.facts, self.key, self.unit = timeline, title, "", key, unit
        self.before = ""  # the name of a rank, where a picture has several timelines
        self.top, self.end, self.right = top, end, right
        self.begin, self.scale = min((span.start for span in timeline.spans), default=0.0), (right - LEFT) / end
        self.lanes = {rank: in_lanes(timeline.of(rank, COMMUNICATION)) for rank in timeline.ranks}
        self.messages = {
            span: f"{key}message{rank}.{lane}.{number}"
            for rank, lanes in self.lanes.items()
            for lane, spans in enumerate(lanes)
            for number, span in enumerate(spans)
        }
        self.sent: dict[Any, Span] = {(span.rank, span.op): span for span in self.messages if span.op}
        num_lanes = max(map(len, self.lanes.values()), default=0)
        self.lane = LANE * min(1, FULL_LANES / max(1, num_lanes))
        self.height = WORK + GAP + self.lane * num_lanes + GAP / 2 * bool(num_lanes)
        self.bottom = top + self.height * max(1, len(timeline.ranks))
        self.num_chunks = num_chunks(timeline)
        self.links, self._held = links(timeline), {rank: held_over_time(timeline, rank) for rank in timeline.ranks}
        pairs = ((need, span) for span, needs in self.links.items() for need in needs)
        is_turn = any(need.rank == span.rank and need.kind == span.kind for need, span in pairs)
        self.folds = self.num_chunks == 2 and is_turn  # a rank gives itself its input, where a V turns

    def x(self, seconds: float) -> float:
        return LEFT + (seconds - self.begin) * self.scale

    def y(self, rank: int) -> float:
        return self.top + self.timeline.ranks.index(rank) * self.height

    def times(self, *moments: float) -> str:
        """Write a moment since the start, or a stretch from one to another, with one unit."""
        texts = [time_text(moment - self.begin, self.unit) for moment in moments]
        return f"{' to '.join(text.partition(' ')[0] for text in texts)} {self.unit}" if texts[1:] else texts[0]

    def held(self, rank: int, now: float) -> float:
        """Return how many micro-batches a rank holds at this moment."""
        return self._held[rank][bisect_right(self._held[rank], now, key=itemgetter(0)) - 1][1]

    def marks(self, facts: str) -> Iterable[Mark]:
        """Yield the title with these facts at its right; each rank's name, background, work, waits and messages."""
        self.facts = f"{self.timeline.source}: {facts}"
        yield label(f"{self.key}title", 0, self.top - HEAD + 13, self.title, size=LARGE, bold=True)
        yield label(f"{self.key}facts", self.right, self.top - HEAD + 14, self.facts, anchor="end")
        for rank in self.timeline.ranks:
            place = LEFT, self.y(rank), self.timeline.makespan_seconds * self.scale, WORK
            fact = f"rank {rank} is idle for {1 - self.timeline.utilisation(rank):.1%} of the time"
            yield label(f"{self.key}rank{rank}", 0, self.y(rank) + WORK / 2, f"rank {rank}")
            yield box(f"{self.key}idle{rank}", *place, IDLE, means="idle", fact=fact)
        for rank in self.timeline.ranks:
            yield from self._idle(rank)
        yield from self._work()
        for rank in self.timeline.ranks:
            waits = [span for span in self.timeline.of(rank, WAIT) if span.seconds * self.scale >= 1]
            for number, span in enumerate(waits):
                look, place = Look(means="waits", edge=GREY, dashed=True), (WORK - WAITS, WAITS)
                if not self.links:  # else the idle stretch says it
                    why, awaits = self._under_way(rank, span.start, span.end)
                    look |= Look(row=self._row(rank), name=why or "waits", awaits=awaits)
                    look |= Look(short=why.partition(" until ")[0])
                yield self._box(f"{self.key}wait{rank}.{number}", span, IDLE, place=place, **look)
            for lane, messages in enumerate(self.lanes[rank]):
                place = WORK + 2 + lane * self.lane, self.lane - min(1, self.lane / 4)
                for span in messages:
                    look = Look(edge=MUTED, means="message under way", tags=(self._name(span, ">"),))
                    look |= Look(row=self._row(rank), name=f"{span.label} under way")
                    texts = [span.label, *ways(span.op)[1:2]] if span.op else span.label
                    yield self._box(self.messages[span], span, "#ffffff", texts, place, **look)

    def _row(self, rank: int) -> str:
        return f"{self.before}rank {rank}"

    def _level(self, rank: int, now: float) -> float | None:
        return self.held(rank, now) if self.links else None

    def _idle(self, rank: int) -> Iterable[Mark]:
        """Yield the stretches of a rank without work: each says why, and what it awaits."""
        reached, finish = self.begin, self.begin + self.timeline.makespan_seconds
        for number, span in enumerate([*self.timeline.of(rank, *COMPUTING), None]):
            until = span.start if span else finish
            if (width := (until - reached) * self.scale) >= NARROWEST_IDLE:
                why, awaits = self.why_idle(rank, reached, span)
                name, place = f"idle: {why}".removesuffix(": "), (self.x(reached), self.y(rank), width, WORK)
                short = why.partition(" until ")[0].replace(" has all that it needs, and", "") if span else "done"
                fact = f"rank {rank} is idle: {self.times(reached, until)}; {why}".removesuffix("; ")
                look = Look(row=self._row(rank), name=name, awaits=awaits, level=self._level(rank, reached))
                look |= Look(short=short or "idle")
                yield box(f"{self.key}gap{rank}.{number}", *place, IDLE, fact=fact, radius=0, live=True, **look)
            reached = max(reached, span.end if span else finish)

    def why_idle(self, rank: int, since: float, after: Span | None) -> tuple[str, tuple[str, ...]]:
        """Return why a rank is idle from this moment until an op, or the end, and the keys of what it waits for."""
        if not after:
            return "it has done all its work", ()
        if after not in self.links:
            waits = any(span.start < after.start and span.end > since for span in self.timeline.of(rank, WAIT))
            return ("", ()) if waits else self._under_way(rank, since, after.start)  # a wait says it itself
        arrivals = {}
        for need in self.links[after]:
            message = self.sent.get((need.rank, need.op), need) if need.rank != rank else need
            arrivals[need] = max(need, message, key=lambda span: span.end)
        need = max(arrivals, key=lambda need: arrivals[need].end, default=None)
        if need is None or arrivals[need].end <= since:
            return f"{after.label} has all that it needs, and starts later", ()
        awaited = arrivals[need]
        key = self.messages.get(awaited) or self._name(awaited)
        return f"{after.label} waits for {need.label} of rank {need.rank} until {self.times(awaited.end)}", (key,)

    def _under_way(self, rank: int, since: float, until: float) -> tuple[str, tuple[str, ...]]:
        """Return which message of a rank was under way when a wait ended: the one that ended next to it."""
        spans = [span for span in self.timeline.of(rank, COMMUNICATION) if span.start < until and span.end > since]
        if not spans:
            return "", ()
        span = min(spans, key=lambda span: (abs(span.end - until), span.start))
        return f"waits for {span.label} until {self.times(span.end)}", (self.messages[span],)

    def _work(self) -> Iterable[Mark]:
        """Yield the ops, and arrows between those of different ranks, seen when a reader points at either end."""
        after = defaultdict(list)
        for span, needs in self.links.items():
            for need in needs:
                after[need].append(span)
        work = [span for rank in self.timeline.ranks for span in self.timeline.of(rank, *COMPUTING)]
        texts = {rank: self._texts(rank) for rank in self.timeline.ranks}
        for number, span in enumerate(work):
            chunk = span.op.chunk if span.op else 0
            means = WORDS[span.kind] + ", chunk 0" * (self.num_chunks > 1)
            if chunk:
                means = f"chunk {chunk}" + " (f0 is F0.1)" * self.folds if span.kind == "forward" else ""
            lights = *map(self._name, (*self.links.get(span, ()), *after[span])), self._name(span, ">")
            key, fill = self._name(span) if span.op else f"{self.key}work{number}", KIND_COLOR[span.kind]
            fill = tint(fill, self._strength(chunk))
            tags = (self._name(span), *([f"micro-batch{span.op.micro_batch}"] if span.op else []))
            look = Look(edge="#ffffff", means=means, tags=tags, lights=lights)
            look |= Look(row=self._row(span.rank), name=span.label, level=self._level(span.rank, span.start))
            text, size = texts[span.rank].get(span, (span.label, 12))
            yield self._box(key, span, fill, text, size=size, **look)
        pairs = [(need, span) for need, spans in after.items() for span in spans if span.rank != need.rank]
        for need, span in pairs if len(pairs) <= MOST_ARROWS else ():
            tags = self._name(need, ">"), self._name(span, ">"), f"micro-batch{span.op.micro_batch if span.op else ''}"
            inside = min(need.seconds, span.seconds) / 3
            ends = [(self.x(need.end - inside), need.rank), (self.x(span.start + inside), span.rank)]
            points = [(x, self.y(rank) + WORK / 2) for x, rank in ends]
            yield arrow(f"{self._name(need)}>{self._name(span)}", points, INK, shy=True, tags=tags)

    def _texts(self, rank: int) -> dict[Span, tuple[str, float]]:
        """Return what stands in each op of a row, and how large: all are written in the one way that fits them all."""
        spans = [span for span in self.timeline.of(rank, *COMPUTING) if span.op]
        for texts in zip(*(ways(span.op, self.folds) for span in spans if span.op)):
            widths = [span.seconds * self.scale - 4 for span in spans]
            size = min(fitting(text, width, WORK - 2, 12) for text, width in zip(texts, widths))
            if size:
                return {span: (text, size) for span, text in zip(spans, texts)}
        return dict.fromkeys(spans, ("", 12))

    def journeys(self) -> dict[str, str]:
        """Say of each micro-batch when it is on which rank, how often it travels, and how long it is kept."""
        ways, found = defaultdict(list), {}
        for span in (span for span in self.links if span.op):
            ways[span.op and span.op.micro_batch].append(span)
        for number, spans in sorted(ways.items()):
            by_rank = {rank: [span for span in spans if span.rank == rank] for rank in self.timeline.ranks}
            places = [f"rank {rank} from {self.times(min(s.start for s in own), max(s.end for s in own))}"
                      for rank, own in by_rank.items() if own]  # fmt: skip
            sent = sum(need.rank != span.rank for span in spans for need in self.links[span])
            says = f"micro-batch {number} is kept on {', '.join(places)}; it travels {sent} times between ranks"
            found[f"micro-batch{number}"] = f"{self.title}: {says}".removeprefix(": ")
        return found

    def _box(self, key: str, span: Span, fill: str, text=(), place=(0.0, WORK), **look) -> Mark:
        width = max(0.5, span.seconds * self.scale)
        fact = f"{span.label} on rank {span.rank}: {self.times(span.start, span.end)}"
        if span in self.links:
            needs = " and ".join(f"{need.label} of rank {need.rank}" for need in self.links[span]) or "no other op"
            fact += f"; needs {needs}; micro-batches held then: {self.held(span.rank, span.start):.3g}"
        place, edge = (self.x(span.start), self.y(span.rank) + place[0], width, place[1]), min(1, width / 8)
        look = Look(fact=fact, size=12, edge_width=edge, radius=min(3, width / 4)) | look
        return box(key, *place, fill, text, **look)

    def _name(self, span: Span, before: str = "") -> str:
        return f"{self.key}{before}{span.rank}.{span.label.split()[-1]}"

    def bars(self, most: float) -> Iterable[Mark]:
        """Yield bars of the micro-batches each rank holds, at its peak and now; the longest has ``most``."""
        x, unit, height = WIDTH - BESIDE + 12, HELD / max(most, 1), BAR
        for rank, peak in zip(self.timeline.ranks, peaks_in_flight(self.timeline)):
            y, key = self.y(rank) + WORK - BAR, f"{self.key}held{rank}"
            fact = f"micro-batches whose activations rank {rank} holds: at most {peak:.3g}"
            yield box(f"{key}.peak", x, y, peak * unit, height, tint(INK, 0.15), fact=fact)
            look = Look(row=self._row(rank), level=peak, fact=fact)
            yield box(f"{key}.now", x, y, peak * unit, height, tint(INK, 0.6), **look)
            for cut in range(1, ceil(peak)) if unit > 5 else ():
                yield line(f"{key}.{cut}", [(x + cut * unit, y), (x + cut * unit, y + height)], "#ffffff")
            yield label(f"{key}.number", x + peak * unit + 6, y + height / 2, f"{peak:.3g}")

    def travellers(self, most: float) -> Iterator[Traveller]:
        """Yield the messages between ranks and, unless ``most`` is 0, the micro-batches that pile up on their bars."""
        flight = FLIGHT * min((span.seconds for span in self.links), default=0.0)
        for span, needs in self.links.items():
            for need in needs:
                if need.rank != span.rank and need.op:
                    yield self._message(need, need.op, span.rank, flight)
        for rank in self.timeline.ranks if most and self.links else ():
            yield from self._pile(rank, HELD / max(most, 1) / self.num_chunks, flight)

    def _message(self, need: Span, op: Op, target: int, flight: float) -> Traveller:
        """Return what an op needs of another rank, on its way; it takes a little longer than it does if it is fast."""
        sent = self.sent.get((need.rank, op), replace(need, start=need.end))
        more = max(0.0, flight - sent.seconds) / 2
        frames = []
        for moment, rank in ((sent.start - more, need.rank), (sent.end + more, target)):
            frames.append((self._share(moment), self.x(moment), self.y(rank) + WORK / 2))
        return Traveller(f"{op.micro_batch}", 20, 20, 10, KIND_COLOR[need.kind], frames)

    def _pile(self, rank: int, width: float, flight: float) -> Iterator[Traveller]:
        """Yield a box for each pass of a micro-batch, from its forward to the last op that needs what that kept.

        It goes to the first place that is free.
        """
        y = self.y(rank) + WORK - BAR / 2
        passes: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in self.timeline.of(rank, *COMPUTING):
            if span.op:
                passes[span.op.micro_batch, span.op.chunk].append(span)
        widest = max((text_width(str(number), SMALLEST) for number, _ in passes), default=0.0)
        free: list[int] = []
        leaves: list[tuple[float, int]] = []  # when the box of each place that is taken goes
        for (number, chunk), spans in sorted(passes.items(), key=lambda each: each[1][0].start):
            first, last = spans[0], spans[-1]
            while leaves and leaves[0][0] <= first.start:
                heappush(free, heappop(leaves)[1])
            place = heappop(free) if free else len(leaves)
            heappush(leaves, (last.end, place))
            there = WIDTH - BESIDE + 12 + (place + 0.5) * width
            arrives = min(first.start + flight, last.end)
            frames = [(self._share(first.start), self.x(first.start), self.y(rank) + WORK / 2)]
            frames += [(self._share(arrives), there, y), (self._share(last.end), there, y)]
            text = str(number) if widest + 3 < width else ""
            fill = tint(KIND_COLOR["forward"], self._strength(chunk))
            yield Traveller(text, width - 1, BAR, 2, fill, frames)

    def _share(self, moment: float) -> float:
        return (moment - self.begin) / self.end

    def _strength(self, chunk: int) -> float:
        strengths = FOLDED_STRENGTHS if self.folds else CHUNK_STRENGTHS
        return strengths[chunk % len(strengths)]


def links(timeline: Timeline) -> dict[Span, list[Span]]:
    """Return for each op those that it needs; nothing if the ranks are not the stages of one pipeline."""
    stages = [[span for span in timeline.of(rank, *COMPUTING) if span.op] for rank in timeline.ranks]
    spans = {(stage, span.op): span for stage, spans in enumerate(stages) for span in spans if span.op}
    p, v = max(1, len(stages)), num_chunks(timeline)
    for place in [round_robin(p, v), *([v_shape(p)] if v == 2 else [])]:  # the order of ops tells which it is
        schedule = Schedule("drawn", p, 1, [], v, stages=place)
        found: dict[Span, Any] = {span: [*map(spans.get, schedule.needs(*at))] for at, span in spans.items()}
        if all(need and need.end <= span.start for span, needs in found.items() for need in needs):
            return found
    return {}


def ways(op: Op, folds: bool = False) -> tuple[str, ...]:
    """Return the ways to write an op in a box: whole, without the chunk, or the number alone: the colour is the letter.

    Where a pipeline ``folds``, chunk 1 has small letters instead of its number.
    """
    letter = LETTER[op.kind].lower() if folds and op.chunk else LETTER[op.kind]
    return str(op), f"{letter}{op.micro_batch}", f"{op.micro_batch}"


def in_lanes(messages: Iterable[Span]) -> list[list[Span]]:
    """Return messages by lane: each is in the first lane that is free when it starts, so none covers another."""
    lanes: list[list[Span]] = []
    for span in messages:
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def peaks_in_flight(timeline: Timeline) -> list[float]:
    """Return the most micro-batches each rank holds at once; with v chunks per rank, a pass through one counts 1/v."""
    return [max(held for _, held in held_over_time(timeline, rank)) for rank in timeline.ranks]


def held_over_time(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return how many micro-batches a rank holds, and from when on."""
    chunks = num_chunks(timeline)
    return [(seconds, count / chunks) for seconds, count in timeline.in_flight(rank)]


def num_chunks(timeline: Timeline) -> int:
    return 1 + max((span.op.chunk for span in timeline.spans if span.op), default=0)


def time_text(seconds: float, unit: str) -> str:
    """Write a length of time in three digits, with its unit.

    >>> time_text(0.0321, "ms"), time_text(33, "time units"), time_text(1.4604, "ms"), time_text(1, "time units")
    ('32.1 ms', '33 time units', '1,460 ms', '1 time unit')
    """
    number = three_digits(seconds * (1e3 if unit == "ms" else 1))
    return f"{number} {unit.replace('units', 'unit') if number == '1' else unit}"


def _unit_of(timelines: Sequence[Timeline]) -> str:
    end = max(timeline.makespan_seconds for timeline in timelines)
    if end >= 1 and all(timeline.source == "simulated" for timeline in timelines):
        return "time units"
    return "s" if end >= 10 else "ms"


def stacked(timelines: Sequence[Timeline], titles: Sequence[str], unit: str, end: float, right: float) -> list[Rows]:
    """Return the rows of timelines below each other; ``end`` seconds are drawn from `LEFT` to ``right``."""
    rows = []
    for number, (timeline, title) in enumerate(zip(timelines, titles, strict=True)):
        top = rows[-1].bottom + 12 if rows else 0.0
        rows.append(Rows(timeline, title, f"{number}." if number else "", top + HEAD, end, right, unit))
        rows[-1].before = f"{title}, " * (len(timelines) > 1)
    most = max(each.num_chunks for each in rows)
    folds = most == 2 and any(each.folds for each in rows)
    for each in rows:  # one legend is for all of them
        each.num_chunks, each.folds = most, folds
    return rows


def with_axis(
    rows: Sequence[Rows], marks: Sequence[Mark], table: Table, beside: tuple[float, float] = (0.0, 0.0),
    travellers: Sequence[Traveller] = (),
) -> Scene:  # fmt: skip
    """Return the scene of these rows with a time axis below them, about eight ticks at round numbers, and a legend.

    ``beside`` is where what stands beside the rows begins and ends, if anything does.
    """
    y, right, unit = rows[-1].bottom + 4, rows[-1].right, rows[-1].unit
    end = rows[-1].end * (1e3 if unit == "ms" else 1)
    power = 10 ** floor(log10(end / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= end / 8)
    axis = [line("axis", [(LEFT, y), (right, y)], GREY, 1)]
    axis.append(label("axis.unit", LEFT - 10, y + 17, unit, anchor="end", ink=MUTED, size=11))
    for number in range(floor(end / step + 1e-6) + 1):
        x = LEFT + number * step * (right - LEFT) / end
        axis.append(line(f"tick{number}", [(x, y), (x, y + 5)], GREY, 1))
        axis.append(label(f"tick{number}.word", x, y + 17, f"{number * step:.6g}", anchor="middle", ink=MUTED))
    marks = [*marks, *axis, *legend(marks, 0, y + 48)]
    says = "; ".join(f"{each.title}: {each.facts}".removeprefix(": ") for each in rows)
    title = " and ".join(each.title for each in rows if each.title) or "Timeline"
    journeys = defaultdict(list)
    for tag, text in (each for row in rows for each in row.journeys().items()):
        journeys[tag].append(text)
    told = {tag: " · ".join(texts) + "." for tag, texts in journeys.items()}
    hint = {"": "Click an op to follow its micro-batch."} if told else {}
    clock = LEFT, right, rows[0].top, rows[-1].bottom, end, unit, *beside  # ``end`` is in this unit
    played = dict[str, Any](clock=clock, travellers=travellers)
    return Scene(title, says, marks, marks[-1].y + 14, table=table, journeys=told | hint, **played)


def _table(timelines: Sequence[Timeline], titles: Sequence[str], unit: str, in_flight: bool) -> Table:
    """Return when each rank's ops start, and how long it computes, waits and has messages under way."""
    rows = []
    for timeline, title in zip(timelines, titles):
        for rank, peak in zip(timeline.ranks, peaks_in_flight(timeline)):
            begin, spans = timeline.spans[0].start, list(timeline.of(rank, *COMPUTING))
            ops = [f"{span.label} {time_text(span.start - begin, unit).partition(' ')[0]}" for span in spans[:MOST_OPS]]
            lengths = timeline.computing_seconds, timeline.waiting_seconds, timeline.communicating_seconds
            cells = [time_text(seconds(rank), unit) for seconds in lengths] + [f"{peak:.3g}"] * in_flight
            rows.append((title, str(rank), *cells, ", ".join(ops) + ", ..." * (len(spans) > MOST_OPS)))
    heads = "", "rank", "computing", "waits", "messages under way", *["micro-batches held"] * in_flight
    return Table((*heads, f"ops, and when each starts ({unit})"), rows)
