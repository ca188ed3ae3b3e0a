"""Draw a weight cut over a tensor group, and its shards dealt to the ranks: tinted; what is whole on each is pale."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

from course.pictures.parts import Place, own_box, rank_name, rank_names, titled
from course.pictures.scene import SMALLEST, WIDTH, Look, Mark, Scene, box, fitting, label
from course.pictures.style import FRAME, FRAME_FILL, INK, TP, bytes_text, tint, tints
from course.sizing.linear_cut import LinearCut
from course.sizing.ring import bus_factor
from course.table import Table
from labkit.partition import check_divides, chunks_of_rank

TOP, AREA, BIAS = 84.0, 300.0, 18.0  # pixels: above the matrices; their height; that of b, which is a vector
GAP, PLUS, NAME = 40.0, 32.0, 76.0  # pixels: where = and × stand; between parts of a sum; "rank 0"
ROWS = (200.0, 150.0, 115.0, 115.0)  # pixels: the height of a rank's row if there are 1, 2, 3 or 4
WORDS = {"Y": 165.0, "X": 165.0, "A": 165.0, "b": 110.0}  # pixels: what is written at each tensor
THINNEST = 13.0  # pixels: a matrix with few rows or columns is drawn no thinner, and the picture says so
SAYS = {
    ("column", False): "A, b and Y are cut by columns. X is whole on every rank.",
    ("column", True): "Each rank has its columns of A and b, and all of X, and computes its columns of Y.",
    ("row", False): "A is cut by rows, X by columns to match. Y is a sum of parts that are as large as Y.",
    ("row", True): "Each rank has its rows of A and its columns of X, and computes a part of every element of Y.",
}
Places = dict[tuple[str, int], Place]  # of each rank's part of each tensor


def draw_cut(cut: LinearCut, dealt: bool = False, whole: bool = False) -> Scene:
    """Draw the whole matrices of Y = XA + b as they are cut or, if ``dealt``, a row with the shards of each rank.

    A reader can follow two rows of X. ``whole`` is that of `LinearCut.messages`: it decides what they cost.
    """
    t, fills = cut.tp_size, tints(TP, cut.tp_size)
    drawn = range(t) if t <= 4 else (0, 1, t - 1)  # the ranks with a row, or with a part of a sum
    places, middles, is_thin = _places(cut, dealt, drawn)
    title = f"{cut.cut.capitalize()} parallel, t = {t}" + " (thin matrices are drawn thicker)" * is_thin
    marks = [rank_name(rank, middle) for rank, middle in middles.items()] if dealt else []
    for (name, rank), place in places.items():
        _, shard, by = cut.tensors[name]
        fill, text, look = FRAME_FILL, "", Look(means="whole on every rank")
        if by:
            fits = fitting(str(t - 1), place[2] - 4, place[3] - 2, SMALLEST)
            fill, text, look = fills[rank], (f"rank {rank}", str(rank)) if fits else "", dict(means="one rank's part")
        elif not dealt:  # the copies lie on each other
            look["tags"] = look["lights"] = tuple(f"rank{each}" for each in range(t))
        part, has = cut.part_of(rank), f"{[*shard]}, {bytes_text(cut.tensors[name].shard_bytes)}"
        fact = f"{name}_{rank} {has}, {by} {part[0]} to {part[-1]} of {name}"
        fact += f", stored as weight {[*cut.weight_shard]}" if name == "A" else ""
        facts = {"": f"all of {name} {has}, as on every rank", "sum": f"X_{rank} A_{rank} {has}, a part of all of Y"}
        marks.append(own_box(f"{name}.{rank}", rank, place, fill, text, facts.get(by, fact), radius=0, **look))
    rows = [cut.batch_size // 8, cut.batch_size - 1 - cut.batch_size // 8] if places["X", 0][3] > 36 else []
    for number, row in enumerate(rows):
        for (name, rank), (x, y, width, height) in places.items():
            if name in "YX":
                place, tag = (x, y + (row + 0.5) / cut.batch_size * height - 3, width, 6), f"follow{number}"
                look: dict[str, Any] = dict(
                    tags=(tag,), lights=(tag,), fact=f"Row {row} of {name} on rank {rank}", radius=0, live=True
                )
                marks.append(box(f"{tag}.{name}.{rank}", *place, tint(INK, 0.35), edge="#ffffff", **look))
    journeys = {f"follow{number}": _journey(cut, row, whole) for number, row in enumerate(rows)}
    marks += _words(cut, dealt, places, middles)
    scene = titled(title, SAYS[cut.cut, dealt], marks, _table(cut))
    return replace(scene, journeys={**journeys, "": "Click a dark row of X to follow it."} if rows else {})


def _journey(cut: LinearCut, row: int, whole: bool) -> str:
    """Say where a row of X and its row of Y are, when they are sent, and what that costs."""
    means = {
        "": "all {:,} elements on each",
        "columns": "{:,} elements on each",
        "sum": "a part of all {:,} sums on each",
    }
    shards = ((name, cut.tensors[name]) for name in "XY")
    says = [
        f"row {row} of {name}: {means[by].format(shard[1])} of {cut.tp_size} ranks" for name, (_, shard, by) in shards
    ]
    for when, messages in zip(("forward", "backward"), cut.messages(whole)):
        for each in messages:
            size, what = each.size_bytes() / cut.batch_size, each.operation.replace("_", "-")
            sent = bytes_text(size * bus_factor(each.operation, cut.tp_size))
            says.append(
                f"{when}, the {what} of {each.tensor} has {bytes_text(size)} of it; each rank sends {sent} on a ring"
            )
        if not messages:
            says.append(f"{when}, nothing of it is sent")
    return f"Followed: {'; '.join(says)}."


def _table(cut: LinearCut) -> Table:
    """Return the shapes, whole and on each rank."""
    on_rank, rows = {"": "the same", "sum": "{} of partial sums"}, []
    for name, (shape, shard, by) in cut.tensors.items():
        size = bytes_text(cut.tensors[name].shard_bytes)
        rows.append((name, str([*shape]), on_rank.get(by, "{}").format([*shard]), size))
        if name == "A":
            rows.append(("stored weight", str([*shape[::-1]]), str([*cut.weight_shard]), size))
    return Table((f"{cut.cut}, t = {cut.tp_size}", "whole", "on each rank", "bytes there, float32"), rows)


def _places(cut: LinearCut, dealt: bool, drawn: Sequence[int]) -> tuple[Places, dict[int, float], bool]:
    """Return the place of each part, the middle of each row, and whether a matrix is drawn thicker than it is."""
    t, row, parts = cut.tp_size, ROWS[len(drawn) - 1], len(drawn) if cut.cut == "row" else 1
    shapes = {name: tensor.shard if dealt else tensor.shape for name, tensor in cut.tensors.items()}
    middles, scale = {0: TOP + AREA / 2}, ((AREA + PLUS) / parts - PLUS) / cut.batch_size
    if dealt:
        middles = {rank: TOP + (number + 0.5) * row + 20 * (rank > number) for number, rank in enumerate(drawn)}
    scale = min(scale, (row - 26 if dealt else AREA) / max(shapes[name][0] for name in "YXA"))
    while sum(max(shapes[name][-1] * scale, WORDS[name]) for name in shapes) > WIDTH - NAME * dealt - 3 * GAP:
        scale *= 0.98
    places, x = {}, NAME * dealt
    for name, (*_, by) in cut.tensors.items():
        width, height = (max(size * scale, THINNEST) for size in (shapes[name][-1], shapes[name][0]))
        height = BIAS if name == "b" else height
        for number, rank in enumerate(range(t) if by in ("columns", "rows") and not dealt else drawn):
            whole = x, y, *_ = x, middles[rank if dealt else 0] - height / 2, width, height
            own = {"columns": (x + width * rank / t, y, width / t, height)}
            own |= {"rows": (x, y + height * rank / t, width, height / t)}
            own |= {"sum": (x, y + (number - (parts - 1) / 2) * (height + PLUS), width, height)}
            places[name, rank] = whole if dealt else own.get(by, whole)
        x += max(width, WORDS[name]) + GAP
    return places, middles, min(map(min, shapes.values())) * scale < THINNEST


def _words(cut: LinearCut, dealt: bool, places: Places, middles: dict[int, float]) -> Iterator[Mark]:
    """Yield what each tensor is, the signs of the equation in each row, and the pluses between parts of a sum."""
    look = Look(anchor="middle", size=22)
    for (name, (shape, shard, by)), sign in zip(cut.tensors.items(), " =×+"):
        x, y, *_ = places[name, 0]
        title = f"{name}_i {[*shard]}" if dealt and by else f"{name} {[*shape]}"
        after_sum = dealt and name == "b" and not by
        yield label(f"{name}.name", x, TOP - 22 if dealt else y - 13, "then + " * after_sum + title, bold=True)
        for rank, middle in {} if after_sum or name == "Y" else middles.items():
            yield label(f"{name}.sign{rank}", x - GAP / 2, middle, sign, **look)
    for (before, above), (rank, middle) in pairwise(middles.items()):
        if rank > before + 1:
            yield label("dots", 22, (above + middle) / 2, "…", size=22)
    parts = [(rank, place) for (name, rank), place in places.items() if name == "Y" and cut.cut == "row"]
    for (before, (_, top, _, high)), (rank, (x, y, width, _)) in pairwise(parts):
        yield label(f"plus{rank}", x + width / 2, (top + high + y) / 2, "+" if rank == before + 1 else "+ … +", **look)


def draw_stride(output_size: int, tp_size: int, stride: int, names: Sequence[str] = "QKV") -> list[Scene]:
    """Draw the rows of a weight that is several matrices in one, cut by the stride rule; then those of each rank.

    The same rows have the same keys whatever the stride, so the scenes of two strides can be steps of one stage.
    """
    check_divides(tp_size, "output_size", output_size, stride)
    check_divides(len(names), "output_size", output_size, parts_name="matrices")
    chunk, matrix = output_size // (tp_size * stride), output_size // len(names)
    size, wide = gcd(chunk, matrix), (WIDTH - NAME) / output_size  # rows that stay together; pixels per row
    title, scenes = f"{', '.join(names)} in one weight, t = {tp_size}, stride {stride}", []
    says = f"{tp_size * stride} chunks of {chunk} rows: rank r has chunks r, r + t, r + 2t and so on"
    for dealt in (False, True):
        marks, rows = rank_names(tp_size, 166, 54), []
        for number, name in enumerate(names):
            place = NAME + number * matrix * wide, 44, matrix * wide, 28
            marks.append(box(f"matrix{number}", *place, FRAME_FILL, name, edge=FRAME, bold=True))
        for rank, fill in enumerate(tints(TP, tp_size)):
            own = [row for rows in chunks_of_rank(output_size, tp_size, rank, stride) for row in rows]
            for number, row in [*enumerate(own)][::size]:
                x, y = (NAME + number * wide, 144 + 54 * rank) if dealt else (NAME + row * wide, 76)
                what = f"{names[row // matrix]} {row % matrix} to {row % matrix + size - 1}"
                text = (what, names[row // matrix]) if dealt else (f"{what}\nrank {rank}", f"rank {rank}", str(rank))
                fact = f"{what}, rows {row} to {row + size - 1} of the weight, in chunk {row // chunk}"
                marks.append(own_box(f"row{row}", rank, (x, y, size * wide, 44), fill, text, fact))
                rows.append((f"rank {rank}", f"chunk {row // chunk}", what))
        bottom, table = 142 + 54 * tp_size, Table(("", "chunk", "rows"), rows)
        scenes.append(titled(title, says, marks, table, bottom=bottom))
    return scenes
