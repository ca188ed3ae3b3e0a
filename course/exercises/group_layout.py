"""Exercises of notebook 01: where a rank stands, who is in its groups, and which layout suits a cluster.

All three use the order tp-dp-pp, in which tensor ranks are neighbours and pipeline stages are far apart. The
functions named my_... are the solutions.
"""

import math

from course.exercises.base import Exercise, Mistake
from labkit.layout import ParallelLayout


def my_coordinates(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    tp_rank = rank % tp_size  # the fastest axis: it turns at every step, like the last digit of an odometer
    dp_rank = rank // tp_size % dp_size  # turns once the tensor ranks are through
    pp_rank = rank // (tp_size * dp_size)  # the slowest: what is left
    return tp_rank, dp_rank, pp_rank


rank_to_coordinates = Exercise(
    "rank_to_coordinates",
    my_coordinates,
    cases=[(0, 2, 2), (5, 2, 2), (14, 2, 2), (13, 4, 2), (100, 8, 4), (27, 3, 5)],
    mistakes=[
        Mistake(
            lambda rank, t, d: (rank % t, rank // t, rank // (t * d)),
            "your data coordinate never turns back to 0: it also needs `% dp_size`.",
        ),
        Mistake(
            lambda rank, t, d: (rank % t, rank % d, rank // (t * d)),
            "your data coordinate moves with every rank. It moves once per tensor group: divide by tp_size first.",
        ),
        Mistake(
            lambda rank, t, d: (rank % t, rank // t % d, rank // d),
            "a stage holds tp_size * dp_size ranks, not dp_size: divide by both to find the stage.",
        ),
        Mistake(
            lambda rank, t, d: (rank // d % t, rank % d, rank // (t * d)),
            "you let the data axis run fastest. In tp-dp-pp the first name, tp, runs fastest.",
        ),
        Mistake(
            lambda rank, t, d: (rank % t, rank // (t * d), rank // t % d),
            "data and pipeline coordinate changed places: return tensor, data, pipeline.",
        ),
        Mistake(
            lambda rank, t, d: (rank % t, rank / t % d, rank / (t * d)),
            "coordinates are whole numbers: `/` gives fractions, `//` leaves them out.",
        ),
        Mistake(
            lambda rank, t, d: (rank // (t * d), rank // t % d, rank % t),
            "the three numbers are right, in the opposite order: return tensor, data, pipeline.",
        ),
        Mistake(
            lambda rank, t, d: (rank % t + 1, rank // t % d + 1, rank // (t * d) + 1),
            "you count from 1; ranks and coordinates count from 0.",
        ),
    ],
    hints=[
        "Think of an odometer with three wheels. The tensor wheel has tp_size digits and turns with every rank.",
        "`rank % tp_size` reads the fastest wheel, `rank // tp_size` takes it away. Do the same with the next wheel.",
    ],
)


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


def _groups_in_order(order: str, axes=("tp", "dp", "pp")):
    def wrong(world_size: int, tp_size: int, pp_size: int) -> list:
        layout = ParallelLayout(world_size, tp_size, pp_size, order=order)
        return [layout.groups(axis) for axis in axes]

    return wrong


def _data_groups_across_stages(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    tp_groups, _, pp_groups = my_group_lists(world_size, tp_size, pp_size)
    return tp_groups, [list(range(tp_rank, world_size, tp_size)) for tp_rank in range(tp_size)], pp_groups


def _pipelines_a_pipeline_apart(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    tp_groups, dp_groups, _ = my_group_lists(world_size, tp_size, pp_size)
    return tp_groups, dp_groups, [list(range(first, world_size, pp_size)) for first in range(pp_size)]


def _neighbours_in_every_group(world_size: int, tp_size: int, pp_size: int) -> list:
    sizes = tp_size, world_size // (tp_size * pp_size), pp_size
    return [[list(range(i, i + size)) for i in range(0, world_size, size)] for size in sizes]


def _last_member_missing(world_size: int, tp_size: int, pp_size: int) -> list:
    return [[group[:-1] for group in groups] for groups in my_group_lists(world_size, tp_size, pp_size)]


group_lists = Exercise(
    "group_lists",
    my_group_lists,
    cases=[(8, 2, 2), (16, 2, 4), (16, 4, 2), (24, 2, 3)],
    mistakes=[
        Mistake(
            _groups_in_order("tp-pp-dp"),
            "these are the groups of the order tp-pp-dp. In tp-dp-pp a stage is tp_size * dp_size ranks in a row.",
        ),
        Mistake(
            _groups_in_order("dp-tp-pp"),
            "you let the data axis run fastest. In tp-dp-pp neighbours share a tensor group: [0, 1], [2, 3], ...",
        ),
        Mistake(
            _groups_in_order("pp-dp-tp"),
            "you read the order from right to left: the axis that is named first runs fastest.",
        ),
        Mistake(
            _groups_in_order("tp-dp-pp", axes=("tp", "pp", "dp")),
            "the lists are right, but data and pipeline groups changed places: return tensor, data, pipeline.",
        ),
        Mistake(
            _data_groups_across_stages,
            "your data groups run through all stages. Ranks of different stages hold different layers and have "
            "nothing to average: a data group stays inside one stage of tp_size * dp_size ranks.",
        ),
        Mistake(
            _pipelines_a_pipeline_apart,
            "members of your pipeline groups are pp_size apart. pp_size is how many they are; "
            "they are one stage apart, which is tp_size * dp_size ranks.",
        ),
        Mistake(
            _neighbours_in_every_group,
            "you made every group of neighbours. Only tensor ranks are; members of other groups are a stride apart.",
        ),
        Mistake(
            _last_member_missing,
            "every group lacks its last member: the end of a range is not part of it.",
        ),
    ],
    hints=[
        "Start with dp_size = world_size // (tp_size * pp_size). One stage is tp_size * dp_size ranks in a row.",
        "Members of a tensor group are 1 apart, of a data group tp_size apart, of a pipeline group one stage apart.",
        "`range(first, end, step)` makes one group. What is left is where each group begins.",
    ],
)


def my_layout(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    import math  # here, so that the shown solution runs as it stands

    tp_size = math.gcd(gpus_per_node, gpus_per_replica)  # the largest that divides both: no group straddles two nodes
    pp_size = gpus_per_replica // tp_size
    dp_size = world_size // gpus_per_replica
    return tp_size, pp_size, dp_size


def _largest_that_is_no_larger_than_a_node(
    world_size: int, gpus_per_node: int, gpus_per_replica: int
) -> tuple[int, int, int]:
    tp_size = max(t for t in range(1, gpus_per_node + 1) if gpus_per_replica % t == 0)
    return tp_size, gpus_per_replica // tp_size, world_size // gpus_per_replica


layout_for_cluster = Exercise(
    "layout_for_cluster",
    my_layout,
    cases=[(16, 8, 8), (64, 8, 4), (64, 8, 16), (48, 6, 4), (96, 8, 12), (32, 4, 16)],
    mistakes=[
        Mistake(
            lambda n, node, replica: (min(node, replica), replica // min(node, replica), n // replica),
            "a tensor group that is smaller than a node can still straddle two: with 6 GPUs per node, the ranks 4 to 7 "
            "lie in both. tp_size has to divide the GPUs of a node.",
        ),
        Mistake(
            _largest_that_is_no_larger_than_a_node,
            "your tp_size divides the replica, but not always the node: a group of 4 that begins at the last but one "
            "of 6 GPUs ends in the next node. tp_size has to divide both.",
        ),
        Mistake(
            lambda n, node, replica: (math.gcd(node, replica), n // replica, replica // math.gcd(node, replica)),
            "pipeline and data sizes changed places: return tp_size, pp_size, dp_size.",
        ),
        Mistake(
            lambda n, node, replica: (replica, 1, n // replica),
            "you gave the whole replica to tensor parallelism, which leaves the node as soon as the replica does. "
            "Let pipeline stages take what a node cannot hold.",
        ),
        Mistake(
            lambda n, node, replica: (1, replica, n // replica),
            "tensor groups of 1 never leave a node, but then every GPU is a pipeline stage. "
            "Take the largest tp_size that stays inside.",
        ),
        Mistake(
            lambda n, node, replica: (node, replica // node, n // replica),
            "tp_size = gpus_per_node only works where it divides the replica: "
            "tp_size * pp_size must be exactly gpus_per_replica.",
        ),
        Mistake(
            lambda n, node, replica: (
                replica // math.gcd(node, replica),
                math.gcd(node, replica),
                n // replica,
            ),
            "tensor and pipeline sizes changed places: return tp_size, pp_size, dp_size.",
        ),
    ],
    hints=[
        "Tensor ranks are neighbours, so the groups stay inside nodes exactly when tp_size divides gpus_per_node.",
        "tp_size must divide gpus_per_replica too. Which number is the largest that divides both?",
    ],
)
