"""Draw Y = XA with small integers, cut over a tensor group: whole, dealt to the ranks, multiplied, and put together."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from course.pictures.parts import rank_name, titled
from course.pictures.scene import LARGE, Mark, Scene, box, label
from course.pictures.style import FRAME, FRAME_FILL, INK, TP, tints
from course.sizing.linear_cut import LinearCut
from course.table import Table

X = [[1, 2, 0, 1], [0, 1, 3, 2]]
A = [[1, 0, 2, 1], [3, 1, 0, 2], [0, 2, 1, 1], [2, 1, 1, 0]]
BATCH, SIZE = len(X), len(A)
TOP, PITCH, CELL, GAP = 92.0, 32.0, 29.0, 26.0  # pixels: above the ranks; from cell to cell; a cell; between ranks
LEFT = {"X": 100.0, "A": 300.0, "Y": 500.0, "whole": 740.0}
STRIPE = 7.0  # pixels: the height of what a rank gave to a sum


class Part(NamedTuple):
    """What a rank has: these columns of X and rows of A (``inner``), and these columns of A and Y (``outer``)."""

    rank: int
    inner: Sequence[int]
    outer: Sequence[int]

    def terms(self, row: int, column: int) -> list[tuple[int, int]]:
        return [(X[row][k], A[k][column]) for k in self.inner]

    def value(self, row: int, column: int) -> int:
        return sum(x * a for x, a in self.terms(row, column))


def small_cut(cut: str, tp_size: int) -> LinearCut:
    """Return the cut of these matrices; ValueError if they do not divide so."""
    return LinearCut(cut, SIZE, SIZE, tp_size, batch_size=BATCH)


def product_steps(cut: LinearCut, whole: bool = False) -> list[Scene]:
    """Draw the steps of a small cut; a reader who points at an element of Y sees its row and its column.

    The partial sums of a row cut fly together; the shards of a column cut do so only if Y is ``whole`` on every rank.
    """
    meets = cut.tp_size > 1 and (whole or cut.cut == "row")
    does = "adds the partial sums: every rank has Y" if cut.cut == "row" else "brings all columns of Y to every rank"
    says = [
        "One process: an element of Y is a row of X times a column of A.",
        f"Each rank has some {'columns' if cut.cut == 'column' else 'rows'} of A, and what of X they meet.",
        "Each rank multiplies what it has." + " Nothing is sent." * (not meets),
        f"The all-{'reduce' if cut.cut == 'row' else 'gather'} {does}.",
    ]
    return [_scene(cut, step, text) for step, text in enumerate(says if meets else says[:-1])]


def _parts(cut: LinearCut) -> list[Part]:
    everything = range(SIZE)
    owned = [cut.part_of(rank) for rank in range(cut.tp_size)]
    return [
        Part(rank, everything, part) if cut.cut == "column" else Part(rank, part, everything)
        for rank, part in enumerate(owned)
    ]


def _scene(cut: LinearCut, step: int, says: str) -> Scene:
    parts, by_columns = _parts(cut), cut.cut == "column"
    fills, height = tints(TP, cut.tp_size), max(len(parts[0].inner), BATCH) * PITCH + GAP
    bottom = TOP + max(SIZE * PITCH, height * cut.tp_size - GAP)
    total = (TOP + bottom) / 2 - BATCH * PITCH / 2
    marks, rows = [*_heads(step)], []
    for part in parts:
        top = TOP + part.rank * height * (step > 0)
        middle = top + (height - GAP) / 2
        if step:
            marks.append(rank_name(part.rank, middle))
        marks += _factors(part, by_columns, step, top, fills[part.rank])
        low = middle - BATCH * PITCH / 2
        if step > 1:
            marks += _sent(part, low if step == 2 else 0, total, by_columns, cut.tp_size, fills[part.rank])
            marks += _products(part, low, fills[part.rank], is_sum=not by_columns)
        values = "; ".join(str([part.value(row, column) for column in part.outer]) for row in range(BATCH))
        rows.append((f"rank {part.rank}", f"{[*part.inner]}", f"{[*part.outer]}", values if step > 1 else ""))
    if step == 0:
        marks += _result(parts, "Y", TOP + (SIZE - BATCH) * PITCH / 2, CELL)
    if step == 3:
        marks += _result(parts, "whole", total, CELL if by_columns else CELL - STRIPE)
    table = Table(("", "rows of A", "columns of A", "its part of Y"), rows, f"X = {X}, A = {A}")
    title = f"Y = XA in small integers, cut by {'columns' if by_columns else 'rows'} of A, t = {cut.tp_size}"
    return titled(title, says, marks, table, below=says, bottom=bottom)


def _heads(step: int) -> Iterator[Mark]:
    """Yield the names of the matrices above their columns, and the signs between them."""
    names = {"X": "X", "A": "A", "Y": "Y" if step in (0, 1) else "what a rank computes", "whole": "Y on every rank"}
    for name, left in LEFT.items():
        if name != "whole" or step == 3:
            yield label(f"head.{name}", left, TOP - 20, names[name], bold=True)
    yield label("times", LEFT["A"] - 34, TOP - 20, "×", size=LARGE)
    yield label("equals", LEFT["Y"] - 34, TOP - 20, "=", size=LARGE)


def _cell(key: str, name: str, row: float, column: float, top: float, fill: str, value: int, **look: Any) -> Mark:
    left = LEFT[name] + column * PITCH
    return box(key, left, top + row * PITCH, CELL, CELL, fill, str(value), **{"edge": FRAME, "radius": 2, **look})


def _factors(part: Part, by_columns: bool, step: int, top: float, fill: str) -> Iterator[Mark]:
    """Yield what a rank has of X and A: in their places in the whole or, dealt, side by side."""
    own = f"rank{part.rank}"
    middle = max(len(part.inner), BATCH) * PITCH / 2 if step else SIZE * PITCH / 2
    for number, k in enumerate(part.inner):
        for row in range(BATCH):
            at, low = (number if step else k), top + middle - BATCH * PITCH / 2
            look = dict(tags=(own, f"{own}.row{row}"), lights=(own,))
            fact = f"X[{row}, {k}] = {X[row][k]}" + f" on rank {part.rank}" * (step > 0)
            shade = FRAME_FILL if by_columns else fill
            yield _cell(f"X.{part.rank}.{row}.{k}", "X", row, at, low, shade, X[row][k], fact=fact, **look)
        for place, column in enumerate(part.outer):
            at = (number, place) if step else (k, column)
            low = top + middle - (len(part.inner) if step else SIZE) * PITCH / 2
            look = dict(tags=(own, f"{own}.column{column}"), lights=(own,))
            fact = f"A[{k}, {column}] = {A[k][column]} on rank {part.rank}"
            yield _cell(f"A.{k}.{column}", "A", *at, low, fill, A[k][column], fact=fact, **look)


def _products(part: Part, top: float, fill: str, is_sum: bool) -> Iterator[Mark]:
    """Yield what a rank computes: pointing at an element lights the row and the column that it is made of."""
    own = f"rank{part.rank}"
    for row in range(BATCH):
        for place, column in enumerate(part.outer):
            terms = " + ".join(f"{x}·{a}" for x, a in part.terms(row, column))
            value = part.value(row, column)
            what = "a part of " * is_sum + f"Y[{row}, {column}]"
            look: dict[str, Any] = dict(tags=(own, f"Y{row}.{column}", f"{own}.Y{row}.{column}"))
            look["lights"] = f"{own}.row{row}", f"{own}.column{column}", f"{own}.Y{row}.{column}"
            fact = f"Rank {part.rank}, {what}: {terms} = {value}"
            key = f"Y.{part.rank}.{row}.{column}"
            yield _cell(key, "Y", row, place, top, fill, value, fact=fact, **look)


def _sent(part: Part, low: float, total: float, by_columns: bool, tp_size: int, fill: str) -> Iterator[Mark]:
    """Yield copies of what a rank computes: under that at ``low`` or, if it is 0, in the total at ``total``."""
    for row in range(BATCH):
        for place, column in enumerate(part.outer):
            x, y, wide, tall = LEFT["Y"] + place * PITCH, low + row * PITCH, CELL, CELL
            if not low:
                x, y = LEFT["whole"] + column * PITCH, total + row * PITCH
            if not (low or by_columns):  # stripes, side by side
                wide, tall = CELL / tp_size, STRIPE
                x, y = x + part.rank * wide, y + CELL - STRIPE
            look: dict[str, Any] = dict(tags=(f"Y{row}.{column}",), edge=FRAME, radius=1)
            if not low:
                look["fact"] = f"Rank {part.rank} gave {part.value(row, column)} to Y[{row}, {column}]"
            yield box(f"sent.{part.rank}.{row}.{column}", x, y, wide, tall, fill, **look)


def _result(parts: Sequence[Part], name: str, top: float, tall: float) -> Iterator[Mark]:
    """Yield all of Y: computed by one process, or put together from the ranks' parts."""
    for row in range(BATCH):
        for column in range(SIZE):
            givers = [part for part in parts if column in part.outer]
            gave, tags = [part.value(row, column) for part in givers], [f"Y{row}.{column}"]
            lights = [f"rank{part.rank}.{each}" for part in givers for each in (f"row{row}", f"column{column}")]
            sums = f"{' + '.join(map(str, gave))} = " * (len(gave) > 1)
            fact = f"Y[{row}, {column}] = {sums}{sum(gave)}"
            look: dict[str, Any] = dict(edge=INK, radius=2, fact=fact, tags=(*tags,), lights=(*tags, *lights))
            place = LEFT[name] + column * PITCH, top + row * PITCH, CELL, tall
            shade = "none" if name == "whole" and tall == CELL else "#ffffff"
            yield box(f"result.{row}.{column}", *place, shade, str(sum(gave)), ink=INK, **look)
