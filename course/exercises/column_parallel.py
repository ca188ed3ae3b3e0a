"""The exercises of notebook 03: forward and backward of a column-parallel layer, and which rows a rank keeps."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.base import Exercise
from course.exercises.on_ranks import RankExercise, gathered, only, summed
from labkit.communication import CommunicationLog
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
    bias = 10.0 * torch.arange(1, output_size + 1)
    return x.to(local_device()), weight.to(local_device()), bias.to(local_device())


def gathers_y_once(log: CommunicationLog, x, master_weight, master_bias) -> str | None:
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
    cases=[(2, 1, 2, 4), (3, 2, 3, 6), (4, 2, 2, 8)],
    inputs=whole_layer,
    rule=only("all_gather", also=gathers_y_once),
    hints=[
        "This rank's columns of A are rows of the stored weight: `master_weight.chunk(tp_size)[rank]`. "
        "The bias is cut the same way.",
        "`F.linear(x, weight, bias)` gives this rank's columns, [batch, out/t].",
        "`dist.all_gather(shards, y_shard)` fills a list with one tensor per rank, in rank order. "
        "Then `torch.cat(shards, dim=-1)`.",
    ],
)


def own(master):
    return master.chunk(dist.get_world_size())[dist.get_rank()]


@column_forward.mistake("The rank took every t-th row, so the columns change order. Take out/t rows in one block.")
def every_tth_row(x, master_weight, master_bias):
    rank, tp_size = dist.get_rank(), dist.get_world_size()
    return gathered(F.linear(x, master_weight[rank::tp_size], master_bias[rank::tp_size]), dim=-1)


@column_forward.mistake("These are this rank's columns of Y. Gather them, so that every rank has all columns.")
def not_gathered(x, master_weight, master_bias):
    return F.linear(x, own(master_weight), own(master_bias))


@column_forward.mistake("The shards were stacked along the batch. They are columns of Y: join them along the last dim.")
def joined_along_the_batch(x, master_weight, master_bias):
    return gathered(not_gathered(x, master_weight, master_bias), dim=0)


@column_forward.mistake("The bias is missing. It is cut as the columns of A are: out/t numbers per rank.")
def no_bias(x, master_weight, master_bias):
    return gathered(F.linear(x, own(master_weight)), dim=-1)


@column_forward.mistake("Every rank added the first piece of the bias. Each needs the piece for its own columns.")
def bias_of_rank_0(x, master_weight, master_bias):
    bias = master_bias.chunk(dist.get_world_size())[0]
    return gathered(F.linear(x, own(master_weight), bias), dim=-1)


@column_forward.mistake(
    "The shards were added up. They are different columns of Y, so they belong next to each other. (Adding up is right "
    "for the other cut, in the next notebook.)"
)
def added_up(x, master_weight, master_bias):
    return summed(not_gathered(x, master_weight, master_bias))


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


def reduces_dx_once(log: CommunicationLog, x, weight, grad_output) -> str | None:
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


@column_backward.mistake("This is the part of dX through this rank's columns. Every rank used x: add up all parts.")
def dx_not_reduced(x, weight, grad_output):
    return grad_output @ weight, grad_output.T @ x, grad_output.sum(0)


@column_backward.mistake(
    "The parts of dX were averaged. Averaging is for data parallelism, where each rank has its own loss. Here there is "
    "one loss, and dX is the sum."
)
def dx_averaged(x, weight, grad_output):
    grad_x, *others = my_column_backward(x, weight, grad_output)
    return grad_x / dist.get_world_size(), *others


@column_backward.mistake(
    "The gradients of weight and bias were added up over the ranks, too. Each rank has different columns: their "
    "gradients are complete as they are. Only dX is summed."
)
def everything_reduced(x, weight, grad_output):
    return tuple(map(summed, dx_not_reduced(x, weight, grad_output)))


@column_backward.mistake("The parts of dX were joined. Each part already has the shape of x: add them up instead.")
def dx_gathered(x, weight, grad_output):
    grad_x, *others = dx_not_reduced(x, weight, grad_output)
    return gathered(grad_x, dim=-1), *others


@column_backward.mistake("The weight's gradient is transposed: PyTorch stores the transpose of A, [out/t, in].")
def gradient_of_a(x, weight, grad_output):
    grad_x, grad_weight, grad_bias = my_column_backward(x, weight, grad_output)
    return grad_x, grad_weight.T, grad_bias


@column_backward.mistake("The bias' gradient is the sum over the batch, not the mean.")
def mean_for_the_bias(x, weight, grad_output):
    return *my_column_backward(x, weight, grad_output)[:2], grad_output.mean(0)


@column_backward.mistake("The bias was added to every row of the batch: sum its gradient over the rows.")
def bias_gradient_per_row(x, weight, grad_output):
    return *my_column_backward(x, weight, grad_output)[:2], grad_output


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
        (torch.arange(24).view(12, 2), 1, 3, 2),
        (torch.arange(16), 3, 4, 2),
    ],
    hints=[
        "Cut the rows into t * stride chunks: `master.chunk(tp_size * stride)`.",
        "With t = 2 and stride = 3 the chunks are Q Q K K V V. Which three belong to rank 1?",
        "Python's slices do it: `chunks[rank::tp_size]`. Then `torch.cat`.",
    ],
)


@stride_shard.mistake("These are strided rows. The rule says strided chunks: cut first, then take every t-th chunk.")
def strided_rows(master, rank, tp_size, stride):
    return master[rank::tp_size]


@stride_shard.mistake("This is one block of rows, as for stride 1. A fused [Q; K; V] must be cut inside each part.")
def one_block(master, rank, tp_size, stride):
    return master.chunk(tp_size)[rank]


@stride_shard.mistake("This is one chunk. The rank keeps `stride` of them, joined.")
def one_chunk(master, rank, tp_size, stride):
    return master.chunk(tp_size * stride)[rank]


@stride_shard.mistake("There are too few chunks: cut into t * stride, so that each part is cut t ways.")
def too_few_chunks(master, rank, tp_size, stride):
    chunks = master.chunk(stride)[rank::tp_size]
    return torch.cat(chunks) if chunks else master[:0]


@stride_shard.mistake("The chunks of a rank are tp_size apart, not stride apart.")
def steps_by_stride(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[rank::stride])


@stride_shard.mistake("Every rank gets the chunks of rank 0. Start at chunk number `rank`.")
def rank_forgotten(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[::tp_size])
