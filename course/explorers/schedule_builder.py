"""Write a schedule by hand: drag ops into the rows of ranks, and see at once what runs, and who waits for whom."""

from collections import namedtuple
from collections.abc import Sequence

from course.explorers.base import Explorer, says_html
from course.explorers.choice import slider
from course.pictures.scene import WIDTH, Mark, Scene, Table, arrow, box, label
from course.pictures.style import FRAME_FILL, GREY, IDLE, KIND_COLOR, MUTED, tint
from course.pictures.timeline import LEFT
from labkit.schedules import FORWARD, Op, Schedule, ScheduleDeadlock, read_ops
from labkit.sizes import counted
from labkit.timeline import Span, Timeline

STUCK = "#C1121F"
TOP, TRAY, ROW, BAND = 34.0, 28.0, 34.0, 92.0
Choice = namedtuple("Choice", "num_stages num_micro_batches")


def schedule_builder(num_stages: int = 2, num_micro_batches: int = 3, rows: Sequence[str] = ()) -> "ScheduleBuilder":
    """Show a tray of F and B for each rank, and a row to put them into; ``rows`` has ops that are in place already."""
    return ScheduleBuilder(Choice(num_stages, num_micro_batches), [read_ops(row) for row in rows])


class ScheduleBuilder(Explorer):
    """A schedule that a reader writes: ``shown``. A click puts an op at the end of its row, or takes it back."""

    function, choice_type = "schedule_builder", Choice

    def __init__(self, choice: Choice, rows: list[list[Op]]):
        self.num_stages = slider("ranks p", range(1, 5), choice.num_stages)
        self.num_micro_batches = slider("micro-batches m", range(1, 9), choice.num_micro_batches)
        self.rows = rows
        super().__init__()
        self.picture.on_click(self._click)
        self.picture.on_drop(self._drop)

    def __repr__(self) -> str:
        rows = [" ".join(map(str, row)) for row in self.shown.ranks]
        return f"{self.function}({self.num_stages.value}, {self.num_micro_batches.value}, {rows})"

    def _click(self, key: str) -> None:
        kind, rank, op = _parse(key)
        if kind == "clear":
            self.rows = []
        elif kind == "op":
            self._move(rank, op, None if op in self.shown.ranks[rank] else len(self.shown.ranks[rank]))
        self._update()

    def _drop(self, key: str, zone: str) -> None:
        """Put an op where it was dropped: at the end of a row, before an op that has a place, or back into the tray."""
        (_, _, op), (kind, rank, before) = _parse(key), _parse(zone)
        row = [each for each in self.shown.ranks[rank] if each != op]
        if (kind, before) != ("op", op):
            index = row.index(before) if kind == "op" and before in row else None
            self._move(rank, op, len(row) if kind == "row" else index)
        self._update()

    def _move(self, rank: int, op: Op, index: int | None) -> None:
        self.rows = [[each for each in row if (r, each) != (rank, op)] for r, row in enumerate(self.shown.ranks)]
        if index is not None:
            self.rows[rank].insert(index, op)

    def _fit(self, choice: Choice) -> Schedule:
        """Return the schedule: the rows of these ranks, with the ops of these micro-batches."""
        p, m = choice
        return Schedule("mine", p, m, [[op for op in row if op.micro_batch < m] for row in [*self.rows, *[[]] * p][:p]])

    def _parts(self) -> tuple[Scene, str, str]:
        scene, (_, waits) = draw_own_schedule(self.shown), run_as_far_as_possible(self.shown)
        return scene, says_html(f"{scene.says}.", warns=bool(circle(self.shown, waits))), ""


def _parse(key: str) -> tuple[str, int, Op]:
    """Read the key of a mark: what it is, of which rank, and which op."""
    parts = key.split(".")
    kind, rank, op = parts + ["clear", "0", "F0"][len(parts) :]
    return kind, int(rank), read_ops(op)[0]


def run_as_far_as_possible(schedule: Schedule) -> tuple[Timeline, dict[int, tuple[Op, int, Op]]]:
    """Return when the ops run that can, F in 1 and B in 2 time units, and where ranks then wait; ops may be missing."""
    ended, free_at, spans = {}, [0.0] * schedule.num_stages, []
    try:
        for rank, op, needs in schedule.in_order():
            start = max(free_at[rank], 0.0, *(ended[need] for need in needs))
            free_at[rank] = ended[rank, op] = start + _seconds(op)
            spans.append(Span(rank, op.kind, str(op), start, free_at[rank], op))
    except ScheduleDeadlock as stuck:
        return Timeline(spans, "simulated"), stuck.waits
    return Timeline(spans, "simulated"), {}


def _seconds(op: Op) -> float:
    return 1.0 if op.kind == FORWARD else 2.0


def circle(schedule: Schedule, waits: dict[int, tuple[Op, int, Op]]) -> list[int]:
    """Return ranks that wait for each other, each for the next; none if all wait for ops that have no place yet."""
    for rank in waits:
        seen = []
        while rank in waits and rank not in seen and waits[rank][2] in schedule.ranks[waits[rank][1]]:
            seen.append(rank)
            rank = waits[rank][1]
        if rank in seen:
            return seen[seen.index(rank) :]
    return []


def draw_own_schedule(schedule: Schedule) -> Scene:
    """Draw for each rank a tray of ops without a place, and its row: ops at their times, and those that cannot run.

    A deadlock is a circle of red arrows. The keys are ``op.RANK.OP``, ``row.RANK``, ``tray.RANK`` and ``clear``.
    """
    timeline, waits = run_as_far_as_possible(schedule)
    texts = {rank: f"rank {rank} waits at {op} for {need} of rank {other}" for rank, (op, other, need) in waits.items()}
    runs = {(span.rank, span.op): f"{span.op} of rank {span.rank} runs at {span.start:g}" for span in timeline.spans}
    ring, places, placed = circle(schedule, waits), _places(schedule, timeline), {}
    hint = "dashed: cannot run yet; red: ranks wait for each other in a circle"
    clear = box("clear", WIDTH - 110, 0, 110, 24, "#ffffff", "take all back", edge=GREY, fact="take all ops back")
    marks, table, wide = [label("hint", 0, 12, hint, ink=MUTED), clear], [], WIDTH - LEFT
    for rank, row in enumerate(schedule.ranks):
        y, stuck = TOP + rank * BAND, [op for op in row if (rank, op) not in runs]
        order = ", ".join(runs.get((rank, op), str(op)).replace(f" of rank {rank} runs", "") for op in row)
        table.append((str(rank), order, texts.get(rank, ""), str(schedule.peak_in_flight(rank))))
        facts = f"ops of rank {rank} without a place", f"the row of rank {rank}: drop its ops here, in order"
        marks.append(label(f"rank{rank}", 0, y + TRAY + 4 + ROW / 2, f"rank {rank}", bold=True))
        marks.append(box(f"tray.{rank}", LEFT, y, wide, TRAY, FRAME_FILL, fact=facts[0], drop=True))
        marks.append(box(f"row.{rank}", LEFT, y + TRAY + 4, wide, ROW, IDLE, fact=facts[1], drop=True))
        for op, place in places[rank].items():
            fact = runs.get((rank, op), f"{op} of rank {rank} has no place yet: click it, or drag it into the row")
            fill, look = KIND_COLOR[op.kind], dict(edge="#ffffff" if op in row else GREY)
            if op in stuck:
                fact = texts[rank] if op == stuck[0] else f"{op} of rank {rank} comes after {stuck[0]}, which waits"
                look = dict(edge=STUCK if rank in ring else MUTED, edge_width=2, dashed=True)
            lights = tuple(f"{other}.{need}" for other, need in schedule.needs(rank, op))
            look |= dict(tags=(f"{rank}.{op}",), lights=lights, fact=fact, drag=True, drop=True)
            fill = tint(fill, 0.3 if op in stuck else 1.0)
            placed[rank, op] = box(f"op.{rank}.{op}", LEFT + place[0], y + place[1], *place[2:], fill, str(op), **look)
    marks += placed.values()
    for rank in ring:
        op, other, needed = waits[rank]
        marks += _arrows(placed[rank, op], placed[other, needed], placed[other, waits[other][0]], texts[rank])
    says = _says(schedule, timeline, [texts[rank] for rank in ring], list(texts.values()))
    heads = "rank", "its row, and when each op runs", "waits", "micro-batches held at most"
    return Scene("Your own schedule", says, marks, TOP + schedule.num_stages * BAND, table=Table(heads, table))


def _places(schedule: Schedule, timeline: Timeline) -> list[dict[Op, tuple[float, float, float, float]]]:
    """Return x, y, width and height of each rank's ops: at their times, after those if stuck, or in the tray."""
    p, m = schedule.num_stages, schedule.num_micro_batches
    starts: list[dict] = [{span.op: span.start for span in timeline.of(rank)} for rank in range(p)]
    for rank, row in enumerate(schedule.ranks):
        free_at = max((span.end for span in timeline.of(rank)), default=0.0)
        for op in row:
            if op not in starts[rank]:
                starts[rank][op], free_at = free_at, free_at + _seconds(op)
    ends = [start + _seconds(op) for of_rank in starts for op, start in of_rank.items()]
    unit, step = (WIDTH - LEFT) / max([3.0 * (m + p - 1), *ends]), min(48, (WIDTH - LEFT) / 2 / m)
    ops = [Op(kind, i) for kind in schedule.kinds for i in range(m)]
    tray = {op: (4 + number * step, 2, step - 4, TRAY - 4) for number, op in enumerate(ops)}
    return [
        tray | {op: (start * unit, TRAY + 6, _seconds(op) * unit, ROW - 4) for op, start in of_rank.items()}
        for of_rank in starts
    ]


def _arrows(waits: Mark, needed: Mark, first: Mark, fact: str) -> list[Mark]:
    """Return a piece of the circle: from an op that waits to what it needs, and on to the op which that comes after."""
    x, to_x, back = (mark.x + mark.width / 2 for mark in (waits, needed, first))
    low, marks = needed.y + needed.height, []
    if waits.y != needed.y:
        down = needed.y > waits.y
        points = [(x, waits.y + waits.height * down), (to_x, low - needed.height * down)]
        marks.append(arrow(f"{waits.key}.waits", points, STUCK, 3, fact=fact))
    if needed is not first:
        points = [(to_x, low), (to_x, low + 14), (back, low + 14), (back, low)]
        fact = f"{needed.text} comes after {first.text}, which waits"
        marks.append(arrow(f"{needed.key}.after", points, STUCK, 3, fact=fact))
    return marks


def _says(schedule: Schedule, timeline: Timeline, ring: list[str], waits: list[str]) -> str:
    """Say whether all ranks finish, and if not, why."""
    missing = 2 * schedule.num_stages * schedule.num_micro_batches - sum(map(len, schedule.ranks))
    if not any(schedule.ranks):
        return "Put the ops of each rank into its row: click an op, or drag it"
    if ring:
        return f"Deadlock: {'; '.join(ring)}"
    if missing:
        return "; ".join([f"{counted(missing, 'op')} to place", *waits])
    held = ", ".join(str(schedule.peak_in_flight(rank)) for rank in range(schedule.num_stages))
    took = f"All ranks finish after {timeline.makespan_seconds:g} time units"
    return f"{took}: idle / ideal {timeline.bubble_over_ideal:.3f}; micro-batches held at most, rank by rank: {held}"
