"""The page "what is wrong here?" of notebook 04: six sharded layers, each with a fault that was met in real code.

They have neutral names, because finding the fault is the exercise. Master weights are [out, in] = [512, 1024], and a
bias is 1 everywhere. "Right" is what `labkit.tensor_parallel` does, in a few lines.
"""

import torch
import torch.distributed as dist

from course.exercises.found_by import QUANTITIES, FlawedLayer, ShardedLinear
from labkit.tensor_parallel.operators import all_gather, all_reduce, local_slice

__all__ = ["QUANTITIES", "case_a", "case_b", "case_c", "case_d", "case_e", "case_f"]

# -- right --------------------------------------------------------------------------------------------------------


def cut_column(master, rank, tp_size):
    return master.chunk(tp_size, dim=0)[rank]


def cut_row(master, rank, tp_size):
    return master.chunk(tp_size, dim=1)[rank]


def column_forward(x, weight, bias, group):
    return all_gather(x @ weight.T + bias, group, dim=-1)


def row_forward(x, weight, bias, group):
    y = local_slice(x, group, dim=-1) @ weight.T
    return all_reduce(y, group) + bias


def cut_or_refuse(master, rank, tp_size):
    world_size = dist.get_world_size()
    if world_size % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide world_size={world_size}: start {tp_size} ranks")
    return master.chunk(tp_size, dim=0)[rank]


def cut_in_strides(master, rank, tp_size, stride=1):
    chunks = master.chunk(tp_size * stride, dim=0)
    return torch.cat(chunks[rank::tp_size])


COLUMN = ShardedLinear(0, cut_column, column_forward)

# -- wrong --------------------------------------------------------------------------------------------------------


def cut_a(master, rank, tp_size):
    return master.chunk(dist.get_world_size(), dim=0)[rank]


case_a = FlawedLayer(
    "case_a",
    "Asked for: a column-parallel layer, t = 2, on 4 ranks (two data-parallel copies).",
    flawed=ShardedLinear(0, cut_a, column_forward),
    right=COLUMN,
    tp_size=2,
    num_ranks=4,
    what="It is cut by the world size instead of t.",
    why="A tensor group of 2 then has two quarters of the layer, and no rank of the group has the rest. Nobody notices "
    "as long as the whole world is one tensor group.",
    hint_text="4 ranks, t = 2: how many rows of the weight should a rank have?",
)


def cut_b(master, rank, tp_size):
    a = master.T  # [in, out], as in Y = XA + b
    shards = a.chunk(tp_size, dim=1)
    return torch.cat(shards, dim=0)


case_b = FlawedLayer(
    "case_b",
    "Asked for: a column-parallel layer, t = 16, on 16 ranks.",
    flawed=ShardedLinear(0, cut_b, column_forward),
    right=COLUMN,
    tp_size=16,
    what="All shards are put together again on every rank.",
    why="They are even stacked along the wrong dimension, which gives 16 * 1024 rows of 32. No rank saves any memory, "
    "and the forward pass cannot run: its shapes do not fit. A rank keeps its own shard, and nothing else.",
    hint_text="Count the weights that one rank holds.",
)


def cut_c(master, rank, tp_size):
    output_size, input_size = master.shape
    return torch.empty(output_size // tp_size, input_size)


case_c = FlawedLayer(
    "case_c",
    "Asked for: a column-parallel layer, t = 2, on 2 ranks, its weight filled by init_method.",
    flawed=ShardedLinear(0, cut_c, column_forward),
    right=COLUMN,
    tp_size=2,
    what="The shard is allocated, but init_method is never called for it.",
    why="torch.empty returns whatever was in that memory: often zeros or small numbers, so that training seems to "
    "start. Here torch was told to fill such memory with nan, as torch.use_deterministic_algorithms(True) does.",
    hint_text="What does init_method decide? Look for a quantity that depends on the values of the weight.",
)


def cut_d(master, rank, tp_size):
    return master[rank::tp_size]


case_d = FlawedLayer(
    "case_d",
    "Asked for: a column-parallel layer, t = 4, on 4 ranks.",
    flawed=ShardedLinear(0, cut_d, column_forward),
    right=ShardedLinear(0, cut_in_strides, column_forward),
    tp_size=4,
    what="It takes single rows, t apart, where it should take a chunk of rows.",
    why="Megatron-LM cuts the master into t * stride contiguous chunks, and rank r takes chunks[r::t]. The slice with "
    "steps goes through a list of chunks, not through the rows. Every shape is right, and the output is shuffled.",
    hint_text="Which rows of the master does rank 0 have? Where do they end up when the outputs are joined?",
)


def cut_e(master, rank, tp_size):
    tp_size = min(tp_size, dist.get_world_size())
    return master.chunk(tp_size, dim=0)[rank]


case_e = FlawedLayer(
    "case_e",
    "Asked for: a column-parallel layer, t = 8. There are 4 ranks.",
    flawed=ShardedLinear(0, cut_e, column_forward),
    right=ShardedLinear(0, cut_or_refuse, column_forward),
    tp_size=8,
    num_ranks=4,
    num_ranks_right=8,
    what="t is silently reduced to the number of ranks.",
    why="The output is right, so no comparison of outputs finds it. Each rank holds twice what t = 8 promises (the "
    "right column was computed on 8 ranks), and a run sized for t = 8 is out of memory. The right thing is to refuse.",
    hint_text="The layer computes the right thing. What else did the user expect of t = 8?",
)


def forward_f(x, weight, bias, group):
    y = local_slice(x, group, dim=-1) @ weight.T + bias
    return all_reduce(y, group)


case_f = FlawedLayer(
    "case_f",
    "Asked for: a row-parallel layer, t = 4, on 4 ranks.",
    flawed=ShardedLinear(1, cut_row, forward_f),
    right=ShardedLinear(1, cut_row, row_forward),
    tp_size=4,
    what="The bias is added before the reduction, so it is added t times.",
    why="Every rank has the whole bias, and the all-reduce adds all of them. The bias of a new layer is zero, and t "
    "times zero is zero: a test of a fresh layer does not see it. Test with a bias that is not zero.",
    hint_text="Which part of the output does not depend on x?",
)
