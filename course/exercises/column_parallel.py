"""The exercises of notebook 03: forward and backward of a column-parallel layer, and which rows a rank keeps.

The functions named my_... are the solutions; those with a leading underscore make the typical mistakes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises.base import Exercise, Mistake
from course.exercises.on_ranks import RankExercise, only
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
    """x, weight and bias of a whole linear layer, the same on every rank, in small whole numbers."""
    x = torch.arange(batch_size * input_size).view(batch_size, input_size) + 1.0
    weight = torch.arange(output_size * input_size).view(output_size, input_size) % 7 - 2.0
    bias = 10.0 * torch.arange(1, output_size + 1)
    return x.to(local_device()), weight.to(local_device()), bias.to(local_device())


def _forward(x, weight, bias, dim=-1):
    y_shard = F.linear(x, weight, bias)
    shards = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, y_shard)
    return torch.cat(shards, dim)


def _own(master):
    return master.chunk(dist.get_world_size())[dist.get_rank()]


def _forward_of_every_nth_row(x, master_weight, master_bias):
    rank, tp_size = dist.get_rank(), dist.get_world_size()
    return _forward(x, master_weight[rank::tp_size], master_bias[rank::tp_size])


def _forward_without_gather(x, master_weight, master_bias):
    return F.linear(x, _own(master_weight), _own(master_bias))


def _forward_joined_along_the_batch(x, master_weight, master_bias):
    return _forward(x, _own(master_weight), _own(master_bias), dim=0)


def _forward_without_bias(x, master_weight, master_bias):
    return _forward(x, _own(master_weight), None)


def _forward_with_rank_0s_bias(x, master_weight, master_bias):
    return _forward(x, _own(master_weight), master_bias.chunk(dist.get_world_size())[0])


def _forward_summed(x, master_weight, master_bias):
    total = F.linear(x, _own(master_weight), _own(master_bias))
    dist.all_reduce(total)
    return total


def _gathers_y_once(log: CommunicationLog, x, master_weight, master_bias) -> str | None:
    if not log.records:
        return "No rank sent anything, so each computed all of Y. Compute with this rank's shard, then gather."
    if complaint := only("all_gather")(log):
        return complaint
    y_bytes = len(x) * len(master_bias) * x.element_size()
    if log.total_bytes() == y_bytes:
        return None
    return f"Y has {y_bytes} bytes, and {log.total_bytes()} were gathered. Gather Y's shards, once, and nothing else."


column_forward = RankExercise(
    "column_forward",
    my_column_forward,
    cases=[(2, 1, 2, 4), (3, 2, 3, 6), (4, 2, 2, 8)],
    inputs=whole_layer,
    rule=_gathers_y_once,
    mistakes=[
        Mistake(
            _forward_of_every_nth_row,
            "The rank took every t-th row. Then the gathered columns come out in another order. "
            "Take out/t rows that are next to each other.",
        ),
        Mistake(_forward_without_gather, "These are this rank's columns of Y. Gather, so that every rank has all."),
        Mistake(
            _forward_joined_along_the_batch,
            "The shards were joined below each other. They are columns of Y: join them along the last dim.",
        ),
        Mistake(_forward_without_bias, "The bias is missing. It is cut as the columns of A are: out/t numbers a rank."),
        Mistake(
            _forward_with_rank_0s_bias,
            "Every rank added the first piece of the bias. Each needs the piece that belongs to its own columns.",
        ),
        Mistake(
            _forward_summed,
            "The shards were added up. They are different columns of Y, so they belong next to each other. "
            "(Adding up is right for the other cut, in the next notebook.)",
        ),
    ],
    hints=[
        "This rank's columns of A are rows of the stored weight: `master_weight.chunk(tp_size)[rank]`. "
        "The bias is cut the same way.",
        "`F.linear(x, weight, bias)` gives this rank's columns, [batch, out/t].",
        "`dist.all_gather(shards, y_shard)` fills a list with one tensor a rank, in rank order. "
        "Then `torch.cat(shards, dim=-1)`.",
    ],
    if_stuck="an all-gather that only some ranks call, as inside an `if rank == ...`. All ranks must call it.",
)

# -- backward ---------------------------------------------------------------------------------------------------


def my_column_backward(x, weight, grad_output):
    grad_x = grad_output @ weight  # [batch, in]: the part that went through this rank's columns
    dist.all_reduce(grad_x)  # x was used by every rank: add up all parts

    grad_weight = grad_output.T @ x  # [out/t, in]: of this rank's columns alone
    grad_bias = grad_output.sum(0)  # [out/t]
    return grad_x, grad_weight, grad_bias


def shards_in_backward(batch_size: int, input_size: int, output_size: int) -> tuple[torch.Tensor, ...]:
    """What a rank has when backward reaches the layer: all of x, its shard of the weight, its shard of dY."""
    x, master_weight, _ = whole_layer(batch_size, input_size, output_size)
    grad = torch.arange(batch_size * output_size, device=x.device).view(batch_size, output_size) % 5 + 1.0
    tp_size, rank = dist.get_world_size(), dist.get_rank()
    return x, master_weight.chunk(tp_size)[rank].clone(), grad.chunk(tp_size, dim=-1)[rank].contiguous()


def _sum_over_ranks(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def _backward_not_reduced(x, weight, grad_output):
    return grad_output @ weight, grad_output.T @ x, grad_output.sum(0)


def _backward_averaged(x, weight, grad_output):
    grad_x = _sum_over_ranks(grad_output @ weight) / dist.get_world_size()
    return grad_x, grad_output.T @ x, grad_output.sum(0)


def _backward_reduces_everything(x, weight, grad_output):
    return tuple(map(_sum_over_ranks, _backward_not_reduced(x, weight, grad_output)))


def _backward_gathered(x, weight, grad_output):
    grad_x = grad_output @ weight
    parts = [torch.empty_like(grad_x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad_x)
    return torch.cat(parts, dim=-1), grad_output.T @ x, grad_output.sum(0)


def _backward_of_a(x, weight, grad_output):
    return _sum_over_ranks(grad_output @ weight), x.T @ grad_output, grad_output.sum(0)


def _backward_with_mean_bias(x, weight, grad_output):
    return _sum_over_ranks(grad_output @ weight), grad_output.T @ x, grad_output.mean(0)


def _backward_with_bias_per_row(x, weight, grad_output):
    return _sum_over_ranks(grad_output @ weight), grad_output.T @ x, grad_output


def _reduces_dx_once(log: CommunicationLog, x, weight, grad_output) -> str | None:
    if complaint := only("all_reduce")(log):
        return complaint
    x_bytes = x.numel() * x.element_size()
    if log.total_bytes() == x_bytes:
        return None
    return f"dX has {x_bytes} bytes, and {log.total_bytes()} were reduced. One all-reduce, of dX alone, is enough."


column_backward = RankExercise(
    "column_backward",
    my_column_backward,
    cases=[(2, 2, 2, 4), (3, 2, 3, 6), (4, 3, 2, 8)],
    inputs=shards_in_backward,
    rule=_reduces_dx_once,
    mistakes=[
        Mistake(
            _backward_not_reduced,
            "The gradient of x is only what came through this rank's columns. Every rank used x: add up all parts.",
        ),
        Mistake(
            _backward_averaged,
            "The parts of dX were averaged. Averaging is for data parallelism, where each rank has a loss of its own. "
            "Here there is one loss, and dX is the sum.",
        ),
        Mistake(
            _backward_reduces_everything,
            "The gradients of weight and bias were added up over the ranks, too. Each rank has other columns: "
            "their gradients are complete as they are. Only dX is summed.",
        ),
        Mistake(
            _backward_gathered,
            "The parts of dX were joined. Each part already has the shape of x: add them up instead.",
        ),
        Mistake(
            _backward_of_a,
            "The weight's gradient is transposed: PyTorch stores the transpose of A, so it must be [out/t, in].",
        ),
        Mistake(_backward_with_mean_bias, "The bias' gradient is the sum over the batch, not the mean."),
        Mistake(
            _backward_with_bias_per_row, "The bias was added to every row of the batch: sum its gradient over them."
        ),
    ],
    hints=[
        "For Y = X Wᵀ + b: dX = dY W, dW = dYᵀ X, and db is the sum of dY over the batch. "
        "Check the shapes: they leave no other choice.",
        "Which of the three did only this rank contribute to, and to which did all ranks contribute?",
        "`dist.all_reduce(grad_x)` adds up in place. One call, for dX, is all the communication.",
    ],
    if_stuck="an all-reduce that only some ranks call, as inside an `if rank == ...`. All ranks must call it.",
)

# -- the stride rule --------------------------------------------------------------------------------------------


def my_shard(master, rank, tp_size, stride):
    chunks = master.chunk(tp_size * stride)  # e.g. t = 2, stride = 3: Q Q K K V V
    return torch.cat(chunks[rank::tp_size])  # rank 0: the first Q, the first K, the first V


def _every_nth_row(master, rank, tp_size, stride):
    return master[rank::tp_size]


def _one_block(master, rank, tp_size, stride):
    return master.chunk(tp_size)[rank]


def _one_chunk(master, rank, tp_size, stride):
    return master.chunk(tp_size * stride)[rank]


def _too_few_chunks(master, rank, tp_size, stride):
    chunks = master.chunk(stride)[rank::tp_size]
    return torch.cat(chunks) if chunks else master[:0]


def _steps_by_stride(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[rank::stride])


def _forgets_the_rank(master, rank, tp_size, stride):
    return torch.cat(master.chunk(tp_size * stride)[::tp_size])


stride_shard = Exercise(
    "stride_shard",
    my_shard,
    cases=[
        (torch.arange(12), 0, 2, 3),
        (torch.arange(12), 1, 2, 3),
        (torch.arange(12), 2, 3, 1),
        (torch.arange(24).view(12, 2), 1, 3, 2),
        (torch.arange(16), 3, 4, 2),
    ],
    mistakes=[
        Mistake(
            _every_nth_row,
            "These are strided rows, and the rule is strided chunks: cut first, then take every t-th chunk.",
        ),
        Mistake(
            _one_block,
            "This is one block of rows, as for stride 1. A fused [Q; K; V] has to be cut inside each of its parts.",
        ),
        Mistake(_one_chunk, "This is one chunk. The rank keeps `stride` of them, joined."),
        Mistake(_too_few_chunks, "There are too few chunks: cut into t * stride, so that each part is cut t ways."),
        Mistake(_steps_by_stride, "The chunks of a rank are tp_size apart, not stride apart."),
        Mistake(_forgets_the_rank, "Every rank gets the chunks of rank 0. Start at chunk number `rank`."),
    ],
    hints=[
        "Cut the rows into t * stride chunks: `master.chunk(tp_size * stride)`.",
        "With t = 2 and stride = 3 the chunks are Q Q K K V V. Which three belong to rank 1?",
        "Python's slices do it: `chunks[rank::tp_size]`. Then `torch.cat`.",
    ],
)
