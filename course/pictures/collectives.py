"""Draw what a collective does: every rank's tensor before and after it, in the colours of those whose data it is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from course.pictures.parts import Place, heading
from course.pictures.scene import WIDTH, Mark, Scene, arrow, box, label
from course.pictures.style import FRAME, INK, MUTED, rank_color
from course.sizing.flow import Flow
from course.sizing.messages import Way
from course.table import Table

NAME, GAP, HEAD, ROW, CELL = 58.0, 34.0, 66.0, 52.0, 44.0  # pixels: "rank 0", the arrow, above ranks, a rank, its boxes
TOP, WIDEST = 52.0, 68.0  # pixels above the ranks of a flow, and from one element to the next


def flow_steps(flow: Flow, title: str = "") -> list[Scene]:
    """Draw a flow whole, then message by message from its start on: pieces travel from rank to rank, and add up.

    What the ranks have at the start and at the end is the flow's; the messages in between are simulated.
    """
    return [draw_flows({title: flow}, 1, now) for now in (None, *range(flow.num_messages + 1))]


def draw_flows(flows: Mapping[str, Flow], num_columns: int = 2, now: int | None = None) -> Scene:
    """Draw several flows in columns, each under its name, after ``now`` messages; by default, after all of them."""
    marks, rows, panels, one = [], [], [], len(flows) == 1
    width, height = (WIDTH + GAP) / num_columns - GAP, TOP + max(len(flow.before) for flow in flows.values()) * ROW
    last = max(flow.num_messages for flow in flows.values())
    now = last if now is None else now
    for number, (name, flow) in enumerate(flows.items()):
        down, right = divmod(number, num_columns)
        pieces = [piece for piece in _pieces(flow, now) if piece.joined]
        panels.append((right * (width + GAP), down * height, width, height))
        marks += _flow(flow, name, f"{number}.", right * (width + GAP), down * height, width, now)
        for rank, start in enumerate(flow.before):
            there = sorted({piece.at[1]: piece for piece in pieces if piece.at[0] == rank}.items())
            has = numbers_text([piece.value for _, piece in there]) or "nothing" * (now > 0)
            data = ", ".join(source_text(piece.ranks) for _, piece in there)
            rows.append([name, f"rank {rank}", numbers_text(start), has, data][one:])
    says = "What each rank has afterwards, and whose data it is" if now == last else "What each rank has before"
    if 0 < now < last:
        says = f"After message {now} of {last} (simulated; a rank sends one at a time)"
    table = Table(("operation", "rank", "before", "after" if now == last else "now", "data")[one:], rows)
    bottom, right = (max(getattr(mark, side) for mark in marks) for side in ("bottom", "right"))
    width, panels = (right, ()) if num_columns == 1 else (WIDTH, panels)
    return Scene(", ".join(filter(None, flows)), says, marks, bottom + 8, width, table, panels=panels)


class _Piece(NamedTuple):
    """An element of a result on its way: where it is, and which parts have joined it there."""

    key: str
    at: tuple[int, int]
    way: Way
    joined: list[tuple[int, int]]
    value: float

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank for rank, _ in self.joined))


def _pieces(flow: Flow, now: int) -> Iterable[_Piece]:
    """Yield what is under way or has arrived; a copy is there from one message before its own, below what it copies."""
    for (rank, element), way in sorted(flow.ways.items(), key=lambda each: -each[1].num_messages):
        if now + 1 < way.num_messages and not way.is_first:
            continue
        at, row = way.stops[min(now, way.num_messages)], flow.after[rank] or ()
        joined = [part for part, message in way.joins.items() if at and message <= now]
        value = row[element] if len(joined) == len(way.joins) else sum(flow.before[r][e] for r, e in joined)
        yield _Piece(f"{rank}.{element}", at or (rank, element), way, joined, value)


def _flow(flow: Flow, name: str, key: str, x, y, width, now: int) -> Iterable[Mark]:
    """Yield the marks of one flow; what travels is below what stays until it arrives."""
    columns, is_done = max(map(len, flow.before)), now >= flow.num_messages
    pitch = min(WIDEST, (width - NAME - GAP) / (columns + max(len(row or ()) for row in flow.after)))
    after_x, top, word = x + NAME + columns * pitch + GAP, y + TOP, "after" if is_done else "now"
    place = lambda left, rank, element: (left + element * pitch, top + rank * ROW, pitch - 4, CELL)  # noqa: E731
    yield from [*heading(key, x, y, name), label(f"{key}after", after_x, top - 16, word, ink=MUTED)]
    above = [rank_box(key, rank, x, top + rank * ROW) for rank in range(len(flow.before))]
    for rank in (rank for rank, row in enumerate(flow.after) if not row):
        text = "nothing" * is_done
        yield label(f"{key}nothing{rank}", after_x, top + rank * ROW + CELL / 2, text, ink=MUTED)
    for (rank, element), way in flow.ways.items():
        if now < way.num_messages:  # its place, until it is there
            fact = f"Rank {rank} has nothing in element {element} yet"
            empty = place(after_x, rank, element)
            yield box(f"{key}empty{rank}.{element}", *empty, "none", edge=FRAME, dashed=True, fact=fact)
    for piece in _pieces(flow, now):
        arrived, (rank, element) = now >= piece.way.num_messages, piece.at
        words = source_text(piece.ranks), source_text(piece.ranks).replace("from ", "r"), ""
        ways = [f"{piece.value:g}\n{word}".strip() for word in words]
        terms = " + ".join(f"{flow.before[r][e]:g} (element {e} of rank {r})" for r, e in piece.joined)
        fact = f"Rank {rank} has {piece.value:g} in element {element}{'' if arrived else ' so far'}: {terms}"
        apart = {part: place(x + NAME, *part) for part in piece.way.joins if part not in piece.joined}
        moved = now > 0 and not is_done and piece.at in piece.way.stops[now : now + 1]
        look = dict(edge=INK, edge_width=2.5) if moved else {}
        made = cell(f"{key}{piece.key}", place(after_x, *piece.at), ways, [*piece.way.joins], fact, key, apart, **look)
        stays = arrived and len(piece.way.joins) != 1  # the white box of a sum
        yield from made[:-1] if stays else made
        above += made[-1:] if stays else []
    middle, right = top + (len(flow.before) * ROW - 8) / 2, after_x - 6
    yield label(f"{key}before", x + NAME, top - 16, "before", ink=MUTED)
    yield arrow(f"{key}arrow", [(right - GAP + 8, middle), (right, middle)], MUTED)
    for rank, element in ((rank, element) for rank, row in enumerate(flow.before) for element in range(len(row))):
        value, spot = f"{flow.before[rank][element]:g}", place(x + NAME, rank, element)
        fact = f"Rank {rank} starts with {value} in element {element}"
        yield from cell(f"{key}start{rank}.{element}", spot, value, [(rank, element)], fact, key)
    yield from above


def cell(
    key: str, place: Place, text, parts: Sequence[tuple[int, int]], fact: str, tag: str, apart: Mapping = {}, **look,
) -> list[Mark]:  # fmt: skip
    """Return the stripes of a sum, then the box with its text; ``parts`` are the ranks and elements in it.

    Those ``apart`` are not in it yet, but at the places given there.
    """
    (x, y, width, height), tags = place, tuple(f"{tag}{rank}.{part}" for rank, part in parts)
    look = {"edge": FRAME, "fact": fact, "tags": tags, "lights": tags, **look}
    if len(parts) == 1:
        return [box(key, *apart.get(parts[0], place), fill=rank_color(parts[0][0]), text=text, **look)]
    joined, low, stripes = [part for part in parts if part not in apart], 0.74 * height, []
    step = width / max(1, len(joined))
    for part, own in zip(parts, tags):
        spot = apart.get(part) or (x + joined.index(part) * step, y + low, step, height - low)
        says = f"Rank {part[0]}'s part. {fact}"
        stripes.append(box(f"{key}<{own}", *spot, fill=rank_color(part[0]), together=own, edge=FRAME, fact=says))
    return [*stripes, *[box(key, x, y, width, low, "#ffffff", text, **look)] * bool(joined)]


def rank_box(prefix: str, rank: int, x: float, y: float) -> Mark:
    return box(f"{prefix}rank{rank}", x, y, NAME - 6, CELL, rank_color(rank), f"rank {rank}")


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
