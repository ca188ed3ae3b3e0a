"""An exercise of notebook 04: a plan for `parallelize_module`, for a block with a fused Q-K-V and SwiGLU."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course.exercises.on_ranks import Conduct, whole_numbers
from course.exercises.parallel_objects import New, ObjectExercise, local, numbers_in
from labkit.sizes import counted


class Block(nn.Module):
    """Attention with a fused Q-K-V, then SwiGLU. x and the output are [tokens, hidden]."""

    def __init__(self, hidden: int, num_heads: int, width: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)  # its rows: all of Q, then all of K, then all of V
        self.out = nn.Linear(hidden, hidden)
        self.gate_up = nn.Linear(hidden, 2 * width, bias=False)  # its rows: the gate, then up
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(*heads)  # [heads, tokens, hidden of a head]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def my_parallel_block(block, mesh):
    t = mesh.size()
    for layer, num_parts in ((block.qkv, 3), (block.gate_up, 2)):
        for parameter in layer.parameters():  # [part, rank, rows] becomes [rank, part, rows]
            rows = parameter.data.unflatten(0, (num_parts, t, -1))
            parameter.data = rows.transpose(0, 1).flatten(0, 2)
    block.num_heads //= t  # those of this rank
    plan = {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "gate_up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return parallelize_module(block, mesh, plan)


def block_inputs(hidden: int, num_heads: int, width: int):
    """Return a block in float64, alike on all ranks, and a mesh of all ranks."""

    def make_block() -> Block:
        block = Block(hidden, num_heads, width).double()
        for seed, parameter in enumerate(block.parameters()):
            parameter.data = whole_numbers(tuple(parameter.shape), seed=450 + seed).cpu().double() / 8
        return block

    def make_mesh() -> DeviceMesh:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    return New(make_block, f"Block({hidden}, {num_heads}, {width})"), New(make_mesh, f"mesh of {dist.get_world_size()}")


def facts_of_block(parallel, block, mesh) -> dict[str, Any] | str:
    """Return what this rank has of the weights, and the output and the gradients of one forward and backward."""
    if not isinstance(parallel, Block):
        return f"a {type(parallel).__name__}"
    hidden = parallel.down.weight.shape[0]
    x = (whole_numbers((2, hidden), seed=460).cpu().double() / 4).requires_grad_()
    out = parallel(x)
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    out.square().sum().backward()
    parameters = dict(parallel.named_parameters())
    return {
        "shape of its shards": {name: list(local(each).shape) for name, each in parameters.items()},
        "output": numbers_in(out),
        "gradient of x": numbers_in(x.grad),
        "gradients of its shards": {name: numbers_in(each.grad) for name, each in parameters.items()},
    }


def four_sums(log: Conduct, block, mesh) -> str | None:
    """Complain about more than two all-reduces each way. (The weights themselves travel by scatter and broadcast.)"""
    operations = [record.operation for record in log.records if record.operation not in ("scatter", "broadcast")]
    if other := next((each for each in operations if each != "all_reduce"), None):
        return (
            f"Forward and backward call {other}: something is gathered, or dealt out anew, between two layers. What a "
            "ColwiseParallel leaves on a rank is just what the RowwiseParallel after it needs there."
        )
    if len(operations) > 4:
        return (
            f"Forward and backward call {counted(len(operations), 'all-reduce')}. Two each way are enough: one a pair."
        )
    return None


block_plan = ObjectExercise(
    "block_plan",
    my_parallel_block,
    notebook="04",
    cases=[(2, 8, 4, 12), (3, 18, 6, 15)],
    inputs=block_inputs,
    measure=facts_of_block,
    kind="the block",
    rule=four_sums,
    may_change=("block",),
    facts={
        "shape of its shards": "A plan names layers, and each that is named is cut: by ColwiseParallel along dim 0 of "
        "the weight, by RowwiseParallel along dim 1. Print `{name: p.placements for name, p in "
        "block.named_parameters()}`.",
        "output": "The shards have the right sizes. Do they have the right rows? A rank's rows of `qkv` should be its "
        "part of Q, of K and of V, one after the other, and `num_heads` its own heads.",
        "gradient of x": "Forward is right, backward is not.",
        "gradients of its shards": "Output and gradient of x are right, but the rows of a shard are in a different "
        "order: Q, K, V and gate, up, each with this rank's rows in their old order.",
    },
    errors={
        "mixed torch.Tensor and DTensor": "A plain tensor met a DTensor. Outside of the layers in your plan the block "
        "computes with plain tensors, so each layer must take and return those: leave `use_local_output` as it is, and "
        "cut weights by the plan alone.",
        "cannot be multiplied|size mismatch|must match|same reduction dim": "Two layers do not fit together: one "
        "leaves a shard of its output, and the next one expects all of it, or the other way round. Colwise, then "
        "Rowwise, in each pair.",
        "unflatten|invalid for input|shape '": "The rows of this rank do not divide as asked. A rank has 3 * hidden / "
        "t rows of `qkv`, which are num_heads / t heads; rearrange the rows before `parallelize_module` cuts them.",
        "not in the model|No module|has no attribute": "The plan's keys are the names of the block's own layers: "
        "`qkv`, `out`, `gate_up`, `down`.",
    },
    hints=[
        'The plan: `{"qkv": ColwiseParallel(), "out": RowwiseParallel(), ...}`, and `parallelize_module(block, mesh, '
        "plan)` returns the block. Which two of the four layers end with a sum over the ranks?",
        "After the cut a rank has num_heads / t heads. Nobody tells the block: `block.num_heads //= mesh.size()`.",
        "ColwiseParallel cuts the rows from top to bottom: with two ranks, rank 0 would get all of Q and half of K. "
        "First bring the rows into the order in which they are cut: rank 0's Q, K and V, then rank 1's.",
        "`rows = weight.unflatten(0, (3, t, -1))` is [part, rank, rows of a rank]. `rows.transpose(0, 1).flatten(0, "
        "2)` is in the order of the ranks. The bias of `qkv` has the same rows, and `gate_up` has two parts.",
    ],
)


def by_rank(rows: torch.Tensor, num_parts: int, t: int) -> torch.Tensor:
    """Return rows in the order of the ranks: of each rank, its share of each part."""
    return rows.unflatten(0, (num_parts, t, -1)).transpose(0, 1).flatten(0, 2)


def by_rank_turned_round(rows: torch.Tensor, num_parts: int, t: int) -> torch.Tensor:
    return rows.unflatten(0, (t, num_parts, -1)).transpose(0, 1).flatten(0, 2)


def row_by_row(rows: torch.Tensor, num_parts: int, t: int) -> torch.Tensor:
    """Return rows as some models have them: the first of each part, then the second of each."""
    return rows.unflatten(0, (num_parts, -1)).transpose(0, 1).flatten(0, 1)


def left_alone(rows: torch.Tensor, num_parts: int, t: int) -> torch.Tensor:
    return rows


def block_wrongly(
    block, mesh, *, weight=by_rank, bias=by_rank, gate=by_rank, columns=left_alone, heads=lambda heads, t: heads // t,
    first="rows", plan=None, **layers: Any,
):  # fmt: skip
    """Do what `my_parallel_block` does, with one thing wrong."""
    t = mesh.size()
    right = {"qkv": ColwiseParallel, "out": RowwiseParallel, "gate_up": ColwiseParallel, "down": RowwiseParallel}
    chosen = {name: make() for name, make in {**right, **layers}.items() if make}
    block.num_heads = heads(block.num_heads, t)
    block.qkv.weight.data = weight(block.qkv.weight.data, 3, t)
    block.qkv.bias.data = bias(block.qkv.bias.data, 3, t)
    block.gate_up.weight.data = gate(block.gate_up.weight.data, 2, t)
    block.out.weight.data = columns(block.out.weight.data.T, 2, t).T.contiguous()
    return parallelize_module(block, mesh, chosen if plan is None else plan(chosen))


def own_rows(rows: torch.Tensor, num_parts: int, t: int) -> torch.Tensor:
    return by_rank(rows, num_parts, t).chunk(t)[dist.get_rank()].contiguous()


def gathered_after() -> ColwiseParallel:
    return ColwiseParallel(output_layouts=Replicate())


def given_whole() -> RowwiseParallel:
    return RowwiseParallel(input_layouts=Replicate())


WHOLE: dict[str, Any] = dict(weight=left_alone, bias=left_alone, gate=left_alone, heads=lambda heads, t: heads)


block_plan.mistakes_of(
    block_wrongly,
    (
        dict(weight=left_alone, bias=left_alone, gate=left_alone),
        "ColwiseParallel cut the fused layers from top to bottom, so that rank 0 has Q and a part of K, and rank 1 the "
        "rest. Bring the rows into the order of the ranks first: `qkv` has three parts, `gate_up` has two.",
    ),
    (
        WHOLE,
        "The plan is right, and two things are left. The fused layers were cut from top to bottom, so rank 0 has Q and "
        "a part of K: bring their rows into the order of the ranks. And `num_heads` is still the whole model's.",
    ),
    (
        dict(heads=lambda heads, t: heads),
        "`num_heads` is still the whole model's, so each rank makes t times as many heads from its rows, each t times "
        "too narrow. Nothing raises, because the numbers divide: `block.num_heads //= mesh.size()`.",
    ),
    (
        dict(heads=lambda heads, t: heads // 2),
        "You divided the heads by 2. There are `mesh.size()` ranks, which is 2 in the first case only.",
    ),
    (
        dict(weight=left_alone, bias=left_alone),
        "`gate_up` is right, and `qkv` was cut from top to bottom: rank 0 has Q and a part of K. Its rows have three "
        "parts, which each rank needs a share of.",
    ),
    (
        dict(gate=left_alone),
        "`qkv` is right, and `gate_up` was cut from top to bottom: the first ranks have the gate, the others have up. "
        "It is fused, too, with two parts.",
    ),
    (
        dict(bias=left_alone),
        "The rows of `qkv.weight` moved, and its bias stayed. Each number of the bias belongs to a row: move both.",
    ),
    (
        dict(weight=by_rank_turned_round, bias=by_rank_turned_round, gate=by_rank_turned_round),
        "The rows were unflattened as [rank, part, ...]. They lie part by part: `unflatten(0, (num_parts, t, -1))`, "
        "and then the transpose puts the ranks first.",
    ),
    (
        dict(weight=row_by_row, bias=row_by_row, gate=row_by_row),
        "The rows are interleaved one by one: a row of Q, one of K, one of V. A rank needs its share of Q in one "
        "piece, then K's, then V's, as the block takes them apart with `chunk`.",
    ),
    (
        dict(gate=lambda rows, num_parts, t: by_rank(rows, 2 * num_parts, t)),
        "`gate_up` was rearranged as if it had four parts. It has two.",
    ),
    (
        dict(columns=by_rank),
        "The columns of `out` moved, too. They lie head by head, and a rank's heads are consecutive: leave them.",
    ),
    (
        dict(
            out=lambda: RowwiseParallel(output_layouts=Partial()),
            down=lambda: RowwiseParallel(output_layouts=Partial()),
        ),
        "The sums are left partial: each rank goes on with its own term, and nothing raises. `output_layouts` is "
        "`Replicate()` by default, which takes the all-reduce.",
    ),
    (
        dict(**WHOLE, qkv=gathered_after, out=given_whole, gate_up=gathered_after, down=given_whole),
        "The output is right, because each ColwiseParallel gathers what it computed, and each RowwiseParallel cuts it "
        "again. Leave the layouts as they are by default, and nothing is sent between the two: then the rows and "
        "`num_heads` must be those of the rank.",
    ),
    (
        dict(gate_up=None, down=None, gate=left_alone),
        "Only attention is in the plan: each rank holds and computes all of SwiGLU. The output is right, and the "
        "memory is not.",
    ),
    (
        dict(qkv=None, out=None, weight=left_alone, bias=left_alone, heads=lambda heads, t: heads),
        "Only SwiGLU is in the plan: each rank holds and computes all of attention. The output is right, and the "
        "memory is not.",
    ),
    (
        dict(plan=lambda chosen: {f"block.{name}": style for name, style in chosen.items()}),
        "No layer of the block has these names, so nothing was cut. There is only a warning. The names begin inside of "
        "the module that you give to `parallelize_module`: `qkv`, not `block.qkv`.",
    ),
    (
        dict(weight=own_rows, bias=own_rows, gate=own_rows),
        "The fused layers were cut twice: by you, and then by the plan. Rearrange all rows, and leave the cut to the "
        "plan.",
    ),
    (
        dict(out=ColwiseParallel),
        "`out` is cut by columns, but its input is this rank's heads alone: it must be RowwiseParallel, whose terms "
        "are added up.",
    ),
    (
        dict(down=None),
        "`down` is not in the plan, but its input is a shard. A RowwiseParallel must follow each ColwiseParallel.",
    ),
    (
        dict(out=lambda: RowwiseParallel(use_local_output=False)),
        "`use_local_output=False` leaves a DTensor, and `x + ...` adds a plain tensor to it: torch refuses to mix "
        "them. Leave it out.",
    ),
)
