"""Draw a layout: every GPU is a box, every node a frame, every group a tint and a letter."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, pairwise
from math import inf
from typing import Any

from course.pictures.floor_plan import FloorPlan, Point, floor_plan
from course.pictures.parts import heading
from course.pictures.scene import SMALLEST, WIDTH, Look, Mark, Scene, box, fitting, label, line, text_width
from course.pictures.style import AXIS_COLOR, AXIS_NAME, FRAME, FRAME_FILL, MUTED, TINTS, bytes_text, group_letter, tint
from course.sizing import Traffic
from course.table import Table
from labkit.layout import EXPERT_AXES, ParallelLayout
from labkit.sizes import counted, ranks_text

HEAD = 48.0  # pixels above a grid, for its heading
GAP = 0.05  # of a box's room: from line to line in the gaps
BOX = 0.8  # the side of a box; the rest is the gap to its neighbour, in which lines between peers are seen
OUTLINE = 0.07  # of a box's room: from a box to the outline of its group
LARGEST_BOX, WIDEST_LINE, WIDEST_EDGE = 37.0, 7.0, 3.0  # pixels
TWO_LINES, MOST_STRETCHED = 30.0, 1.1  # pixels: of a box with a letter above a number; of a grid's height, for that
MOST_LINES = 64  # GPUs: with more, neither outlines nor lines
MOST_GROUPS = 16  # in a cell of the table
BESIDE = 10.0  # pixels from panel to panel; two are narrow enough for a phone
HEIGHTS = ((16, 140.0), (64, 215.0), (inf, 245.0))  # pixels of a grid beside another, by the most GPUs it has room for
FINE = (
    "Outlined: peers in one node. Point at a GPU to see the way to its other peers (dashed: to another node); click it "
    "to keep them lit."
)
COARSE = "A box is a node of {} GPUs. Nodes of one tint are in the same groups. Click a node to see its GPUs."
"""What stands above a picture of GPUs, and of nodes."""
Sent = Mapping[str, Traffic]  # by axis


def draw_layout(
    layout: ParallelLayout,
    gpus_per_node: int = 8,
    *,
    node: int | None = None,
    traffic: Sent | None = None,
    traffic_of: str = "",
    num_experts: int | None = None,
) -> Scene:
    """Draw the groups of every axis of a layout; where experts have a grid of their own, the two stand side by side.

    ``node`` shows the GPUs of this node alone. ``traffic`` is what each axis sends in a step of ``traffic_of``: lines
    between peers are as wide as their share of it. With ``num_experts`` in a layer, a GPU says which of them it has.
    """
    axes, marks, rows, panels = axes_in_use(layout), [], [], []
    grid = partial(_grid, layout, node_size=gpus_per_node, node=node, traffic=traffic, num_experts=num_experts)
    if "ep" in axes:
        for number, (head, names) in enumerate((("Dense layers", axes[:-3]), ("Experts", axes[-3:]))):
            left, top = number * WIDTH / 2, 34.0
            marks.append(label(f"grid{number}", left, 12, head, size=19, bold=True))
            for axis in names:
                height = next(pixels for most, pixels in HEIGHTS if layout.world_size <= most)
                marks += (own := [*grid(axis, x=left, y=top, width=WIDTH / 2 - 16, height=height)])
                top = max(mark.bottom for mark in own) + 16
            panels.append((left, 0.0, WIDTH / 2 - BESIDE, top))
    else:
        columns, height = (2, 260.0) if len(axes) == 4 else (3, 460.0 if layout.world_size > 512 else 350.0)
        wide, y = WIDTH / columns, 0.0
        for number, axis in enumerate(axes):
            x = number % columns * wide
            if number == columns:
                y = max(mark.bottom for mark in marks) + 16
            marks += (own := [*grid(axis, x=x, y=y, width=wide - 16, height=height)])
            panels.append((x, y, wide - BESIDE, max(mark.bottom for mark in own) + 16 - y))
    for axis in axes:
        groups, crossing = _groups(layout, axis), _num_crossing(layout, axis, gpus_per_node)
        cells = [f"{AXIS_NAME[axis]} ({axis} {layout.size(axis)})", f"{len(groups)} of {layout.size(axis)}"]
        cells += [str(crossing or "none"), *(map(bytes_text, traffic[axis]) if traffic else ())]
        lists = [f"{group_letter(index)} {ranks_text(group)}" for index, group in enumerate(groups[:MOST_GROUPS])]
        lists += [f"and {len(groups) - MOST_GROUPS} more"] * (len(groups) > MOST_GROUPS)
        rows.append([*cells, " ".join(lists)])
    if node is not None:
        look = Look(edge=FRAME, fact="Show all nodes again.", click=True)
        bottom = max(mark.bottom for mark in marks)
        marks.append(box("all nodes", 0, bottom + 18, 122, 26, FRAME_FILL, "‹ all nodes", **look))
        panels.append((0.0, bottom + 16, panels[0][2], 36.0))
    says = "; ".join(f"{AXIS_NAME[axis]}: {describe_groups(layout, axis, gpus_per_node)}" for axis in axes)
    title = f"{layout.world_size} GPUs, {gpus_per_node} per node, order {layout.order}"
    heads = ["axis", "groups", "cross nodes", *["bytes a step", "between nodes"] * bool(traffic), "ranks"]
    caption = f"Bytes of {traffic_of}." if traffic_of else ""
    if "ep" in axes and num_experts:
        names = (_experts_text(layout, rank, num_experts) for rank in layout.groups("ep")[0])
        caption = f"{caption} The ranks of each expert group have, in this order, {'; '.join(names)}.".strip()
    hint = {"": FINE if any("gpu" in mark.same for mark in marks) else COARSE.format(gpus_per_node)}
    bottom = max(mark.bottom for mark in marks) + 8
    return Scene(title, says, marks, bottom, table=Table(heads, rows, caption), journeys=hint, panels=panels)


def draw_orders(layouts: Sequence[ParallelLayout], gpus_per_node: int = 8) -> Scene:
    """Draw layouts that differ in their order side by side: one column per layout, one row per axis."""
    marks, axes, width, height = [], axes_in_use(layouts[0]), WIDTH / len(layouts), 150.0
    for column, layout in enumerate(layouts):
        marks.append(label(f"order{column}", column * width, 12, f"order {layout.order}", size=19, bold=True))
        for row, axis in enumerate(axes):
            place = column * width, 36 + row * (HEAD + height + 10), width - 30, height
            marks += _grid(layout, axis, gpus_per_node, *place, prefix=f"{column}.")
    title = "Orders " + " and ".join(layout.order for layout in layouts)
    says = "The same sizes in a different order put different GPUs into a group."
    return Scene(title, says, marks, 36 + len(axes) * (HEAD + height + 10))


def describe_groups(layout: ParallelLayout, axis: str, gpus_per_node: int) -> str:
    """Say how many groups there are, how large, and how many of them leave a node: the heading of a grid.

    >>> describe_groups(ParallelLayout(16, tp_size=2, pp_size=4), "pp", gpus_per_node=8)
    '4 groups of 4, all cross nodes'
    """
    size, crossing = layout.size(axis), _num_crossing(layout, axis, gpus_per_node)
    groups = layout.world_size // size
    where = "crosses nodes" if groups == 1 else "all cross nodes" if crossing == groups else f"{crossing} cross nodes"
    if not crossing:
        where = "inside a node" if groups == 1 else "each inside a node"
    return f"{counted(groups, 'group')} of {size}" + (f", {where}" if size > 1 else ": nobody to talk to")


def axes_in_use(layout: ParallelLayout) -> list[str]:
    """Return the axes that have a grid and a row: context, and the experts' own axes, only where they are in use.

    >>> axes_in_use(ParallelLayout(8, tp_size=2, ep_size=4, expert_tp_size=1))
    ['tp', 'dp', 'pp', 'expert_tp', 'ep', 'expert_dp']
    """
    dense = [axis for axis in ("tp", "cp", "dp", "pp") if axis != "cp" or layout.cp_size > 1]
    return dense if (layout.ep_size, layout.expert_tp_size) == (1, layout.tp_size) else [*dense, *EXPERT_AXES]


def _grid(
    layout: ParallelLayout, axis: str, node_size: int, x: float, y: float, width: float, height: float,
    node: int | None = None, traffic: Sent | None = None, prefix: str = "", num_experts: int | None = None,
) -> Iterator[Mark]:  # fmt: skip
    """Yield the marks of one grid from its corner on: a box for each GPU or, where those are too small, each node."""
    color, name, key, top = AXIS_COLOR[axis], AXIS_NAME[axis], f"{prefix}{axis}", y + HEAD
    has_two_grids = "ep" in axes_in_use(layout)
    says = "in both grids: " * (axis == "pp" and has_two_grids) + describe_groups(layout, axis, node_size)
    yield from heading(key, x, y, f"{name} groups", says, color)
    first, end = (0, layout.world_size) if node is None else (node * node_size, (node + 1) * node_size)
    cells = [[rank] for rank in range(first, min(end, layout.world_size))]
    plan = floor_plan(len(cells), node_size, width, height)
    unit = min(plan.box_length(width, height), LARGEST_BOX / BOX)
    high = max(unit, min(MOST_STRETCHED * height / plan.size[1], TWO_LINES / BOX))
    most = layout.world_size // min(map(layout.size, axes_in_use(layout)))  # groups, so letters
    small = unit * BOX < text_width(group_letter(most - 1), SMALLEST) + 4
    if small:
        cells = [[*range(start, min(start + node_size, end))] for start in range(first, end, node_size)]
        plan = floor_plan(len(cells), len(cells), width, height)
        unit = high = plan.box_length(width, height)
    else:
        yield from _frames(plan, key, x, top, (unit, high), first // node_size)
    centres = [(x + cx * unit, top + cy * high) for cx, cy in map(plan.centre, range(len(cells)))]
    if len(cells) <= MOST_LINES and layout.size(axis) > 1 and node is None and not small:
        peers = [*_peers(layout, centres, (unit, high), key, axis, node_size, traffic)]
        yield from sorted(peers, key=lambda mark: mark.shape)  # outlines are below lines
    group_of, members = _group_of(layout, axis), _groups(layout, axis)
    held = [tuple(sorted({group_of[rank] for rank in cell})) for cell in cells]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(held))}
    side, tall = ((0.92 if small else BOX) * length for length in (unit, high))
    peers_of = _peers_of(layout, prefix)
    size = max(SMALLEST if has_two_grids else 0, min(16, 0.42 * high))
    for (rank, *others), groups, (cx, cy) in zip(cells, held, centres):
        letters, number = [group_letter(groups[0]), group_letter(groups[-1])], rank // node_size
        if small:
            text, strength = "–".join(dict.fromkeys(letters)), 0.12 + 0.7 * kinds[groups] / max(1, len(kinds) - 1)
            fact = f"{name} group{'s' * (len(groups) > 1)} {text.replace('–', ' to ')}"
            if axis == "tp":
                fact = f"A box is a node. Click node {number} to see its GPUs {rank} to {rank + len(others)}: {fact}"
            text = f"{number}"
            own, look = f"{key}.block{number}", Look(same=f"node{number}", click=True)
        else:
            text, strength = f"{letters[0]}\n{rank}", TINTS[groups[0] % len(TINTS)]
            fact = f"{name} group {letters[0]} {ranks_text(members[groups[0]])}"
            fact = f"GPU {rank}: {fact}" if axis == "tp" else fact
            fact += f": {_experts_text(layout, rank, num_experts)}" if axis == "ep" and num_experts else ""
            own = f"{key}.gpu{rank}"
            look = Look(same=f"{prefix}gpu{rank}", size=size)
        tags = tuple(f"{key}{index}" for index in groups)
        lights = tags if len(groups) > 1 else peers_of[rank]
        place = cx - side / 2, cy - tall / 2, side, tall
        look |= dict(fact=fact, tags=tags, lights=lights)
        yield box(own, *place, tint(color, strength), (text, "" if small else letters[0]), **look)


def _frames(plan: FloorPlan, key: str, x: float, y: float, unit: Point, first: int) -> Iterator[Mark]:
    """Yield a frame for each node and, where there is room, its name."""
    width, height = plan.frame[0] * unit[0], plan.frame[1] * unit[1]
    size = fitting("node 999", width, 0.5 * unit[1], 13)
    for number, (right, down) in enumerate(map(plan.corner, range(plan.num_nodes)), first):
        left, top = x + right * unit[0], y + down * unit[1]
        yield box(f"{key}.node{number}", left, top, width, height, FRAME_FILL, edge=FRAME, radius=5)
        if plan.head and size:
            yield label(f"{key}.name{number}", left + 3, top - 0.24 * unit[1], f"node {number}", size=size, ink=MUTED)


def _peers(
    layout: ParallelLayout, centres: Sequence[Point], unit: Point, key: str, axis: str, node_size: int, traffic
) -> Iterator[Mark]:
    """Yield an outline around peers that stand side by side in a node, and the way to those that do not.

    The way of the first group is always seen, others when a reader points at one of its GPUs. It is dashed if it leaves
    a node. Lines are as wide as their share of the bytes.
    """
    width, sends, name = 2.5, "", AXIS_NAME[axis]
    if traffic and (most := max(each.total_bytes for each in traffic.values())):
        width = 1 + (WIDEST_LINE - 1) * traffic[axis].total_bytes / most
        sends = f", {bytes_text(traffic[axis].total_bytes)} a step in all {name} groups"
    for index, group in enumerate(_groups(layout, axis)):
        parts = [[*part] for _, part in groupby(group, lambda rank: rank // node_size)]
        fact = f"{name} group {group_letter(index)}: {'leaves its node' if len(parts) > 1 else 'in one node'}{sends}"
        look, side_by_side = Look(fact=fact, tags=(f"{key}{index}",)), True
        for part in parts:
            first = part[0] - part[0] % node_size
            side_by_side &= _is_block([centres[rank] for rank in part], centres[first : first + node_size])
        for number, part in enumerate(parts if side_by_side else ()):
            if len(part) > 1:
                edge = dict[str, Any](edge=AXIS_COLOR[axis], edge_width=min(width, WIDEST_EDGE), radius=6)
                place, edge["lights"] = _outline([centres[rank] for rank in part], unit), (f"{key}{index}",)
                yield box(f"{key}.outline{index}.{number}", *place, tint(AXIS_COLOR[axis], 0.3), **edge, **look)
        stops = [part[0] for part in parts] if side_by_side else group
        if len(stops) == 1:
            continue
        ring = stops if len(stops) == 2 or axis == "pp" else [*stops, stops[0]]
        aside = [side / 2 + (index % 3 - 1) * GAP * side for side in unit]  # so that neighbours' lines are not one
        hops = [_around(centres[one], centres[other], centres, unit, aside) for one, other in pairwise(ring)]
        points = [hops[0][0], *(point for hop in hops for point in hop[1:])]
        look |= Look(dashed=len(parts) > 1, shy=index > 0)
        yield line(f"{key}.ring{index}", points, AXIS_COLOR[axis], width, **look)


def _is_block(part: Sequence[Point], node: Sequence[Point]) -> bool:
    """Say whether a part of a node's GPUs fills a rectangle: then an outline around them has nobody else in it."""
    (left, right), (top, bottom) = ((min(side), max(side)) for side in zip(*part, strict=True))
    return sum(left <= x <= right and top <= y <= bottom for x, y in node) == len(part)


def _outline(centres: Sequence[Point], unit: Point) -> tuple[float, float, float, float]:
    (left, right), (top, bottom) = ((min(side), max(side)) for side in zip(*centres, strict=True))
    around = [side * (BOX / 2 + OUTLINE) for side in unit]
    return left - around[0], top - around[1], right - left + 2 * around[0], bottom - top + 2 * around[1]


def _around(start: Point, end: Point, centres: Sequence[Point], unit: Point, aside: Sequence[float]) -> list[Point]:
    """Return a way from box to box: straight if no other is between, or else through the gaps beside rows and columns.

    A gap's line is ``aside`` from the middle of the boxes next to it.
    """
    (x, y), (to_x, to_y), (aside_x, aside_y) = start, end, aside
    in_line = [at for at in centres if at[0] == x == to_x or at[1] == y == to_y]
    between = any(min(start, end) < at < max(start, end) for at in in_line)
    beside = abs(to_x - x) < 1.1 * unit[0] and abs(to_y - y) < 1.1 * unit[1]
    if beside or (not between and (x == to_x or y == to_y)):
        return [start, end]
    if y == to_y:
        return [start, (x, y + aside_y), (to_x, y + aside_y), end]
    if x == to_x:
        return [start, (x + aside_x, y), (x + aside_x, to_y), end]
    row = y + (aside_y if to_y > y else -aside_y)
    column = to_x + (aside_x if x > to_x else -aside_x)
    return [start, (x, row), (column, row), (column, to_y), end]


def _experts_text(layout: ParallelLayout, rank: int, num_experts: int) -> str:
    first, *others = layout.experts_of(rank, num_experts)
    return f"experts {first} to {others[-1]}" if others else f"expert {first}"


@lru_cache(maxsize=64)
def _groups(layout: ParallelLayout, axis: str) -> list[list[int]]:
    return layout.groups(axis)


@lru_cache(maxsize=64)
def _num_crossing(layout: ParallelLayout, axis: str, gpus_per_node: int) -> int:
    return len(layout.crossings(axis, gpus_per_node))


@lru_cache(maxsize=64)
def _group_of(layout: ParallelLayout, axis: str) -> list[int]:
    """Return the number of each rank's group."""
    index_of = {rank: index for index, group in enumerate(_groups(layout, axis)) for rank in group}
    return [index_of[rank] for rank in range(layout.world_size)]


@lru_cache(maxsize=64)
def _peers_of(layout: ParallelLayout, prefix: str) -> list[tuple[str, ...]]:
    """Return the tags of each rank's groups, one for each axis."""
    by_axis = ([f"{prefix}{axis}{index}" for index in _group_of(layout, axis)] for axis in axes_in_use(layout))
    return [*zip(*by_axis, strict=True)]
