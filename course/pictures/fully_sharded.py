"""Draw fully sharded data parallelism: which layers are whole at which moment, and who shares shards with whom.

Weights are as dark as in the pictures of a GPU's memory, gradients as yellow.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Mark, Scene, box, label, line
from course.pictures.style import BACKWARD, DP, FRAME, FRAME_FILL, INK, MUTED, TINTS, bytes_text, tint, tints
from course.sizing.fully_sharded import Moment
from course.sizing.ring import bus_factor
from course.table import Table
from labkit.partition import check_divides
from labkit.sizes import counted

FOOT, HIGH, BESIDE = 330.0, 260.0, 176.0  # pixels: the ground that columns stand on; the highest; right of them
SHARD, WEIGHTS, AHEAD, TINTED = tint(DP, 0.58), tint(INK, 0.75), tint(INK, 0.35), tint(DP, 0.34)
NODE_TOP, NODE_PITCH, NODE_LEFT = 60.0, 76.0, 74.0


def draw_moments(moments: Sequence[Moment], formula_bytes: float, title: str) -> Scene:
    """Draw a column for each moment, a line at the most weights by the formula, and one where all would be whole."""
    whole = sum(max(sizes) for sizes in zip(*(each.weights for each in moments)))
    scale = HIGH / max(whole, *(each.shards + sum(each.weights) + sum(each.gradients) for each in moments))
    wide, marks, rows = (WIDTH - BESIDE) / len(moments), [], []
    for number, each in enumerate(moments):
        marks += _column(each, f"m{number}", number * wide, wide, scale)
        marks.append(label(f"m{number}.name", (number + 0.5) * wide, FOOT + 16, each.name, anchor="middle", bold=True))
        units = [[str(unit) for unit, held in enumerate(part) if held] for part in (each.weights, each.gradients)]
        rows.append([each.name, bytes_text(each.shards), *(", ".join(part) or "none" for part in units)])
    for key, size, word in (("whole", whole, "all weights"), ("formula", formula_bytes, "by the formula")):
        y, fact = FOOT - size * scale, f"{word}: {bytes_text(size)}"
        marks.append(line(key, [(0, y), (WIDTH - BESIDE, y)], MUTED, 2, dashed=True, fact=fact))
        marks.append(label(f"{key}.word", WIDTH - BESIDE + 6, y, fact, size=12, ink=MUTED))
    peak = max(each.shards + sum(each.weights) for each in moments)
    says = f"A rank holds at most {bytes_text(peak)} of weights; by the formula {bytes_text(formula_bytes)}"
    table = Table(("moment", "own shards", "units whole", "gradients whole"), rows)
    return titled(title, says, marks, table, says, FOOT + 24)


def _column(moment: Moment, key: str, x: float, wide: float, scale: float) -> Iterator[Mark]:
    """Yield the shards, then each whole unit, then each whole gradient, from the ground up."""
    parts = [("shards", moment.shards, SHARD, "shards", "own shards")]
    for unit, size in enumerate(moment.weights):
        fill, means = (WEIGHTS, "weights in use") if moment.name[1:] == str(unit) else (AHEAD, "fetched ahead")
        parts.append((f"w{unit}", size, fill, f"unit {unit}", means))
    parts += [(f"g{k}", size, BACKWARD, f"grad {k}", "whole gradients") for k, size in enumerate(moment.gradients)]
    y = FOOT
    for name, size, fill, text, means in filter(lambda part: part[1], parts):
        y -= size * scale
        fact = f"{moment.name}: {text}, {bytes_text(size)}"
        look = dict[str, Any](edge="#ffffff", radius=0, means=means, fact=fact, together=name)
        yield box(f"{key}.{name}", x, y, wide - 6, size * scale, fill, (text, text.split()[-1]), **look)


def draw_cluster(world_size: int, shard_size: int, gpus_per_node: int = 8) -> Scene:
    """Draw GPUs in their nodes: a frame around those that share the model, lines between copies of the same shard.

    What is dashed leaves a node.
    """
    check_divides(gpus_per_node, "shard_size", shard_size, parts_name="gpus_per_node")
    check_divides(shard_size, "world_size", world_size, parts_name="shard_size")
    nodes, copies = world_size // gpus_per_node, world_size // shard_size
    wide = (WIDTH - NODE_LEFT) / gpus_per_node
    centres = [(NODE_LEFT + (r % gpus_per_node + 0.5) * wide, NODE_TOP + r // gpus_per_node * NODE_PITCH + 30)
               for r in range(world_size)]  # fmt: skip
    marks = [label(f"node{each}", 0, NODE_TOP + each * NODE_PITCH + 30, f"node {each}", bold=True)
             for each in range(nodes)]  # fmt: skip
    for group in range(copies):
        (x, y), (right, bottom) = centres[group * shard_size], centres[(group + 1) * shard_size - 1]
        place = x - wide / 2 + 2, y - 30, right - x + wide - 4, bottom - y + 60
        fact = f"GPUs {group * shard_size} to {(group + 1) * shard_size - 1} have one copy of the model together"
        look = dict[str, Any](edge=DP, edge_width=2.5, dashed=shard_size > gpus_per_node, radius=8, fact=fact)
        look |= dict(means="gathers and reduce-scatters", tags=(f"group{group}",))
        marks.append(box(f"frame{group}", *place, FRAME_FILL, **look))
    for shard in range(shard_size if copies > 1 else 0):
        beside = 12 * (shard // gpus_per_node)
        points = [(x - beside, y) for x, y in centres[shard::shard_size]]
        look = dict[str, Any](dashed=True, means="all-reduces of the same shard")
        marks.append(line(f"copies{shard}", points, MUTED, 2.5, tags=(f"shard{shard}",), **look))
    few = shard_size <= len(TINTS)  # else a tint could not say which shard a GPU has
    fills = tints(DP, shard_size) if few else [TINTED] * shard_size
    for rank, (x, y) in enumerate(centres):
        shard, group = rank % shard_size, rank // shard_size
        fact = f"GPU {rank} gathers from {counted(shard_size - 1, 'other GPU')}"
        fact += f"; averages shard {shard} of the gradients with {counted(copies - 1, 'GPU')}" * (copies > 1)
        own = f"group{group}", f"shard{shard}"
        look = dict[str, Any](edge=FRAME, fact=fact, tags=own, lights=own)
        text = f"GPU {rank}\nshard {shard}", f"{rank}\n{shard}"
        marks.append(box(f"gpu{rank}", x - wide / 2 + 10, y - 20, wide - 20, 40, fills[shard], text, **look))
    rows, title = cluster_rows(world_size, shard_size, gpus_per_node), f"{world_size} GPUs, shards of {shard_size}"
    says = f"Gathers and reduce-scatters {rows[0][2]}" + "; all-reduces of gradient shards across nodes" * (copies > 1)
    heads = "what", "ranks of a group", "where", "numbers a GPU sends per parameter"
    return titled(title, says, marks, Table(heads, rows), says)


def cluster_rows(world_size: int, shard_size: int, gpus_per_node: int) -> list[list[str]]:
    """Return what is sent for a micro-batch: in groups of how many, where, and what a GPU sends per parameter."""
    place = "inside a node" if shard_size == gpus_per_node else "across nodes"
    gather, copies = bus_factor("all_gather", shard_size), world_size // shard_size
    rows = [["two gathers of weights", str(shard_size), place, f"{2 * gather:.3g}"]]
    rows.append(["reduce-scatter of gradients", str(shard_size), place, f"{gather:.3g}"])
    if copies > 1:
        sent = f"{bus_factor('all_reduce', copies) / shard_size:.3g}"
        rows.append(["all-reduce of gradient shards", str(copies), "across nodes", sent])
    return rows
