"""Draw who holds what when all three axes are cut: each rank's layers, its part of them, and its rows of the batch."""

from collections.abc import Mapping, Sequence

from course.pictures.scene import WIDTH, Look, Mark, Scene, arrow, box, label, text_width
from course.pictures.style import AXIS_COLOR, AXIS_NAME, FRAME, FRAME_FILL, TP, bytes_text, tint
from course.sizing import Traffic
from course.table import Table
from labkit.layout import ParallelLayout
from labkit.partition import layers_of_stage, rows_of_replica
from labkit.sizes import ranks_text

AXES = ("tp", "dp", "pp")
LEFT, RIGHT, TOP = 130.0, WIDTH - 12, 46.0  # the replicas' names are left of the ranks, the stages' above them
TALL, FOOT, BELOW = 44.0, 28.0, 34.0  # a rank; below it, the arrow of its tensor group; between replicas
Place = tuple[float, float]


def draw_holdings(
    layout: ParallelLayout,
    num_layers: int,
    batch_size: int,
    traffic: Mapping[str, Traffic] | None = None,
    held: Sequence[Sequence[range]] | None = None,
) -> Scene:
    """Draw one replica per row, its stages from left to right, and the ranks that share a stage side by side.

    Arrows show who talks to whom: within a stage (tp), to the next stage (pp), between replicas (dp). ``traffic`` is
    what each axis sends in a step; an arrow says how much of it is one rank's, or one pair's. ``held`` has the layers
    of each pipeline rank, chunk by chunk; unless given, each has one chunk, and about as many layers.
    """
    t, p, d = layout.tp_size, layout.pp_size, layout.dp_size
    between = min(76.0, 600 / p)  # pixels between stages, for an arrow and its bytes
    wide, frame = (RIGHT - LEFT - between * (p - 1)) / p, TALL + 12 + FOOT * (t > 1)
    unit, marks, rows = (wide - 8) / t, [], []
    for rank in range(layout.world_size):
        place, groups = layout.coords(rank), {axis: layout.group_of(rank, axis) for axis in AXES}
        x, y = LEFT + place.pp * (wide + between), TOP + place.dp * (frame + BELOW)
        layers = _range("layer", *(held[place.pp] if held else [layers_of_stage(num_layers, place.pp, p)]))
        batch = _range("row", rows_of_replica(batch_size, d, place.dp))
        part = f"part {place.tp + 1} of {t}" if t > 1 else "whole layers"
        rows.append([str(rank), layers, part, batch, *map(ranks_text, groups.values())])
        if place.tp == place.dp == 0:
            says, size = f"stage {place.pp}\n{layers}" if p > 1 else layers, 13 if p < 8 else 11
            middle = min(x + wide / 2, WIDTH - text_width(says, size) / 2)
            marks.append(label(f"stage{place.pp}", middle, 20, says, anchor="middle", size=size, bold=p < 8))
        if place.tp == place.pp == 0:
            says = f"replica {place.dp}\n{batch}" if d > 1 else batch
            marks.append(label(f"replica{place.dp}", 0, y + 6 + TALL / 2, says, bold=True))
        if place.tp == 0:
            marks.append(box(f"frame{rank}", x, y, wide, frame, FRAME_FILL, edge=FRAME, radius=5))
        texts = (f"rank {rank}\n{part}", f"rank {rank}\n{place.tp + 1} of {t}", f"rank {rank}", str(rank))
        peers = [f"{AXIS_NAME[axis]} {ranks_text(group)}" for axis, group in groups.items() if len(group) > 1]
        tags = tuple(f"{axis}{group[0]}" for axis, group in groups.items())
        fact = f"rank {rank}: {layers}, {part}; {batch}; its groups: {', '.join(peers) or 'none'}"
        left, fill = x + 4 + place.tp * unit, tint(TP, 0.34 if place.tp % 2 else 0.16)
        look = Look(edge=TP, fact=fact, tags=tags, lights=tags, bold=True)
        marks.append(box(f"rank{rank}", left + 3, y + 6, unit - 6, TALL, fill, texts, **look))
        middle, foot, eye = left + unit / 2, y + TALL + 6 + FOOT / 2, y + 6 + TALL / 2
        if place.tp == 0 < t - 1:
            marks += _arrow(layout, rank, "tp", (middle, foot), (x + wide - 4 - unit / 2, foot), wide, traffic)
        if place.dp < d - 1:
            marks += _arrow(layout, rank, "dp", (middle, y + frame), (middle, y + frame + BELOW), unit - 10, traffic)
        if place.tp == 0 and place.pp < p - 1:
            marks += _arrow(layout, rank, "pp", (x + wide, eye), (x + wide + between, eye), between, traffic)
    sent = "; ".join(f"{AXIS_NAME[axis]} {bytes_text(traffic[axis].total_bytes)}" for axis in AXES) if traffic else ""
    caption = f"All ranks together send in a step: {sent}." if sent else ""
    table = Table(["rank", "layers", "part", "rows", *(f"{AXIS_NAME[axis]} group" for axis in AXES)], rows, caption)
    says = f"p · t · d = {p} · {t} · {d}: replicas go down, stages right. {caption}"
    height = TOP + d * (frame + BELOW) - BELOW + 2
    return Scene(f"Who holds what on {layout.world_size} ranks", says, marks, height, table=table)


def _arrow(layout: ParallelLayout, rank: int, axis: str, start: Place, end: Place, room: float, traffic) -> list[Mark]:
    """Return the arrow to a rank's peers and its bytes; one of the pipeline stands for the pairs of a tensor group."""
    stage, text, tags = layout.coords(rank).pp, axis, [f"{axis}{layout.group_of(rank, axis)[0]}"]
    whose, fact = "rank", f"{AXIS_NAME[axis]} group {ranks_text(layout.group_of(rank, axis))}"
    senders = layout.world_size
    if axis == "pp":
        senders -= senders // layout.pp_size  # the last stage sends to nobody
        tags = [f"pp{layout.group_of(each, 'pp')[0]}" for each in layout.group_of(rank, "tp")]
        whose, fact = "pair of ranks", f"stage {stage} to stage {stage + 1}: activations there, gradients back"
    if traffic:
        text = f"{axis} {bytes_text(traffic[axis].total_bytes / senders)}"
        fact += f"; {text[3:]} in a step for each {whose}"
    look = Look(tags=tuple(tags), lights=tuple(tags))
    x, y, width = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2, text_width(text, 11) + 6
    marks = [arrow(f"{axis}.{rank}", [start, end], AXIS_COLOR[axis], heads=2, fact=fact, **look)]
    if width < room:
        x, y = {"tp": (x - width / 2, y - 8), "dp": (x + 7, y - 8), "pp": (x - width / 2, y - 19)}[axis]
        paper = FRAME_FILL if axis == "tp" else "none"
        marks.append(box(f"{axis}.{rank}.bytes", x, y, width, 16, paper, text, size=11, **look))
    return marks


def _range(what: str, *ranges: range) -> str:
    texts = [str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in ranges]
    return f"{what}{'' if sum(map(len, ranges)) == 1 else 's'} {', '.join(texts)}"
