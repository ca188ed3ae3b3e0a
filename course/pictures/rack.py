"""Draw one rack of GPUs that regroups: the same boxes stand node by node, then group by group of each axis."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from course.pictures.floor_plan import FloorPlan, floor_plan
from course.pictures.layout import axes_in_use, describe_groups
from course.pictures.parts import legend
from course.pictures.scene import Look, Mark, Scene, box, fitting, label
from course.pictures.style import (
    AXIS_COLOR,
    AXIS_NAME,
    FRAME,
    FRAME_FILL,
    INK,
    MUTED,
    bytes_text,
    group_letter,
    rank_color,
    tint,
)
from course.sizing import Traffic
from course.table import Table
from labkit.layout import ParallelLayout
from labkit.sizes import counted, ranks_text

MOST_GPUS = 64
WIDTH, HEIGHT, TOP = 480.0, 330.0, 84.0  # pixels: narrow enough for a phone; of all boxes; above them
SIDE, LARGEST = 0.86, 54.0  # of a box: its share of its room, and pixels
WIDEST_EDGE = 5.0  # pixels, of the axis that sends most
MOST_NODES = 5  # in the legend, which has one row
MEANS = {
    "tp": "Shards of the same layers",
    "cp": "Parts of the same sequences",
    "dp": "Same weights, different samples",
    "pp": "Consecutive stages of layers",
    "expert_tp": "Shards of the same experts",
    "ep": "Different experts of a layer",
    "expert_dp": "Same experts, different tokens",
}
"""What the GPUs of a group have."""
HINT = (
    "A group of several colours crosses nodes, and has a dashed frame. A frame is as thick as the bytes that its axis "
    "sends. Point at a GPU to see its group."
)


class _Grouping(NamedTuple):
    """The GPUs in groups of one kind: nodes, or those of an axis."""

    key: str
    kind: str
    groups: Sequence[Sequence[int]]
    names: Sequence[str]
    node_of: Sequence[int]  # by rank
    look: Look  # of a group's frame
    words: Sequence[str]  # a title, and what is said below it

    @property
    def plan(self) -> FloorPlan:
        return floor_plan(len(self.node_of), len(self.groups[0]), WIDTH, HEIGHT)

    @property
    def is_framed(self) -> bool:
        """A frame around one GPU would say nothing, unless it is a node."""
        return len(self.groups[0]) > 1 or self.key == "node"

    def nodes(self, index: int) -> list[int]:
        return sorted({self.node_of[rank] for rank in self.groups[index]})

    def fact(self, index: int) -> str:
        name = self.names[index] if self.key == "node" else f"{self.kind} {self.names[index]}"
        return f"{name}: GPUs {ranks_text(self.groups[index])}"


def rack_steps(
    layout: ParallelLayout, gpus_per_node: int = 8, traffic: Mapping[str, Traffic] | None = None
) -> list[Scene]:
    """Draw the nodes of a layout of up to `MOST_GPUS` GPUs, and then, for each axis, the same GPUs in its groups.

    ``traffic`` is what each axis sends in a step of training.
    """
    if layout.world_size > MOST_GPUS:
        raise ValueError(f"world_size={layout.world_size} is too large for one rack: use up to {MOST_GPUS}")
    groupings = [_nodes(layout.world_size, gpus_per_node)]
    groupings += [
        _groups(layout, axis, gpus_per_node, traffic or {}, groupings[0].node_of) for axis in axes_in_use(layout)
    ]
    unit = min(LARGEST / SIDE, *(each.plan.box_length(WIDTH, HEIGHT) for each in groupings))
    return [_draw(each, unit) for each in groupings]


def _nodes(world_size: int, gpus_per_node: int) -> _Grouping:
    ranks = [*range(world_size)]
    nodes = [ranks[first : first + gpus_per_node] for first in ranks[::gpus_per_node]]
    names = [f"node {number}" for number in range(len(nodes))]
    title = f"{counted(world_size, 'GPU')} in {counted(len(nodes), 'node')}"
    words = [title, "A number is a GPU, a colour is its node.", "Play regroups them."]
    return _Grouping("node", "node", nodes, names, [rank // gpus_per_node for rank in ranks], Look(edge=FRAME), words)


def _groups(
    layout: ParallelLayout, axis: str, gpus_per_node: int, traffic: Mapping[str, Traffic], node_of: Sequence[int]
) -> _Grouping:
    kind, groups = f"{AXIS_NAME[axis]} group", layout.groups(axis)
    most = max((each.total_bytes for each in traffic.values()), default=0)
    sent = traffic[axis].total_bytes if most else 0
    look = Look(edge=AXIS_COLOR[axis], edge_width=1 + (WIDEST_EDGE - 1) * (sent / most if most else 0))
    words = [f"{kind.capitalize()}s", f"{describe_groups(layout, axis, gpus_per_node)}."]
    if layout.size(axis) > 1:
        words.append(MEANS[axis] + (f": {bytes_text(sent)} a step." if sent else "."))
    names = [group_letter(index) for index in range(len(groups))]
    return _Grouping(axis, kind, groups, names, node_of, look, words)


def _draw(grouping: _Grouping, unit: float) -> Scene:
    """Draw the GPUs in their groups below a title and what is said of them; a place for a GPU is ``unit`` pixels."""
    title, *says = grouping.words
    ink = AXIS_COLOR.get(grouping.key, INK)
    marks = [label("title", 0, 12, title, size=20, bold=True, ink=ink)]
    marks += [label(f"says{number}", 0, 40 + 24 * number, text, size=16) for number, text in enumerate(says)]
    gpus = sorted(_gpus(grouping, unit), key=lambda mark: int(mark.key[3:]))  # one order in all groupings
    marks += [*_frames(grouping, unit), *gpus]
    if grouping.node_of[-1] < MOST_NODES:
        marks += legend(gpus, 0, TOP + HEIGHT + 20, WIDTH)
    groups = range(len(grouping.groups))
    rows = [
        (grouping.names[each], ranks_text(grouping.groups[each]), ranks_text(grouping.nodes(each))) for each in groups
    ]
    table = Table((grouping.kind, "GPUs", "nodes"), rows)
    return Scene(title, " ".join(says), marks, TOP + HEIGHT + 34, WIDTH, table, {"": HINT})


def _frames(grouping: _Grouping, unit: float) -> Iterator[Mark]:
    """Yield a frame for each group and, where there is room, its name."""
    plan = grouping.plan
    fill = FRAME_FILL if grouping.key == "node" else tint(grouping.look["edge"], 0.16)
    for index in range(len(grouping.groups) if grouping.is_framed else 0):
        (left, top), tag = plan.corner(index), f"{grouping.key}{index}"
        place = left * unit, TOP + top * unit, plan.frame[0] * unit, plan.frame[1] * unit
        about = dict(fact=grouping.fact(index), tags=(tag,), lights=(tag,), dashed=len(grouping.nodes(index)) > 1)
        yield box(f"{tag}.frame", *place, fill, radius=6, **about, **grouping.look)
        name = grouping.names[index]
        if plan.head and (size := fitting(name, place[2], 0.5 * unit, 15)):
            yield label(f"{tag}.name", place[0] + 3, place[1] - 0.24 * unit, name, size=size, ink=MUTED)


def _gpus(grouping: _Grouping, unit: float) -> Iterator[Mark]:
    """Yield the box of each GPU, where its group stands: it has the same key and colour in all groupings."""
    plan, side, size = grouping.plan, SIDE * unit, len(grouping.groups[0])
    for index, group in enumerate(grouping.groups):
        tag = f"{grouping.key}{index}"
        for number, rank in enumerate(group):
            x, y = plan.centre(index * size + number)
            node = grouping.node_of[rank]
            place = x * unit - side / 2, TOP + y * unit - side / 2, side, side
            fact = f"GPU {rank} of node {node}; {grouping.fact(index)}"
            look = Look(fact=fact, tags=(tag,), lights=(tag,), means=f"node {node}", size=20, edge=INK)
            yield box(f"gpu{rank}", *place, rank_color(node), str(rank), **look)
