"""Write a schedule by hand: drag ops into the rows of ranks, and see at once what runs, and who waits for whom."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill as wrapped
from typing import NamedTuple

from course.explorers.base import Explorer, Parts
from course.explorers.control import buttons, checkbox, slider
from course.pictures import narrow, slide
from course.pictures.scene import SMALLEST, USUAL, WIDTH, Look, Mark, Scene, arrow, box, label, text_width
from course.pictures.style import FRAME_FILL, GREY, IDLE, KIND_COLOR, MUTED, tint
from course.pictures.timeline import FOLDED_STRENGTHS, LEFT, ways
from course.sizing import read_ops, simulate
from course.table import Table
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, ScheduleDeadlock, v_shape
from labkit.sizes import counted

STUCK = "#C1121F"
TOP, TRAY, ROW, BAND = 34.0, 28.0, 34.0, 92.0


class Sizes(NamedTuple):
    """A picture's width, where its rows begin, where its hint stands, its letters, and what stands before a row."""

    width: float
    left: float
    top: float
    hint: float
    line: int  # letters in a line
    letters: float
    smallest: float
    before: str = ""

    def name(self, word: str, number: int) -> str:
        return f"{self.before and word}{self.before}{number}"


WIDE = Sizes(WIDTH, LEFT, TOP, 12, 200, USUAL, SMALLEST, " ")
NARROW = Sizes(narrow.WIDTH, narrow.START, 104, 64, narrow.LINE_LETTERS, narrow.LETTERS, narrow.LETTERS)
SLIDE = Sizes(slide.WIDTH, 84.0, TOP, 12, 70, narrow.LETTERS, narrow.LETTERS, " ")
Waits = dict[int, tuple[Op, int, Op]]  # by rank: the op that waits, and the rank and op that it waits for


class schedule_builder(Explorer):
    """Show a tray of F and B for each rank, and a row to put them into; ``rows`` has ops that are in place already.

    A click puts an op at the end of its row, or takes it back; it can also be dragged. ``shown`` is the schedule. In a
    V, each rank has two stages, and its tray a line for each. Where the backward is split, there are Ws.
    """

    table = (
        ("pp_size", slider, "ranks p", range(1, 5), 2),
        ("num_micro_batches", slider, "micro-batches m", range(1, 9), 3),
        ("placement", buttons, "stages", ("in turn", "V"), "in turn"),
        ("split", checkbox, "backward in B and W", False),
    )

    def __init__(
        self,
        pp_size: int = 2,
        num_micro_batches: int = 3,
        rows: Sequence[str] = (),
        placement: str = "in turn",
        split: bool = False,
    ):
        self.rows: list[Sequence[Op]] = [read_ops(row) for row in rows]
        super().__init__(pp_size, num_micro_batches, placement, split)

    def __repr__(self) -> str:
        p, m, placement, split = self.choice
        values = [p, m, [" ".join(map(str, row)) for row in self.shown.ranks], placement, split]
        shown = values if split else values[:4] if placement == "V" else values[:3]
        return f"schedule_builder({', '.join(map(repr, shown))})"

    def click(self, key: str) -> None:
        if key == "clear":
            self.rows = []
            self.choose()
        elif key.startswith("op."):
            rank, [op] = _parse(key)
            self.drop(key, f"tray.{rank}" if op in self.shown.ranks[rank] else f"row.{rank}")

    def drop(self, key: str, zone: str) -> None:
        """Put an op where it was dropped: at the end of a row, before an op that has a place, or back into the tray."""
        (_, [op]), (rank, before) = _parse(key), _parse(zone)
        self.rows = list(self.shown.ranks)
        row = [each for each in self.rows[rank] if each != op]
        if zone.startswith("row"):
            row.append(op)
        elif before and before[0] in row:
            row.insert(row.index(before[0]), op)
        if before != [op]:
            self.rows[rank] = row
        self.choose()

    @property
    def picked(self) -> dict[str, str]:
        return {"rows": "-".join(" ".join(map(str, row)) for row in self.shown.ranks).rstrip("-")}

    def pick(self, words: Mapping[str, str]) -> None:
        rows: list[Sequence[Op]] = [read_ops(row) for row in words["rows"].split("-")]
        if any(len({*row}) < len(row) for row in rows):
            raise ValueError(f"rows = {words['rows']} must not have an op twice in a row: leave one out")
        self.rows = rows

    def _fit(self, choice) -> Schedule:
        """Return the schedule: the rows of these ranks, with the ops of these micro-batches, chunks and kinds."""
        p, m, placement, split = choice
        if placement not in ("in turn", "V"):
            raise ValueError(f"placement={placement!r} is unknown: use 'in turn' or 'V'")
        kinds = (FORWARD, BACKWARD, WEIGHT_GRADIENT)[: 2 + split]
        v, stages = (2, v_shape(p)) if placement == "V" else (1, ())
        rows = [[op for op in row if op.micro_batch < m and op.chunk < v and op.kind in kinds] for row in self.rows]
        return Schedule("mine", p, m, [*rows, *[[]] * p][:p], v, kinds, stages)

    @property
    def narrow_steps(self) -> Sequence[Scene]:
        return [draw_own_schedule(self.shown, NARROW)]

    @property
    def slide_steps(self) -> Sequence[Scene]:
        return [draw_own_schedule(self.shown, SLIDE)]

    def _parts(self) -> Parts:
        scene = draw_own_schedule(self.shown)
        return Parts([scene], f"{scene.says}.", warns=any(mark.edge == STUCK for mark in scene.marks))


def _parse(key: str) -> tuple[int, list[Op]]:
    """Return the rank in the key of a mark, and the op in it, if any."""
    _, rank, *op = key.split(".")
    return int(rank), list(read_ops(".".join(op)))


def units_of(schedule: Schedule) -> dict[str, float]:
    """Return how long each kind of op takes, in the units of time that `simulate` has, too."""
    input_gradient = 1.0 if WEIGHT_GRADIENT in schedule.kinds else 2.0
    times = {FORWARD: 1.0, BACKWARD: input_gradient, WEIGHT_GRADIENT: 1.0}
    return {kind: units / schedule.num_chunks for kind, units in times.items()}


def run_as_far_as_possible(schedule: Schedule) -> tuple[list[dict[Op, float]], list[list[Op]], Waits]:
    """Return when each rank's ops start (those that cannot run come last), which cannot run, and where ranks wait."""
    starts, free_at, waits = [{} for _ in schedule.ranks], [0.0] * schedule.pp_size, {}
    units = units_of(schedule)
    try:
        for rank, op, needs in schedule.in_order():
            starts[rank][op] = max([free_at[rank], *(starts[at][need] + units[need.kind] for at, need in needs)])
            free_at[rank] = starts[rank][op] + units[op.kind]
    except ScheduleDeadlock as deadlock:
        waits = deadlock.waits
    stuck = [[op for op in row if op not in starts[rank]] for rank, row in enumerate(schedule.ranks)]
    for rank, ops in enumerate(stuck):
        for op in ops:
            starts[rank][op], free_at[rank] = free_at[rank], free_at[rank] + units[op.kind]
    return starts, stuck, waits


def circle(schedule: Schedule, waits: Waits) -> list[int]:
    """Return ranks that wait for each other, each for the next; none if all wait for ops that have no place yet."""
    for rank in waits:
        seen = []
        while rank in waits and rank not in seen and waits[rank][2] in schedule.ranks[waits[rank][1]]:
            seen.append(rank)
            rank = waits[rank][1]
        if rank in seen:
            return seen[seen.index(rank) :]
    return []


def draw_own_schedule(schedule: Schedule, sizes: Sizes = WIDE) -> Scene:
    """Draw for each rank a tray of ops without a place, and its row: ops at their times, and those that cannot run.

    A deadlock is a circle of red arrows. The keys are ``op.RANK.OP``, ``row.RANK``, ``tray.RANK`` and ``clear``.
    """
    (starts, stuck, waits), p, m = run_as_far_as_possible(schedule), schedule.pp_size, schedule.num_micro_batches
    texts = {rank: f"rank {rank} waits at {op} for {need} of rank {other}" for rank, (op, other, need) in waits.items()}
    ring, wide, table, ops = circle(schedule, waits), sizes.width - sizes.left, [], {}
    v, kinds, units = schedule.num_chunks, schedule.kinds, units_of(schedule)
    unit = wide / max([3.0 * (m + p - 1), *(at + units[op.kind] for row in starts for op, at in row.items())])
    step, tray = min(48, wide / len(kinds) / m), v * TRAY
    in_tray = [Op(kind, number, chunk) for chunk in range(v) for kind in kinds for number in range(m)]
    marks = _above(sizes, v)
    for rank, row in enumerate(schedule.ranks):
        y = sizes.top + rank * (BAND + tray - TRAY)
        facts = f"ops of rank {rank} without a place", f"the row of rank {rank}: drop its ops here, in order"
        name = Look(text=sizes.name("rank", rank), size=sizes.letters)
        marks.append(label(f"rank{rank}", 0, y + tray + 4 + ROW / 2, bold=True, **name))
        for chunk in range(v if v > 1 else 0):
            name = Look(text=sizes.name("stage", schedule.stage_of(rank, chunk)), size=sizes.letters)
            marks.append(label(f"stage{rank}.{chunk}", 0, y + (chunk + 0.5) * TRAY, ink=MUTED, **name))
        marks.append(box(f"tray.{rank}", sizes.left, y, wide, tray, FRAME_FILL, fact=facts[0], drop=True))
        marks.append(box(f"row.{rank}", sizes.left, y + tray + 4, wide, ROW, IDLE, fact=facts[1], drop=True))
        for number, op in enumerate(in_tray):
            fact = f"{op} of rank {rank} has no place yet: click it, or drag it into the row"
            fill, look = KIND_COLOR[op.kind], Look(edge=GREY)
            fill = tint(fill, FOLDED_STRENGTHS[op.chunk]) if op.chunk else fill
            place = sizes.left + 4 + number % (len(kinds) * m) * step, y + op.chunk * TRAY + 2, step - 4, TRAY - 4
            if op in row:
                start = starts[rank][op]
                place = sizes.left + start * unit, y + tray + 6, units[op.kind] * unit, ROW - 4
                fact, look = f"{op} of rank {rank} runs at {start:g}", Look(edge="#ffffff")
            if op in stuck[rank]:
                first, fill = stuck[rank][0], tint(fill, 0.3)
                fact = texts[rank] if op == first else f"{op} of rank {rank} comes after {first}, which waits"
                look = Look(edge=STUCK if rank in ring else MUTED, edge_width=2, dashed=True)
            lights = tuple(f"{other}.{need}" for other, need in schedule.needs(rank, op))
            look |= Look(tags=(f"{rank}.{op}",), lights=lights, fact=fact, drag=True, drop=True, size=sizes.letters)
            words = [way for way in ways(op, v > 1) if text_width(way, sizes.smallest) <= place[2] - 4]
            ops[rank, op] = box(f"op.{rank}.{op}", *place, fill, words, **look)
        order = ", ".join(str(op) if op in stuck[rank] else f"{op} at {starts[rank][op]:g}" for op in row)
        table.append((str(rank), order, texts.get(rank, ""), f"{schedule.peak_in_flight(rank) / v:g}"))
    marks += ops.values()
    for rank in ring:
        op, other, needed = waits[rank]
        marks += _arrows(ops[rank, op], ops[other, needed], ops[other, waits[other][0]], texts[rank])
    says = _says(schedule, [texts[rank] for rank in ring], list(texts.values()))
    heads = "rank", "its row, and when each op runs", "waits", "micro-batches held at most"
    height = sizes.top + p * (BAND + tray - TRAY)
    return Scene("Your own schedule", says, marks, height, sizes.width, table=Table(heads, table))


def _above(sizes: Sizes, v: int) -> list[Mark]:
    """Return what stands above the rows: what is meant by how ops look, and the button that takes all back."""
    look = Look(edge=GREY, fact="take all ops back", click=True, size=sizes.letters)
    width = ceil(text_width("take all back", sizes.letters) + 5)
    clear = box("clear", sizes.width - width, 0, width, 24, "#ffffff", "take all back", **look)
    hint = "dashed: cannot run yet; red: ranks wait for each other in a circle" + "; f0 is F0.1" * (v > 1)
    return [label("hint", 0, sizes.hint, wrapped(hint, sizes.line), ink=MUTED, size=sizes.letters), clear]


def _arrows(waits: Mark, needed: Mark, first: Mark, fact: str) -> list[Mark]:
    """Return a piece of the circle: from an op that waits to the op that it needs, and on to what holds that one up."""
    x, to_x, back = (mark.x + mark.width / 2 for mark in (waits, needed, first))
    low, marks = needed.y + needed.height, []
    if waits.y != needed.y:
        down = needed.y > waits.y
        points = [(x, waits.y + waits.height * down), (to_x, low - needed.height * down)]
        marks.append(arrow(f"{waits.key}.waits", points, STUCK, width=3, fact=fact))
    if needed is not first:
        points = [(to_x, low), (to_x, low + 14), (back, low + 14), (back, low)]
        ops = (mark.key.split(".", 2)[2] for mark in (needed, first))
        fact = " comes after ".join(ops) + ", which waits"
        marks.append(arrow(f"{needed.key}.after", points, STUCK, width=3, fact=fact))
    return marks


def _says(schedule: Schedule, ring: list[str], waits: list[str]) -> str:
    """Say whether all ranks finish, and if not, why."""
    each = len(schedule.kinds) * schedule.num_chunks * schedule.num_micro_batches
    missing = schedule.pp_size * each - sum(map(len, schedule.ranks))
    if not any(schedule.ranks):
        return "Put the ops of each rank into its row: click an op, or drag it"
    if ring:
        return f"Deadlock: {'; '.join(ring)}"
    if missing:
        return "; ".join([f"{counted(missing, 'op')} to place", *waits])
    ranks = range(schedule.pp_size)
    held = ", ".join(f"{schedule.peak_in_flight(rank) / schedule.num_chunks:g}" for rank in ranks)
    timeline = simulate(schedule)
    took = f"All ranks finish after {timeline.makespan_seconds:g} time units"
    return f"{took}: idle / ideal {timeline.bubble_over_ideal:.3f}; micro-batches held at most, rank by rank: {held}"
