"""Draw a layout: every GPU is a box, every node a frame, every group a tint and a letter.

``draw_layout`` shows the groups of each axis in a grid of its own; ``draw_orders`` those of several orders of the axes.
Where boxes would be too small for a letter, a box is a whole node, with the letters of the groups that its GPUs are in.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from course.pictures.floor_plan import FloorPlan, box_length, floor_plan
from course.pictures.layout_table import axes_in_use, bytes_text, layout_table
from course.pictures.scene import SMALLEST, WIDTH, Mark, Scene, box, fitting, heading, label, line, text_width
from course.pictures.style import (
    AXIS_COLOR,
    AXIS_NAME,
    FRAME,
    FRAME_FILL,
    INK,
    MUTED,
    TINTS,
    group_letter,
    tint,
)
from course.sizing import Traffic
from labkit.layout import ParallelLayout
from labkit.sizes import counted, ranks_text

HEAD = 48.0
"""The pixels above a grid for its heading."""
BOX = 0.84
"""The side of a GPU's box; the rest is the gap to its neighbour, in which lines between peers are seen."""
LARGEST_BOX = 37.0  # pixels
MOST_LINES, MOST_SEEN = 64, 32
"""GPUs: with more than the first, no lines; with more than the second, only those of the GPU that is pointed at."""
WIDEST_LINE = 7.0


def draw_layout(
    layout: ParallelLayout,
    gpus_per_node: int = 8,
    *,
    follow: int | None = None,
    node: int | None = None,
    traffic: Mapping[str, Traffic] | None = None,
    traffic_of: str = "",
) -> Scene:
    """Draw the groups of every axis of a layout, a grid for each.

    ``follow`` puts one rank and its peers in the foreground. ``node`` shows the GPUs of this node alone. ``traffic`` is
    what each axis sends in a step of ``traffic_of``: lines between peers are as wide as their share of it.
    """
    axes = axes_in_use(layout)
    columns = 2 if len(axes) == 4 else 3
    width, height = WIDTH / columns - 16, (350.0 if columns == 3 else 260.0)
    marks: list[Mark] = []
    for number, axis in enumerate(axes):
        x, y = number % columns * WIDTH / columns, number // columns * (HEAD + height + 16)
        marks += _grid(layout, axis, gpus_per_node, x, y, width, height, follow, node, traffic)
    if node is not None:
        button = box(
            "all nodes", WIDTH - 130, 8, 122, 26, FRAME_FILL, "‹ all nodes", edge=FRAME, fact="Show all nodes again."
        )
        marks.append(button)
    says = "; ".join(f"{AXIS_NAME[axis]}: {describe_groups(layout, axis, gpus_per_node)}" for axis in axes)
    table = layout_table(layout, gpus_per_node, follow=follow, traffic=traffic, traffic_of=traffic_of)
    title = f"{layout.world_size} GPUs, {gpus_per_node} per node, order {layout.order}"
    bottom = max((mark.y + mark.height for mark in marks), default=0.0) + 8
    return Scene(title, says, marks, bottom, table=table)


def draw_orders(layouts: Sequence[ParallelLayout], gpus_per_node: int = 8, *, follow: int | None = None) -> Scene:
    """Draw layouts that differ in their order side by side: one column per layout, one row per axis."""
    marks, axes = [], axes_in_use(layouts[0])
    width, height = WIDTH / len(layouts), 150.0
    for column, layout in enumerate(layouts):
        marks.append(label(f"order{column}", column * width, 12, f"order {layout.order}", size=19, bold=True))
        for row, axis in enumerate(axes):
            place = column * width, 36 + row * (HEAD + height + 10), width - 30, height
            grid = _grid(layout, axis, gpus_per_node, *place, follow, None, None, prefix=f"{column}.")
            marks += grid
    title = "Orders " + " and ".join(layout.order for layout in layouts)
    says = "The same sizes in a different order put different GPUs into a group."
    return Scene(title, says, marks, 36 + len(axes) * (HEAD + height + 10))


def describe_groups(layout: ParallelLayout, axis: str, gpus_per_node: int) -> str:
    """Say how many groups there are, how large, and how many of them leave a node: the heading of a grid.

    >>> describe_groups(ParallelLayout(16, tp_size=2, pp_size=4), "pp", gpus_per_node=8)
    '4 groups of 4, all cross nodes'
    """
    size, crossing = layout.size(axis), len(layout.crossings(axis, gpus_per_node))
    groups = layout.world_size // size
    sizes = f"{counted(groups, 'group')} of {size}"
    if size == 1:
        return f"{sizes}: nobody to talk to"
    if not crossing:
        return f"{sizes}, each inside a node" if groups > 1 else f"{sizes}, inside a node"
    who = "all cross" if crossing == groups > 1 else "crosses" if groups == 1 else f"{crossing} cross"
    return f"{sizes}, {who} nodes"


def _grid(
    layout: ParallelLayout, axis: str, node_size: int, x: float, y: float, width: float, height: float,
    follow: int | None, node: int | None, traffic, prefix: str = "",
) -> list[Mark]:  # fmt: skip
    """Return the marks of one grid, whose upper left corner is at x and y."""
    color, key = AXIS_COLOR[axis], f"{prefix}{axis}"
    says = describe_groups(layout, axis, node_size)
    marks = heading(key, x, y, f"{AXIS_NAME[axis]} groups", says, color)
    first, last = (0, layout.world_size) if node is None else (node * node_size, (node + 1) * node_size)
    plan = floor_plan(min(last, layout.world_size) - first, node_size, width, height)
    unit = min(box_length(plan, width, height), LARGEST_BOX / BOX)
    groups, group_of = layout.groups(axis), _groups(layout, axis)
    most = layout.world_size // min(map(layout.size, axes_in_use(layout)))  # groups, so letters
    if unit * BOX < text_width(group_letter(most - 1), SMALLEST) + 4:
        return marks + _blocks(layout, group_of, node_size, key, axis, x, y + HEAD, width, height, color)

    centres = [(x + cx * unit, y + HEAD + cy * unit) for cx, cy in plan.gpu_centres().tolist()]
    marks += _frames(plan, key, x, y + HEAD, unit, first // node_size)
    if len(centres) <= MOST_LINES and len(groups[0]) > 1 and node is None:
        marks += _lines(layout, groups, centres, key, axis, node_size, color, follow, traffic)
    side = BOX * unit
    for rank, (cx, cy) in enumerate(centres, first):
        index = group_of[rank]
        strength = TINTS[index % len(TINTS)]
        if follow is not None:
            strength = 1.0 if index == group_of[follow] else 0.15
        fill, letter, at = tint(color, strength), group_letter(index), layout.coords(rank)
        text, edge = (f"{letter}\n{rank}", letter), {"edge": INK, "edge_width": 3} if rank == follow else {}
        marks.append(
            box(
                f"{key}.{at.tp}.{at.cp}.{at.dp}.{at.pp}", cx - side / 2, cy - side / 2, side, side, fill, text,
                size=min(16, 0.42 * unit), same=f"{prefix}gpu{rank}", tags=(f"{prefix}{axis}{index}",),
                lights=_peers(layout, rank, prefix), fact=_fact(layout, rank, axis, letter), **edge,
            )
        )  # fmt: skip
    return marks


def _frames(plan: FloorPlan, key: str, x: float, y: float, unit: float, first: int) -> list[Mark]:
    """Return a frame for each node and, where there is room, its name."""
    marks, (width, height) = [], plan.frame
    for number, (left, top) in enumerate(plan.node_corners().tolist(), first):
        place = x + left * unit, y + top * unit, width * unit, height * unit
        marks.append(box(f"{key}.node{number}", *place, FRAME_FILL, edge=FRAME, radius=5))
        size = fitting(f"node {number}", width * unit, 0.5 * unit, 13)
        if plan.head and size:
            name = label(
                f"{key}.name{number}", place[0] + 3, place[1] - 0.24 * unit, f"node {number}", size=size, ink=MUTED
            )
            marks.append(name)
    return marks


def _lines(layout, groups, centres, key: str, axis: str, node_size: int, color: str, follow, traffic) -> list[Mark]:
    """Return the ring of each group: dashed if it leaves a node, and as wide as its share of the bytes."""
    marks, width, sends = [], 2.5, ""
    if traffic and axis in traffic and (most := max(each.total_bytes for each in traffic.values())):
        width = 1 + (WIDEST_LINE - 1) * traffic[axis].total_bytes / most
        sends = f", {bytes_text(traffic[axis].total_bytes)} a step in all {AXIS_NAME[axis]} groups"
    for index, group in enumerate(groups):
        ring = [*group, group[0]] if len(group) > 2 and axis != "pp" else group
        crosses = len({rank // node_size for rank in group}) > 1
        fact = (
            f"{AXIS_NAME[axis]} group {group_letter(index)}: {'leaves its node' if crosses else 'in one node'}{sends}"
        )
        look = dict(
            dashed=crosses,
            shy=layout.world_size > MOST_SEEN and follow not in group,
            tags=(f"{key}{index}",),
            fact=fact,
        )
        marks.append(line(f"{key}.ring{index}", [centres[rank] for rank in ring], color, width, **look))
    return marks


def _blocks(layout, group_of, node_size: int, key: str, axis: str, x, y, width, height, color: str) -> list[Mark]:
    """Return one box for each node, tinted by which groups its GPUs are in; a click shows its GPUs."""
    num_nodes = -(-layout.world_size // node_size)
    plan = floor_plan(num_nodes, num_nodes, width, height)
    unit = box_length(plan, width, height)
    held = [
        sorted({group_of[rank] for rank in range(node * node_size, min((node + 1) * node_size, layout.world_size))})
        for node in range(num_nodes)
    ]
    kinds = list(dict.fromkeys(map(tuple, held)))
    strengths = {kind: 0.12 + 0.7 * number / max(1, len(kinds) - 1) for number, kind in enumerate(kinds)}
    marks = []
    for node, (groups, (cx, cy)) in enumerate(zip(held, plan.gpu_centres().tolist())):
        letters = [group_letter(index) for index in (groups[0], groups[-1])]
        text = letters[0] if len(groups) == 1 else "–".join(letters)
        fact = f"node {node}: GPUs of {AXIS_NAME[axis]} {counted(len(groups), 'group')} {text.replace('–', ' to ')}"
        side, tags = 0.92 * unit, tuple(f"{axis}{index}" for index in groups)
        place = x + (cx - 0.46) * unit, y + (cy - 0.46) * unit
        lights = _peers(layout, node * node_size, "") if len(groups) == 1 else tags
        marks.append(
            box(
                f"{key}.block{node}", *place, side, side, tint(color, strengths[tuple(groups)]), (text, letters[0]),
                fact=fact, tags=tags, lights=lights, same=f"node{node}",
            )
        )  # fmt: skip
    return marks


@lru_cache(maxsize=2048)
def _peers(layout: ParallelLayout, rank: int, prefix: str) -> tuple[str, ...]:
    """Return the tag of each group that a rank is in."""
    return tuple(f"{prefix}{axis}{_groups(layout, axis)[rank]}" for axis in axes_in_use(layout))


@lru_cache(maxsize=64)
def _groups(layout: ParallelLayout, axis: str) -> dict[int, int]:
    return {rank: index for index, group in enumerate(layout.groups(axis)) for rank in group}


def _fact(layout: ParallelLayout, rank: int, axis: str, letter: str) -> str:
    who = f"GPU {rank}: " if axis == "tp" else ""
    return f"{who}{AXIS_NAME[axis]} group {letter} {ranks_text(layout.group_of(rank, axis))}"
