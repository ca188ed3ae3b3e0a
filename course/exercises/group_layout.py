"""The exercises of notebook 01: where a rank stands, who is in its groups, and which layout suits a cluster.

All three use the order tp-dp-pp, in which tensor ranks are neighbours and pipeline stages are far apart.
"""

import math
from collections.abc import Callable

from course.exercises.base import Exercise
from labkit.layout import ParallelLayout

# -- the coordinates of a rank ------------------------------------------------------------------------------------


def my_coordinates(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    tp_rank = rank % tp_size  # the fastest axis: it turns at every step, like the last digit of an odometer
    dp_rank = rank // tp_size % dp_size  # turns when the tensor ranks have turned once
    pp_rank = rank // (tp_size * dp_size)  # the slowest: what is left
    return tp_rank, dp_rank, pp_rank


rank_to_coordinates = Exercise(
    "rank_to_coordinates",
    my_coordinates,
    notebook="01",
    cases=[(0, 2, 2), (5, 2, 2), (14, 2, 2), (13, 4, 2), (100, 8, 4), (27, 3, 5)],
    hints=[
        "Think of an odometer with three wheels. The tensor wheel has tp_size digits and turns with every rank.",
        "`rank % tp_size` reads the fastest wheel, `rank // tp_size` takes it away. Do the same with the next wheel.",
    ],
)


@rank_to_coordinates.mistake("Shifts and masks count in powers of two. t and d can be any: use `%` and `//`.")
def bits(rank, tp_size, dp_size):
    tp_bits, dp_bits = tp_size.bit_length() - 1, dp_size.bit_length() - 1
    return rank & (tp_size - 1), rank >> tp_bits & (dp_size - 1), rank >> (tp_bits + dp_bits)


def coordinates(
    rank,
    t,
    d,
    tp=lambda rank, t, d: rank % t,
    dp=lambda rank, t, d: rank // t % d,
    pp=lambda rank, t, d: rank // (t * d),
):
    return [axis(rank, t, d) for axis in (tp, dp, pp)]


rank_to_coordinates.mistakes_of(
    coordinates,
    (dict(dp=lambda r, t, d: r // t), "Your data coordinate never turns back to 0: it also needs `% dp_size`."),
    (dict(dp=lambda r, t, d: r % d), "Your data coordinate moves with each rank: divide by tp_size first."),
    (dict(dp=lambda r, t, d: r // t % t), "The data axis has dp_size places: `% dp_size`, not tp_size."),
    (dict(pp=lambda r, t, d: r // d), "A stage holds tp_size * dp_size ranks, not dp_size: divide by both."),
    (dict(pp=lambda r, t, d: r // (t + d)), "A stage holds tp_size * dp_size ranks, the product: you added them."),
    (dict(pp=lambda r, t, d: r // t // t), "A stage holds tp_size * dp_size ranks: you divided by tp_size twice."),
    (
        dict(pp=lambda r, t, d: r // (t * d) % d),
        "The last axis needs no `%`: as many stages as there are follow one another.",
    ),
    (
        dict(tp=lambda r, t, d: r // d % t, dp=lambda r, t, d: r % d),
        "You let the data axis run fastest. In tp-dp-pp the first name, tp, runs fastest.",
    ),
    (
        dict(dp=lambda r, t, d: r / t % d, pp=lambda r, t, d: r / (t * d)),
        "Coordinates are whole numbers: `/` gives fractions, and `//` drops them.",
    ),
)
rank_to_coordinates.mistakes_in(
    (None, lambda place: [1 + each for each in place], "You count from 1. Ranks and coordinates count from 0."),
)


# -- the groups of a layout ---------------------------------------------------------------------------------------


def my_group_lists(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    stage_size = world_size // pp_size  # ranks in one pipeline stage: tp_size * dp_size
    tp_groups = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    dp_groups = [
        list(range(stage + tp_rank, stage + stage_size, tp_size))
        for stage in range(0, world_size, stage_size)
        for tp_rank in range(tp_size)
    ]
    pp_groups = [list(range(first, world_size, stage_size)) for first in range(stage_size)]
    return tp_groups, dp_groups, pp_groups


group_lists = Exercise(
    "group_lists",
    my_group_lists,
    notebook="01",
    cases=[(8, 2, 2), (16, 2, 4), (16, 4, 2), (24, 2, 3)],
    hints=[
        "Start with dp_size = world_size // (tp_size * pp_size). One stage is tp_size * dp_size consecutive ranks.",
        "The members of a tensor group are 1 apart, those of a data group tp_size apart, and those of a pipeline group "
        "one stage apart.",
        "`range(first, end, step)` makes one group. What is left to find is where each group begins.",
    ],
)


def groups_in_order(world_size: int, tp_size: int, pp_size: int, order: str = "tp-dp-pp", **strides: Callable) -> list:
    """Return groups in this order; those of an axis in ``strides`` run through the world, as many ranks apart."""
    layout = ParallelLayout(world_size, tp_size, pp_size, order=order)
    apart = {axis: stride(tp_size, pp_size) for axis, stride in strides.items()}
    return [
        [list(range(first, world_size, apart[axis])) for first in range(apart[axis])] if axis in apart
        else layout.groups(axis)
        for axis in ("tp", "dp", "pp")
    ]  # fmt: skip


group_lists.mistakes_of(
    groups_in_order,
    (dict(order="tp-pp-dp"), "These are groups of tp-pp-dp. In tp-dp-pp a stage is tp_size * dp_size ranks in a row."),
    (dict(order="dp-tp-pp"), "You let the data axis run fastest. In tp-dp-pp tensor ranks are neighbours: [0, 1], ..."),
    (dict(order="pp-dp-tp"), "You read the order from right to left: the axis that is named first runs fastest."),
    (
        dict(dp=lambda t, p: t),
        "Your data groups run through all stages. Ranks of different stages hold different layers and have nothing to "
        "average: a data group stays inside one stage of tp_size * dp_size ranks.",
    ),
    (
        dict(pp=lambda t, p: p),
        "The members of your pipeline groups are pp_size apart. pp_size is how many members there are; they are one "
        "stage apart, which is tp_size * dp_size ranks.",
    ),
)


@group_lists.mistake("Only tensor ranks are neighbours. The members of the other groups are a stride apart.")
def neighbours_in_every_group(world_size, tp_size, pp_size):
    sizes = tp_size, world_size // (tp_size * pp_size), pp_size
    return [[list(range(i, i + size)) for i in range(0, world_size, size)] for size in sizes]


@group_lists.mistake(
    "The members of your pipeline groups are tp_size * pp_size apart. They are one stage apart, which is tp_size * "
    "dp_size ranks."
)
def pipeline_stride_of_pp(world_size, tp_size, pp_size):
    tensor, data, _ = my_group_lists(world_size, tp_size, pp_size)
    apart = tp_size * pp_size
    return tensor, data, [[first + stage * apart for stage in range(pp_size)] for first in range(apart)]


group_lists.mistakes_in(
    (
        1,
        lambda groups: [[first + rank for rank in groups[0]] for first in range(len(groups))],
        "Your data groups begin at each rank in turn. After tp_size of them, the next begins in the next stage.",
    ),
    (
        None,
        lambda lists: [[group[:-1] for group in groups] for groups in lists],
        "Every group lacks its last member: the end of a range is not part of it.",
    ),
)


# -- the layout for a cluster -------------------------------------------------------------------------------------


def my_layout(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    tp_size = math.gcd(gpus_per_node, gpus_per_replica)  # the largest that divides both: no group straddles two nodes
    pp_size = gpus_per_replica // tp_size
    dp_size = world_size // gpus_per_replica
    return tp_size, pp_size, dp_size


layout_for_cluster = Exercise(
    "layout_for_cluster",
    my_layout,
    notebook="01",
    cases=[(16, 8, 8), (64, 8, 4), (64, 8, 16), (48, 6, 4), (96, 8, 12), (32, 4, 16), (48, 12, 24), (72, 6, 9)],
    hints=[
        "Tensor ranks are neighbours, so the groups stay inside nodes exactly when tp_size divides gpus_per_node.",
        "tp_size must divide gpus_per_replica too. Which number is the largest that divides both?",
    ],
)


def layout_with(
    world_size, gpus_per_node, gpus_per_replica, tp_size: Callable = math.gcd, per_copy: Callable = lambda n, r: r
) -> tuple[int, int, int]:
    """Return the layout with t = ``tp_size(n, r)`` and a copy on ``per_copy(n, r)`` GPUs; n are in a node, r needed."""
    t, each = tp_size(gpus_per_node, gpus_per_replica), per_copy(gpus_per_node, gpus_per_replica)
    return t, gpus_per_replica // t, world_size // each


STRADDLES = (
    "A tensor group that is smaller than a node can still straddle two: with 6 GPUs per node, the ranks 4 to 7 are on "
    "both. tp_size has to divide the GPUs of a node."
)
layout_for_cluster.mistakes_of(
    layout_with,
    (dict(tp_size=min), STRADDLES),
    (dict(tp_size=min, per_copy=lambda n, r: min(n, r) * (r // min(n, r))), STRADDLES),
    (
        dict(tp_size=lambda n, r: max(t for t in range(1, n + 1) if r % t == 0)),
        "Your tp_size divides the replica, but not always the node: a group of 4 that begins at the fifth of 6 GPUs "
        "ends on the next node. tp_size has to divide both.",
    ),
    (
        dict(tp_size=lambda n, r: min(t for t in range(2, n + 1) if n % t == 0 == r % t)),
        "Your tp_size divides both, but it is the smallest that does: take the largest.",
    ),
    (dict(per_copy=lambda n, r: math.gcd(n, r) * r), "d is world_size // gpus_per_replica, which already counts t."),
    (dict(per_copy=lambda n, r: n), "d counts copies of the model, not nodes: world_size // gpus_per_replica."),
    (dict(per_copy=math.gcd), "Your d leaves out the stages: a copy takes t * p GPUs, which is gpus_per_replica."),
    (
        dict(tp_size=lambda n, r: math.gcd(n, r, 1024)),
        "tp_size need not be a power of two: with 12 GPUs per node and 24 per replica, t = 12 fits.",
    ),
    (
        dict(tp_size=lambda n, r: r),
        "You gave the whole replica to tensor parallelism, which leaves the node as soon as the replica does. Let "
        "pipeline stages take what a node cannot hold.",
    ),
    (
        dict(tp_size=lambda n, r: 1),
        "Tensor groups of 1 never leave a node, but make every GPU a stage. Take the largest that stays in a node.",
    ),
    (
        dict(tp_size=lambda n, r: n),
        "tp_size = gpus_per_node only works where it divides the replica: tp_size * pp_size must be gpus_per_replica.",
    ),
)
