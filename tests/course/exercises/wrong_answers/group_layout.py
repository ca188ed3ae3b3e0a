"""Answers to the exercises on group layout."""

import math
from itertools import chain


def data_axis_first(rank, tp_size, dp_size):
    return rank // dp_size % tp_size, rank % dp_size, rank // (tp_size * dp_size)


def data_and_pipeline_swapped(rank, tp_size, dp_size):
    return rank % tp_size, rank // (tp_size * dp_size), rank // tp_size % dp_size


def coordinates_reversed(rank, tp_size, dp_size):
    return rank // (tp_size * dp_size), rank // tp_size % dp_size, rank % tp_size


def data_never_starts_again(rank, tp_size, dp_size):
    return rank % tp_size, rank // tp_size, rank // (tp_size * dp_size)


def data_without_division(rank, tp_size, dp_size):
    return rank % tp_size, rank % dp_size, rank // (tp_size * dp_size)


def stage_without_tensor_size(rank, tp_size, dp_size):
    return rank % tp_size, rank // tp_size % dp_size, rank // dp_size


def true_division(rank, tp_size, dp_size):
    return rank % tp_size, rank / tp_size % dp_size, rank / (tp_size * dp_size)


def bit_tricks(rank, tp_size, dp_size):
    tp_bits, dp_bits = int(math.log2(tp_size)), int(math.log2(dp_size))
    return rank & (tp_size - 1), (rank >> tp_bits) & (dp_size - 1), rank >> (tp_bits + dp_bits)


def only_the_example(rank, tp_size, dp_size):
    return 1, 0, 1


def coordinates_printed(rank, tp_size, dp_size):
    print(rank % tp_size, rank // tp_size % dp_size, rank // (tp_size * dp_size))


def coordinates_by_divmod(rank, tp_size, dp_size):
    rest, tp_rank = divmod(rank, tp_size)
    pp_rank, dp_rank = divmod(rest, dp_size)
    return tp_rank, dp_rank, pp_rank


def blocks(n, size):
    return [list(range(first, first + size)) for first in range(0, n, size)]


def strides(n, step):
    return [list(range(first, n, step)) for first in range(step)]


def data_groups(n, t, d):
    return [[first + i + t * k for k in range(d)] for first in range(0, n, t * d) for i in range(t)]


def all_groups_are_blocks(n, t, p):
    return blocks(n, t), blocks(n, n // (t * p)), blocks(n, p)


def data_groups_cross_stages(n, t, p):
    return blocks(n, t), strides(n, t), strides(n, n // p)


def data_and_pipeline_lists_swapped(n, t, p):
    return blocks(n, t), strides(n, n // p), data_groups(n, t, n // (t * p))


def the_other_order(n, t, p):
    pipeline = [[first + i + t * k for k in range(p)] for first in range(0, n, t * p) for i in range(t)]
    return blocks(n, t), strides(n, t * p), pipeline


def pipeline_stride_is_p(n, t, p):
    return blocks(n, t), data_groups(n, t, n // (t * p)), strides(n, p)


def data_size_forgets_p(n, t, p):
    return blocks(n, t), data_groups(n, t, n // t), strides(n, n // p)


def sorted_by_tensor_rank(n, t, p):
    d = n // (t * p)
    data = [[first + i + t * k for k in range(d)] for i in range(t) for first in range(0, n, t * d)]
    return blocks(n, t), data, strides(n, n // p)


def flat_lists(n, t, p):
    lists = blocks(n, t), data_groups(n, t, n // (t * p)), strides(n, n // p)
    return tuple(list(chain(*groups)) for groups in lists)


def lists_by_loops(world_size, tp_size, pp_size):
    dp_size = world_size // (tp_size * pp_size)
    tensor, data, pipeline = [], [], []
    for rank in range(world_size):
        tp_rank, dp_rank = rank % tp_size, rank // tp_size % dp_size
        stage = rank // (tp_size * dp_size)
        if tp_rank == 0:
            tensor.append([rank + i for i in range(tp_size)])
        if dp_rank == 0:
            data.append([rank + i * tp_size for i in range(dp_size)])
        if stage == 0:
            pipeline.append([rank + i * tp_size * dp_size for i in range(pp_size)])
    return tensor, data, pipeline


def largest_divisor(gpus_per_node, gpus_per_replica):
    return max(t for t in range(1, gpus_per_node + 1) if gpus_per_replica % t == 0)


def ignores_odd_nodes(world_size, gpus_per_node, gpus_per_replica):
    t = largest_divisor(gpus_per_node, gpus_per_replica)
    return t, gpus_per_replica // t, world_size // gpus_per_replica


def smaller_of_both(world_size, gpus_per_node, gpus_per_replica):
    t = min(gpus_per_node, gpus_per_replica)
    return t, gpus_per_replica // t, world_size // gpus_per_replica


def whole_node(world_size, gpus_per_node, gpus_per_replica):
    return gpus_per_node, gpus_per_replica // gpus_per_node, world_size // gpus_per_replica


def tensor_and_pipeline_swapped(world_size, gpus_per_node, gpus_per_replica):
    t = math.gcd(gpus_per_node, gpus_per_replica)
    return gpus_per_replica // t, t, world_size // gpus_per_replica


def powers_of_two(world_size, gpus_per_node, gpus_per_replica):
    t = 1
    while gpus_per_node % (2 * t) == 0 and gpus_per_replica % (2 * t) == 0:
        t *= 2
    return t, gpus_per_replica // t, world_size // gpus_per_replica


def replicas_are_nodes(world_size, gpus_per_node, gpus_per_replica):
    t = math.gcd(gpus_per_node, gpus_per_replica)
    return t, gpus_per_replica // t, world_size // gpus_per_node


def replicas_forget_stages(world_size, gpus_per_node, gpus_per_replica):
    t = math.gcd(gpus_per_node, gpus_per_replica)
    return t, gpus_per_replica // t, world_size // t


def smallest_common_divisor(world_size, gpus_per_node, gpus_per_replica):
    for t in range(2, gpus_per_node + 1):
        if gpus_per_node % t == 0 and gpus_per_replica % t == 0:
            return t, gpus_per_replica // t, world_size // gpus_per_replica
    return 1, gpus_per_replica, world_size // gpus_per_replica


def layout_by_looking_at_groups(world_size, gpus_per_node, gpus_per_replica):
    for t in range(gpus_per_replica, 0, -1):
        firsts = range(0, world_size, t)
        inside = all(first // gpus_per_node == (first + t - 1) // gpus_per_node for first in firsts)
        if gpus_per_replica % t == 0 and inside:
            return t, gpus_per_replica // t, world_size // gpus_per_replica


def group_lists_1(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    dp_size = world_size // (tp_size * pp_size)
    tensor = [list(range(i, i + tp_size)) for i in range(0, world_size, tp_size)]
    step = world_size // dp_size
    data = [list(range(i, world_size, step)) for i in range(step)]
    pipeline = []
    for start in range(0, world_size, step):
        for i in range(tp_size):
            pipeline.append(list(range(start + i, start + step, tp_size)))
    return tensor, data, pipeline


def group_lists_2(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    d = world_size // (tp_size * pp_size)
    tensor = [list(range(i, i + tp_size)) for i in range(0, world_size, tp_size)]
    data = [list(range(i, i + d * tp_size, tp_size)) for i in range(world_size // d)]
    step = world_size // pp_size
    pipeline = [list(range(i, world_size, step)) for i in range(step)]
    return tensor, data, pipeline


def group_lists_3(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    tensor = [list(range(i, i + tp_size)) for i in range(0, world_size, tp_size)]
    per_stage = world_size // pp_size
    data = []
    for i in range(tp_size):
        for stage in range(pp_size):
            start = stage * per_stage
            data.append(list(range(start + i, start + per_stage, tp_size)))
    pipeline = [list(range(i, world_size, per_stage)) for i in range(per_stage)]
    return tensor, data, pipeline


def group_lists_4(world_size: int, tp_size: int, pp_size: int) -> tuple[list, list, list]:
    per_stage = world_size // pp_size
    tensor = [list(range(i, i + tp_size)) for i in range(0, world_size, tp_size)]
    data = []
    for start in range(0, world_size, per_stage):
        for i in range(tp_size):
            data.append(list(range(start + i, start + per_stage, tp_size)))
    pipeline = [list(range(i, world_size, pp_size)) for i in range(pp_size)]
    return tensor, data, pipeline


def layout_for_cluster_1(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    t = min(gpus_per_node, gpus_per_replica)
    p = gpus_per_replica // t
    d = world_size // (t * p)
    return t, p, d


def layout_for_cluster_2(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    t = max(t for t in range(1, gpus_per_node + 1) if gpus_per_replica % t == 0)
    p = gpus_per_replica // t
    return t, p, world_size // gpus_per_replica


def layout_for_cluster_3(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    t = 1
    while gpus_per_node % (2 * t) == 0 and gpus_per_replica % (2 * t) == 0:
        t *= 2
    return t, gpus_per_replica // t, world_size // gpus_per_replica


def layout_for_cluster_4(world_size: int, gpus_per_node: int, gpus_per_replica: int) -> tuple[int, int, int]:
    for t in range(gpus_per_node, 0, -1):
        if gpus_per_node % t == 0 and gpus_per_replica % t == 0:
            return t, gpus_per_replica // t, world_size // t


def rank_to_coordinates_1(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    return rank % tp_size, rank // (tp_size * dp_size), rank // tp_size % dp_size


def rank_to_coordinates_2(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    return rank % tp_size, rank // tp_size % dp_size, rank // (tp_size + dp_size)


def rank_to_coordinates_3(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    tp = rank % tp_size
    dp = rank // tp_size
    pp = rank // (tp_size * dp_size)
    return tp, dp, pp


def rank_to_coordinates_4(rank: int, tp_size: int, dp_size: int) -> tuple[int, int, int]:
    tp = rank % tp_size
    dp = (rank // tp_size) % dp_size
    pp = rank // dp_size
    return tp, dp, pp


WRONG = [
    ("rank_to_coordinates", data_axis_first, "the data axis turns fastest"),
    ("rank_to_coordinates", data_and_pipeline_swapped, "data and pipeline coordinates are swapped"),
    ("rank_to_coordinates", coordinates_reversed, "the coordinates are in reverse order"),
    ("rank_to_coordinates", data_never_starts_again, "the data coordinate never starts again"),
    ("rank_to_coordinates", data_without_division, "the data coordinate ignores t"),
    ("rank_to_coordinates", stage_without_tensor_size, "the stage ignores t"),
    ("rank_to_coordinates", true_division, "true division gives fractions"),
    ("rank_to_coordinates", bit_tricks, "right for powers of two only"),
    ("rank_to_coordinates", only_the_example, "right for the example only"),
    ("rank_to_coordinates", coordinates_printed, "prints instead of returning"),
    ("group_lists", all_groups_are_blocks, "all groups are consecutive ranks"),
    ("group_lists", data_groups_cross_stages, "data groups cross the stages"),
    ("group_lists", data_and_pipeline_lists_swapped, "data and pipeline lists are swapped"),
    ("group_lists", the_other_order, "the order is tp-pp-dp"),
    ("group_lists", pipeline_stride_is_p, "pipeline ranks lie p apart"),
    ("group_lists", data_size_forgets_p, "d is computed without p"),
    ("group_lists", sorted_by_tensor_rank, "groups are not sorted by first rank"),
    ("group_lists", flat_lists, "each list is flat, without groups"),
    ("layout_for_cluster", ignores_odd_nodes, "groups cross nodes of 6"),
    ("layout_for_cluster", smaller_of_both, "t need not divide anything"),
    ("layout_for_cluster", whole_node, "t is always the node"),
    ("layout_for_cluster", tensor_and_pipeline_swapped, "t and p are swapped"),
    ("layout_for_cluster", powers_of_two, "only powers of two are tried"),
    ("layout_for_cluster", replicas_are_nodes, "d counts nodes, not replicas"),
    ("layout_for_cluster", replicas_forget_stages, "d forgets the stages"),
    ("layout_for_cluster", smallest_common_divisor, "takes the smallest t above 1"),
    ("group_lists", group_lists_1, "order tp-pp-dp instead of tp-dp-pp"),
    ("group_lists", group_lists_2, "data groups from every consecutive start"),
    ("group_lists", group_lists_3, "data groups not sorted"),
    ("group_lists", group_lists_4, "pipeline stride p instead of n/p"),
    ("layout_for_cluster", layout_for_cluster_1, "min, divides neither node nor replica"),
    ("layout_for_cluster", layout_for_cluster_2, "t need not divide the node"),
    ("layout_for_cluster", layout_for_cluster_3, "only powers of two tried"),
    ("layout_for_cluster", layout_for_cluster_4, "d forgets the pipeline"),
    ("rank_to_coordinates", rank_to_coordinates_1, "pipeline before data, outputs swapped"),
    ("rank_to_coordinates", rank_to_coordinates_2, "adds t and d: example only"),
    ("rank_to_coordinates", rank_to_coordinates_3, "no modulo on the data coordinate"),
    ("rank_to_coordinates", rank_to_coordinates_4, "pipeline divided by d only"),
]

RIGHT = [
    ("rank_to_coordinates", coordinates_by_divmod),
    ("group_lists", lists_by_loops),
    ("layout_for_cluster", layout_by_looking_at_groups),
]
