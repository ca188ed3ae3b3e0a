"""Answers to the exercise on a plan for a block with a fused Q-K-V and SwiGLU."""

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PLAN = {
    "qkv": tp.ColwiseParallel(),
    "out": tp.RowwiseParallel(),
    "gate_up": tp.ColwiseParallel(),
    "down": tp.RowwiseParallel(),
}


def in_order_of_ranks(rows, num_parts, t):
    parts = [part.chunk(t) for part in rows.chunk(num_parts)]
    return torch.cat([part[rank] for rank in range(t) for part in parts])


def rearrange(block, mesh):
    t = mesh.size()
    block.qkv.weight.data = in_order_of_ranks(block.qkv.weight.data, 3, t)
    block.qkv.bias.data = in_order_of_ranks(block.qkv.bias.data, 3, t)
    block.gate_up.weight.data = in_order_of_ranks(block.gate_up.weight.data, 2, t)


def plan_alone(block, mesh):
    return tp.parallelize_module(block, mesh, PLAN)


def plan_and_heads(block, mesh):
    block.num_heads = block.num_heads // mesh.size()
    return tp.parallelize_module(block, mesh, PLAN)


def heads_forgotten(block, mesh):
    rearrange(block, mesh)
    return tp.parallelize_module(block, mesh, PLAN)


def bias_forgotten(block, mesh):
    t = mesh.size()
    block.num_heads //= t
    block.qkv.weight.data = in_order_of_ranks(block.qkv.weight.data, 3, t)
    block.gate_up.weight.data = in_order_of_ranks(block.gate_up.weight.data, 2, t)
    return tp.parallelize_module(block, mesh, PLAN)


def gate_up_forgotten(block, mesh):
    t = mesh.size()
    block.num_heads //= t
    block.qkv.weight.data = in_order_of_ranks(block.qkv.weight.data, 3, t)
    block.qkv.bias.data = in_order_of_ranks(block.qkv.bias.data, 3, t)
    return tp.parallelize_module(block, mesh, PLAN)


def three_parts_for_both(block, mesh):
    t = mesh.size()
    block.num_heads //= t
    for layer in (block.qkv, block.gate_up):
        for parameter in layer.parameters():
            parameter.data = in_order_of_ranks(parameter.data, 3, t)
    return tp.parallelize_module(block, mesh, PLAN)


def rearranged_after_the_cut(block, mesh):
    block.num_heads //= mesh.size()
    block = tp.parallelize_module(block, mesh, PLAN)
    rearrange(block, mesh)
    return block


def takes_its_own_rows(block, mesh):
    rearrange(block, mesh)
    t, rank = mesh.size(), dist.get_rank()
    block.num_heads //= t
    for parameter in (block.qkv.weight, block.qkv.bias, block.gate_up.weight):
        parameter.data = parameter.data.chunk(t)[rank].clone()
    return tp.parallelize_module(block, mesh, PLAN)


def all_column(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    return tp.parallelize_module(block, mesh, {name: tp.ColwiseParallel() for name in PLAN})


def rows_and_columns_exchanged(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    plan = {"qkv": tp.RowwiseParallel(), "out": tp.ColwiseParallel()}
    return tp.parallelize_module(block, mesh, {**PLAN, **plan})


def mlp_forgotten(block, mesh):
    t = mesh.size()
    block.num_heads //= t
    block.qkv.weight.data = in_order_of_ranks(block.qkv.weight.data, 3, t)
    block.qkv.bias.data = in_order_of_ranks(block.qkv.bias.data, 3, t)
    return tp.parallelize_module(block, mesh, {name: PLAN[name] for name in ("qkv", "out")})


def names_of_llama(block, mesh):
    plan = {
        "attention.wqkv": tp.ColwiseParallel(),
        "attention.wo": tp.RowwiseParallel(),
        "feed_forward.w1": tp.ColwiseParallel(),
        "feed_forward.w2": tp.RowwiseParallel(),
    }
    return tp.parallelize_module(block, mesh, plan)


def gathers_between(block, mesh):
    plan = {
        "qkv": tp.ColwiseParallel(output_layouts=Replicate()),
        "out": tp.RowwiseParallel(input_layouts=Replicate()),
        "gate_up": tp.ColwiseParallel(output_layouts=Replicate()),
        "down": tp.RowwiseParallel(input_layouts=Replicate()),
    }
    return tp.parallelize_module(block, mesh, plan)


def inputs_called_whole(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    plan = {**PLAN, "down": tp.RowwiseParallel(input_layouts=Replicate())}
    return tp.parallelize_module(block, mesh, plan)


def dtensors_inside(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    plan = {**PLAN, "down": tp.RowwiseParallel(use_local_output=False)}
    return tp.parallelize_module(block, mesh, plan)


def scattered_output(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    plan = {**PLAN, "down": tp.RowwiseParallel(output_layouts=Shard(-1))}
    return tp.parallelize_module(block, mesh, plan)


def two_ranks_written_in(block, mesh):
    block.num_heads //= 2
    block.qkv.weight.data = in_order_of_ranks(block.qkv.weight.data, 3, 2)
    block.qkv.bias.data = in_order_of_ranks(block.qkv.bias.data, 3, 2)
    block.gate_up.weight.data = in_order_of_ranks(block.gate_up.weight.data, 2, 2)
    return tp.parallelize_module(block, mesh, PLAN)


def returns_the_plan(block, mesh):
    rearrange(block, mesh)
    return PLAN


def weights_distributed_without_a_plan(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    for layer, dim in ((block.qkv, 0), (block.gate_up, 0), (block.out, 1), (block.down, 1)):
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(dim)]))
    return block


def rearranged_with_an_index(block, mesh):
    """One index for all rows of a fused layer."""
    t = mesh.size()
    for layer, num_parts in ((block.qkv, 3), (block.gate_up, 2)):
        index = in_order_of_ranks(torch.arange(layer.weight.shape[0]), num_parts, t)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(parameter[index])
    block.num_heads //= t
    tp.parallelize_module(block, mesh, PLAN)
    assert isinstance(block.qkv.weight, DTensor)
    return block


def one_layer_after_the_other(block, mesh):
    rearrange(block, mesh)
    block.num_heads //= mesh.size()
    for name, style in PLAN.items():
        tp.parallelize_module(getattr(block, name), mesh, style)
    return block


WRONG = [
    ("block_plan", plan_alone, "neither the rows nor the heads"),
    ("block_plan", plan_and_heads, "the fused layers are cut from top to bottom"),
    ("block_plan", heads_forgotten, "num_heads is the whole model's"),
    ("block_plan", bias_forgotten, "the bias of qkv stays in the old order"),
    ("block_plan", gate_up_forgotten, "gate_up is fused, too"),
    ("block_plan", three_parts_for_both, "gate_up has two parts, not three"),
    ("block_plan", rearranged_after_the_cut, "too late: every rank rearranges its own rows"),
    ("block_plan", takes_its_own_rows, "cut by hand, and again by the plan"),
    ("block_plan", all_column, "out and down must be row parallel"),
    ("block_plan", rows_and_columns_exchanged, "row before column"),
    ("block_plan", mlp_forgotten, "SwiGLU is not in the plan"),
    ("block_plan", names_of_llama, "names that this block does not have"),
    ("block_plan", gathers_between, "right, but gathers between the two layers of each pair"),
    ("block_plan", inputs_called_whole, "the input of down is a shard"),
    ("block_plan", dtensors_inside, "a DTensor meets a plain tensor"),
    ("block_plan", scattered_output, "the output is cut along hidden"),
    ("block_plan", two_ranks_written_in, "right on two ranks"),
    ("block_plan", returns_the_plan, "returns the plan, not the block"),
    ("block_plan", weights_distributed_without_a_plan, "DTensor weights, and plain inputs"),
]

RIGHT = [("block_plan", rearranged_with_an_index), ("block_plan", one_layer_after_the_other)]
