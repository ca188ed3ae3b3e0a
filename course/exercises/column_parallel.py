"""The exercises of notebook 03: forward and backward of a column-parallel layer, and which rows a rank keeps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.base import Exercise
from course.exercises.on_ranks import Conduct, RankExercise, gathered, only, own, summed
from labkit.groups import local_device

# -- forward ----------------------------------------------------------------------------------------------------


def my_column_forward(x, master_weight, master_bias):
    rank, tp_size = dist.get_rank(), dist.get_world_size()
    weight = master_weight.chunk(tp_size)[rank]  # [out/t, in]: columns of A are rows of the stored weight
    bias = master_bias.chunk(tp_size)[rank]
    y_shard = F.linear(x, weight, bias)  # [batch, out/t]

    shards = [torch.empty_like(y_shard) for _ in range(tp_size)]
    dist.all_gather(shards, y_shard)
    return torch.cat(shards, dim=-1)


def whole_layer(batch_size: int, input_size: int, output_size: int) -> tuple[torch.Tensor, ...]:
    """Return x, weight and bias of a whole linear layer in small whole numbers, the same on every rank."""
    x = torch.arange(batch_size * input_size).view(batch_size, input_size) + 1.0
    weight = torch.arange(output_size * input_size).view(output_size, input_size) % 7 - 2.0
    bias = 20.0 * (torch.arange(output_size) - output_size // 2)  # so that Y has numbers of both signs
    return x.to(local_device()), weight.to(local_device()), bias.to(local_device())


def layer_to_cut(batch_size: int, input_size: int, output_size: int, blind: bool = False) -> tuple[torch.Tensor, ...]:
    """Return the whole layer; if ``blind``, with nan in the rows that are not this rank's.

    x then requires a gradient, so that autograd keeps what it is multiplied by.
    """
    x, *masters = whole_layer(batch_size, input_size, output_size)
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()] if blind else []
    for master in masters:
        for rank in others:
            master.chunk(dist.get_world_size())[rank].fill_(torch.nan)
    return x.requires_grad_(blind), *masters


def gathers_y_once(log: Conduct, x, master_weight, master_bias) -> str | None:
    if any(tensor.numel() == master_weight.numel() for tensor in log.kept):
        return "x was multiplied by the whole weight. Cut the weight first, and compute this rank's columns alone."
    if not log.records:
        return "No rank sent anything, so each computed all of Y. Compute with this rank's shard, then gather."
    y_bytes = len(x) * len(master_bias) * x.element_size()
    if log.total_bytes() == y_bytes:
        return None
    return f"Y has {y_bytes} bytes, and {log.total_bytes()} were gathered. Gather Y's shards, once, and nothing else."


column_forward = RankExercise(
    "column_forward",
    my_column_forward,
    notebook="03",
    cases=[(3, 1, 3, 6), (2, 2, 2, 4), (4, 2, 2, 8, True)],
    inputs=layer_to_cut,
    rule=only("all_gather", also=gathers_y_once),
    hints=[
        "This rank's columns of A are rows of the stored weight: `master_weight.chunk(tp_size)[rank]`. "
        "The bias is cut the same way.",
        "`F.linear(x, weight, bias)` gives this rank's columns, [batch, out/t].",
        "`dist.all_gather(shards, y_shard)` fills a list with one tensor per rank, in rank order. "
        "Then `torch.cat(shards, dim=-1)`.",
    ],
)


def every_tth(master):
    return master[dist.get_rank() :: dist.get_world_size()]


def as_it_is(tensor):
    return tensor


def in_columns(shard):
    return gathered(shard, dim=-1)


def layer_from(x, master_weight, master_bias, weight=own, bias=own, join=in_columns, after=lambda bias: 0):
    return join(F.linear(x, weight(master_weight), bias(master_bias))) + after(master_bias)


column_forward.mistakes_of(
    layer_from,
    (
        dict(weight=every_tth, bias=every_tth),
        "The rank took every t-th row, so the columns change order. Take out/t rows in one block.",
    ),
    (
        dict(weight=as_it_is, bias=as_it_is, join=as_it_is),
        "Every rank computed all of Y. Here it cannot: what belongs to the other ranks is nan in this case. Take this "
        "rank's shard of weight and bias first, compute with it, then gather.",
    ),
    (
        dict(weight=lambda master: own(master, -1)),
        "The weight was cut along its last dim. It is stored as [out, in], the transpose of A, whose columns are its "
        "rows: cut along dim 0.",
    ),
    (dict(bias=as_it_is), "You added the whole bias to a shard of Y. Cut it like the weight: `chunk(t)[rank]`."),
    (
        dict(bias=lambda bias: 0 * own(bias), after=lambda bias: dist.get_world_size() * bias),
        "The bias was added t times. Y has it once: each rank adds its own shard of it, before the gather.",
    ),
    (dict(after=as_it_is), "The bias was added twice: to the shard, and to all of Y."),
    (dict(join=as_it_is), "These are this rank's columns of Y. Gather them, so that every rank has all columns."),
    (
        dict(join=lambda shard: gathered(shard, dim=0)),
        "The shards were stacked along the batch. They are columns of Y: join them along the last dim.",
    ),
    (
        dict(
            join=lambda shard: in_columns(shard).chunk(dist.get_world_size(), -1)[-1].repeat(1, dist.get_world_size())
        ),
        "All t entries of the list are one tensor, as with `[tensor] * t`: each shard overwrites the last. Make t.",
    ),
    (dict(bias=lambda bias: 0 * own(bias)), "The bias is missing. It is cut as the columns of A are: out/t per rank."),
    (
        dict(bias=lambda bias: own(bias) if dist.get_rank() == 0 else 0 * own(bias)),
        "Only rank 0's columns have their bias. Each rank has columns of its own, and adds its own shard of the bias.",
    ),
    (
        dict(bias=lambda bias: bias.chunk(dist.get_world_size())[0]),
        "Every rank added the first shard of the bias. Each needs the shard for its own columns.",
    ),
    (
        dict(join=summed),
        "The shards were added up. They are different columns of Y, so they belong next to each other. (Adding up is "
        "right for the other cut, in the next notebook.)",
    ),
)
column_forward.mistakes_in((None, torch.relu, "This layer has no activation: Y is XA + b, negative numbers too."))


# -- backward ---------------------------------------------------------------------------------------------------


def my_column_backward(x, weight, grad_output):
    grad_x = grad_output @ weight  # [batch, in]: the part that went through this rank's columns
    dist.all_reduce(grad_x)  # x was used by every rank: add up all parts

    grad_weight = grad_output.T @ x  # [out/t, in]: of this rank's columns alone
    grad_bias = grad_output.sum(0)  # [out/t]
    return grad_x, grad_weight, grad_bias


def shards_in_backward(batch_size: int, input_size: int, output_size: int) -> tuple[torch.Tensor, ...]:
    """Return what a rank has when backward reaches the layer: all of x, its shard of the weight, its shard of dY."""
    x, master_weight, _ = whole_layer(batch_size, input_size, output_size)
    grad = torch.arange(batch_size * output_size, device=x.device).view(batch_size, output_size) % 5 + 1.0
    tp_size, rank = dist.get_world_size(), dist.get_rank()
    return x, master_weight.chunk(tp_size)[rank].clone(), grad.chunk(tp_size, dim=-1)[rank].contiguous()


def reduces_dx_once(log: Conduct, x, weight, grad_output) -> str | None:
    if log.kept:
        return "It uses autograd. Write the three gradients by hand: two products and a sum."
    x_bytes = x.numel() * x.element_size()
    if log.total_bytes() == x_bytes:
        return None
    return f"dX has {x_bytes} bytes, and {log.total_bytes()} were reduced. One all-reduce, of dX alone, is enough."


column_backward = RankExercise(
    "column_backward",
    my_column_backward,
    notebook="03",
    cases=[(2, 2, 2, 4), (3, 2, 3, 6), (4, 3, 2, 8)],
    inputs=shards_in_backward,
    rule=only("all_reduce", also=reduces_dx_once),
    hints=[
        "For Y = X Wᵀ + b: dX = dY W, dW = dYᵀ X, and db is the sum of dY over the batch. "
        "Check the shapes: they leave no other choice.",
        "To which of the three did only this rank contribute, and to which did all ranks?",
        "`dist.all_reduce(grad_x)` adds up in place. One call, for dX, is all the communication.",
    ],
)


SHARDS_ARE_COMPLETE = (
    "The gradients of weight and bias were added up over the ranks, too. Each rank has different columns: their "
    "gradients are complete as they are. Only dX is summed."
)
column_backward.mistakes_in(
    (
        0,
        lambda grad_x: grad_x / dist.get_world_size(),
        "The parts of dX were averaged. Averaging is for data parallelism, where each rank has its own loss. Here "
        "there is one loss, and dX is the sum.",
    ),
    (1, summed, SHARDS_ARE_COMPLETE),
    (2, summed, SHARDS_ARE_COMPLETE),
    (1, torch.t, "The weight's gradient is transposed: PyTorch stores the transpose of A, [out/t, in]."),
)
DY_IS_DIFFERENT = "dY was added up first. The ranks have different columns of it: use your own, then add up dX."


def gradients_from(x, weight, dy, dx=as_it_is, db=lambda dy: dy.sum(0), of=as_it_is):
    dy = of(dy)
    return dx(dy @ weight), dy.T @ x, db(dy)


column_backward.mistakes_of(
    gradients_from,
    (dict(of=summed), DY_IS_DIFFERENT),
    (dict(of=summed, dx=summed), DY_IS_DIFFERENT),
    (dict(), "This is the part of dX through this rank's columns. Every rank used x: add up all parts."),
    (
        dict(dx=lambda dx: gathered(dx, dim=-1)),
        "The parts of dX were joined. Each part already has the shape of x: add them up instead.",
    ),
    (dict(dx=summed, db=torch.sum), "The bias' gradient was summed over everything: sum over the batch, dim 0."),
    (dict(dx=summed, db=lambda dy: dy.mean(0)), "The bias' gradient is the sum over the batch, not the mean."),
    (dict(dx=summed, db=lambda dy: dy.sum(1)), "The bias' gradient was summed over the columns: sum over the batch."),
    (dict(dx=summed, db=lambda dy: dy), "The bias was added to every row of the batch: sum its gradient over them."),
)


@column_backward.mistake(
    "dX was computed from the dY of all ranks with the weight of one. Each rank's dY goes with its own weight: "
    "multiply these, and add up the products."
)
def own_weight_for_all(x, weight, dy):
    return summed(dy) @ weight, dy.T @ x, dy.sum(0)


# -- the stride rule --------------------------------------------------------------------------------------------


def my_shard(master, rank, tp_size, stride):
    chunks = master.chunk(tp_size * stride)  # e.g. t = 2, stride = 3: Q Q K K V V
    return torch.cat(chunks[rank::tp_size])  # rank 0: the first Q, the first K, the first V


stride_shard = Exercise(
    "stride_shard",
    my_shard,
    notebook="03",
    cases=[
        (torch.arange(12), 0, 2, 3),
        (torch.arange(12), 1, 2, 3),
        (torch.arange(12), 2, 3, 1),
        (torch.arange(48).view(12, 4), 1, 3, 2),
        (torch.arange(16), 3, 4, 2),
    ],
    hints=[
        "Cut the rows into t * stride chunks: `master.chunk(tp_size * stride)`.",
        "With t = 2 and stride = 3 the chunks are Q Q K K V V. Which three belong to rank 1?",
        "Python's slices do it: `chunks[rank::tp_size]`. Then `torch.cat`.",
    ],
)


stride_shard.mistakes_of(
    lambda master, rank, t, stride, kept: kept(master, rank, t, stride),
    (dict(kept=lambda m, r, t, s: m[r::t]), "These are single rows. Cut into chunks first: take every t-th chunk."),
    (dict(kept=lambda m, r, t, s: m.chunk(t)[r]), "This is one block, as for stride 1: cut inside each of Q, K and V."),
    (dict(kept=lambda m, r, t, s: m.chunk(t * s)[r]), "This is one chunk. The rank keeps `stride` of them, joined."),
    (
        dict(kept=lambda m, r, t, s: torch.cat([*m.chunk(s)[r::t], m[:0]])),
        "There are too few chunks: cut into t * stride, so that each part is cut t ways.",
    ),
    (
        dict(kept=lambda m, r, t, s: torch.cat(m.split(s)[r::t])),
        "These are blocks of `stride` rows. `stride` is the number of sections, as Q, K and V are three: the rows are "
        "cut into t * stride chunks.",
    ),
    (
        dict(kept=lambda m, r, t, s: torch.cat([section.chunk(t)[-r] for section in m.chunk(s)])),
        "`[-rank]` counts from the end, and -0 is 0: take chunk number `rank` of each section.",
    ),
    (dict(kept=lambda m, r, t, s: torch.cat(m.chunk(t * s)[r::s])), "The chunks of a rank are t apart, not stride."),
)
stride_shard.mistakes_of(
    lambda master, rank, t, stride, start, dim=0: torch.cat(master.chunk(t * stride, dim)[start(rank) :: t], dim),
    (dict(start=lambda rank: 0), "Every rank gets the chunks of rank 0. Start at chunk number `rank`."),
    (dict(start=lambda rank: rank - 1), "Ranks count from 0: rank 0 starts at chunk 0."),
    (dict(start=lambda rank: rank, dim=1), "Rows are along dim 0: cut and join there."),
)
