"""Draw what a collective does: every rank's tensor before and after it, in the colours of those whose data it is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from course.pictures.parts import Place, heading
from course.pictures.scene import WIDTH, Mark, Scene, arrow, box, label
from course.pictures.style import FRAME, MUTED, tint
from course.table import Table

if TYPE_CHECKING:  # it imports torch
    from course.measure.flow import Flow

RANK_COLOR = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#dddddd")
"""Paul Tol's light scheme, made for labelled boxes: safe for colour-blind readers, and none of the axes' colours."""
NAME, GAP, HEAD, ROW, CELL = 58.0, 34.0, 66.0, 52.0, 44.0  # pixels: "rank 0", the arrow, above ranks, a rank, its boxes
TOP, WIDEST = 52.0, 68.0  # pixels above the ranks of a flow, and from one element to the next


def draw_flow(flow: "Flow", title: str = "") -> Scene:
    """Draw every rank's tensor before (left) and after (right)."""
    return draw_flows({title: flow}, 1)


def flow_steps(flow: "Flow", title: str = "") -> list[Scene]:
    """Draw a flow in two steps: from the first to the second, every element travels to where it ends."""
    return [draw_flows({title: flow}, 1, arrived=arrived) for arrived in (False, True)]


def draw_flows(flows: "Mapping[str, Flow]", num_columns: int = 2, *, arrived: bool = True) -> Scene:
    """Draw several flows in columns, each under its name; ``arrived`` says whether the elements are where they end."""
    marks, rows, one = [], [], len(flows) == 1
    width, height = (WIDTH + GAP) / num_columns - GAP, TOP + max(len(flow.before) for flow in flows.values()) * ROW
    for number, (name, flow) in enumerate(flows.items()):
        down, right = divmod(number, num_columns)
        marks += _flow(flow, name, f"{number}.", right * (width + GAP), down * height, width, arrived)
        for rank, (start, end, sources) in enumerate(zip(flow.before, flow.after, flow.sources)):
            after = [numbers_text(end), ", ".join(map(source_text, sources))] if end and sources else ["nothing", ""]
            rows.append([name, f"rank {rank}", numbers_text(start), *(after if arrived else ["", ""])][one:])
    says = "What each rank has afterwards, and whose data it is" if arrived else "What each rank has before"
    table = Table(("operation", "rank", "before", "after", "data")[one:], rows)
    bottom = max(mark.bottom for mark in marks) + 8
    return Scene(", ".join(filter(None, flows)), says, marks, bottom, table=table)


def _flow(flow: "Flow", name: str, key: str, x, y, width, arrived: bool) -> Iterable[Mark]:
    """Yield the marks of one flow; what travels is below what stays until it arrives."""
    columns = max(map(len, flow.before))
    pitch = min(WIDEST, (width - NAME - GAP) / (columns + max(len(row or ()) for row in flow.after)))
    after_x, top = x + NAME + columns * pitch + GAP, y + TOP
    place = lambda left, rank, element: (left + element * pitch, top + rank * ROW, pitch - 4, CELL)  # noqa: E731
    yield from [*heading(key, x, y, name), label(f"{key}after", after_x, top - 16, "after", ink=MUTED)]
    above = []
    for rank, (row, origins) in enumerate(zip(flow.after, flow.origins)):
        above.append(rank_box(key, rank, x, top + rank * ROW))
        if row is None or origins is None:
            yield label(f"{key}nothing{rank}", after_x, top + rank * ROW + CELL / 2, "nothing" * arrived, ink=MUTED)
            continue
        for element, (value, parts) in enumerate(zip(row, origins)):
            ranks = tuple(dict.fromkeys(source for source, _ in parts))
            words = source_text(ranks), source_text(ranks).replace("from ", "r"), ""
            ways = [f"{value:g}\n{word}".strip() for word in words]
            terms = " + ".join(f"{flow.before[r][e]:g} (element {e} of rank {r})" for r, e in parts)
            fact = f"Rank {rank} has {value:g} in element {element}: {terms}"
            starts = [] if arrived else [place(x + NAME, *part) for part in parts]
            made = cell(f"{key}{rank}.{element}", place(after_x, rank, element), ways, parts, fact, key, starts)
            stays = len(parts) != 1  # the white box of a sum
            yield from made[:-1] if stays else made
            above += made[-1:] if stays and arrived else []
    middle, right = top + (len(flow.before) * ROW - 8) / 2, after_x - 6
    yield label(f"{key}before", x + NAME, top - 16, "before", ink=MUTED)
    yield arrow(f"{key}arrow", [(right - GAP + 8, middle), (right, middle)], MUTED)
    for rank, element in ((rank, element) for rank, row in enumerate(flow.before) for element in range(len(row))):
        value, spot = f"{flow.before[rank][element]:g}", place(x + NAME, rank, element)
        fact = f"Rank {rank} starts with {value} in element {element}"
        yield from cell(f"{key}start{rank}.{element}", spot, value, [(rank, element)], fact, key)
    yield from above


def cell(
    key: str, place: Place, text, parts: Sequence[tuple[int, int]], fact: str, tag: str, starts: Sequence[Place] = (),
    **look,
) -> list[Mark]:  # fmt: skip
    """Return the stripes of a sum, then the box with its text; ``parts`` are the ranks and elements in it."""
    (x, y, width, height), tags = place, tuple(f"{tag}{rank}.{part}" for rank, part in parts)
    look = {"edge": FRAME, "fact": fact, "tags": tags, "lights": tags, **look}
    if len(parts) == 1:
        return [box(key, *(*starts, place)[0], rank_color(parts[0][0]), text, **look)]
    step, low, stripes = width / max(1, len(parts)), 0.74 * height, []
    for index, ((rank, _), own) in enumerate(zip(parts, tags)):
        spot = starts[index] if starts else (x + index * step, y + low, step, height - low)
        says = f"Rank {rank}'s part. {fact}"
        stripes.append(box(f"{key}<{own}", *spot, rank_color(rank), "", own, edge=FRAME, fact=says))
    return [*stripes, box(key, x, y, width, low, "#ffffff", text, **look)]


def rank_box(prefix: str, rank: int, x: float, y: float) -> Mark:
    return box(f"{prefix}rank{rank}", x, y, NAME - 6, CELL, rank_color(rank), f"rank {rank}")


def rank_color(rank: int) -> str:
    """Return a rank's colour: from the eighth on, the first ones again, each time paler."""
    return tint(RANK_COLOR[rank % 8], 0.55 ** (rank // 8))


def numbers_text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def source_text(ranks: Sequence[int]) -> str:
    """Say whose data it is.

    >>> source_text((2,)), source_text((0, 2)), source_text((0, 1, 2, 3))
    ('from 2', '0 + 2', 'sum of 4')
    """
    if len(ranks) == 1:
        return f"from {ranks[0]}"
    return " + ".join(map(str, ranks)) if len(ranks) == 2 else f"sum of {len(ranks)}"
