"""The exercises of notebook 04: a row-parallel layer, forward and backward.

The tensor group is the whole world. The functions named my_... are the solutions; those with a leading
underscore make the typical mistakes.
"""

import torch
import torch.distributed as dist

from course.exercises.base import Mistake
from course.exercises.on_ranks import RankExercise, only, summed, whole_numbers
from labkit.communication import CommunicationLog
from labkit.groups import local_device

# -- forward ------------------------------------------------------------------------------------------------------


def my_row_forward(x, weight, bias):
    y = x @ weight.T  # this rank's part of the sum over all inputs
    dist.all_reduce(y)
    return y + bias  # after the reduction: once


def row_inputs(in_shard: int, out_size: int):
    """On each rank its shard of x [3, in/t] and of the weight [out, in/t], and the whole bias: small whole numbers."""
    rank = dist.get_rank()
    x = whole_numbers((3, in_shard), seed=rank)
    weight = whole_numbers((out_size, in_shard), seed=100 + rank)
    bias = 10 * (1 + torch.arange(out_size, dtype=torch.float32, device=local_device()))
    return x, weight, bias


def _bias_first(x, weight, bias):
    y = x @ weight.T + bias
    dist.all_reduce(y)
    return y


def _no_reduction(x, weight, bias):
    return x @ weight.T + bias


def _no_bias(x, weight, bias):
    y = x @ weight.T
    dist.all_reduce(y)
    return y


def _averaged(x, weight, bias):
    return _no_bias(x, weight, bias) / dist.get_world_size() + bias


def _gathered(x, weight, bias):
    y = x @ weight.T + bias
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=-1)


def _reduces_only_the_output(log: CommunicationLog, x, weight, bias) -> str | None:
    if complaint := only("all_reduce")(log):
        return complaint
    output_bytes = x.size(0) * weight.size(0) * x.element_size()
    if log.total_bytes() <= output_bytes:
        return None
    return f"It sends {log.total_bytes()} bytes into all-reduces. One of the output is enough: {output_bytes} bytes."


row_forward = RankExercise(
    "row_forward",
    my_row_forward,
    cases=[(2, 2, 3), (4, 1, 2)],
    inputs=row_inputs,
    rule=_reduces_only_the_output,
    mistakes=[
        Mistake(
            _bias_first,
            "The bias went in before the all-reduce. Every rank has the whole bias, so it was added t times: "
            "add it afterwards.",
        ),
        Mistake(
            _no_reduction,
            "This is one rank's part: its slice of the inputs times its slice of the weight. The output is the sum "
            "of all ranks' parts.",
        ),
        Mistake(_no_bias, "The sum is right, but the bias is missing."),
        Mistake(
            _averaged,
            "You divided by the number of ranks. Averaging is for gradients of data copies; here each rank holds "
            "other terms of one sum, and they are added.",
        ),
        Mistake(
            _gathered,
            "The parts are put side by side. That is for a column layer, whose ranks hold different outputs. Here "
            "all have the same outputs, each a part of the sum: add them.",
        ),
    ],
    hints=[
        "`weight` is stored as [out, in/t], so this rank's part is `x @ weight.T`, of shape [tokens, out].",
        "`dist.all_reduce(y)` adds up all ranks' `y`, in place. It returns None.",
        "When is the bias to be added, so that it is added once?",
    ],
    if_stuck="a collective that only some ranks call, as inside an `if rank == ...`. All ranks must call it.",
)

# -- backward -----------------------------------------------------------------------------------------------------


def my_row_backward(grad_y, x, weight):
    grad_x = grad_y @ weight  # [tokens, in/t]: this rank's slice, complete
    grad_weight = grad_y.T @ x  # [out, in/t]
    grad_bias = grad_y.sum(dim=0)  # [out]: the same on every rank, because grad_y is
    return grad_x, grad_weight, grad_bias


def row_gradient_inputs(in_shard: int, out_size: int):
    """On each rank the gradient of the whole output [3, out], the same everywhere, and its shards of x and weight."""
    x, weight, _ = row_inputs(in_shard, out_size)
    return whole_numbers((3, out_size), seed=200), x, weight


def _reduces_grad_x(grad_y, x, weight):
    grad_x, *others = my_row_backward(grad_y, x, weight)
    return summed(grad_x), *others


def _reduces_grad_y(grad_y, x, weight):
    return my_row_backward(summed(grad_y), x, weight)


def _reduces_grad_weight(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = my_row_backward(grad_y, x, weight)
    return grad_x, summed(grad_weight), grad_bias


def _reduces_grad_bias(grad_y, x, weight):
    *others, grad_bias = my_row_backward(grad_y, x, weight)
    return *others, summed(grad_bias)


def _reduces_every_gradient(grad_y, x, weight):
    return tuple(map(summed, my_row_backward(grad_y, x, weight)))


def _transposed_grad_weight(grad_y, x, weight):
    grad_x, grad_weight, grad_bias = my_row_backward(grad_y, x, weight)
    return grad_x, grad_weight.T, grad_bias


def _mean_for_the_bias(grad_y, x, weight):
    *others, _ = my_row_backward(grad_y, x, weight)
    return *others, grad_y.mean(dim=0)


def _gathers_grad_x(grad_y, x, weight):
    grad_x, *others = my_row_backward(grad_y, x, weight)
    slices = [torch.empty_like(grad_x) for _ in range(dist.get_world_size())]
    dist.all_gather(slices, grad_x)
    return torch.cat(slices, dim=-1), *others


def _sends_nothing(log: CommunicationLog, *_) -> str | None:
    return f"It calls {log.records[0].operation}. Backward of this layer needs no message at all." if log else None


row_backward = RankExercise(
    "row_backward",
    my_row_backward,
    cases=[(2, 2, 3), (4, 1, 2)],
    inputs=row_gradient_inputs,
    rule=_sends_nothing,
    mistakes=[
        Mistake(
            _reduces_grad_x,
            "You added up the gradients of x. Each rank holds *another slice* of x: its gradient is complete as it is. "
            "(The column layer must add, because there every rank uses the same x.)",
        ),
        Mistake(
            _reduces_grad_y,
            "You added up the gradient of the output first. It is the same on every rank already: all came out t "
            "times too large. Backward of an all-reduce is the identity.",
        ),
        Mistake(
            _reduces_grad_weight,
            "You added up the weight gradients. The ranks hold different slices of the weight: nothing to add.",
        ),
        Mistake(
            _reduces_grad_bias,
            "The bias gradient came out t times too large. Every rank computes the whole of it already.",
        ),
        Mistake(
            _reduces_every_gradient,
            "You added up every gradient over the ranks. That is data parallelism. Here slices are different, "
            "and what is the same is complete.",
        ),
        Mistake(_transposed_grad_weight, "The weight gradient is transposed: it has the weight's shape, [out, in/t]."),
        Mistake(_mean_for_the_bias, "The bias gradient is the sum over the tokens, not their mean."),
        Mistake(
            _gathers_grad_x,
            "The gradient of x is gathered to full width. This rank was given a slice of x, and returns the slice.",
        ),
    ],
    hints=[
        "Write the layer of one rank: y = x @ weight.T + bias, where y is summed over the ranks. The derivative of a "
        "sum by each of its terms is 1, so each rank's part gets `grad_y` as it is.",
        "From there it is an ordinary linear layer: grad_x = grad_y @ weight.",
        "grad_weight has the weight's shape [out, in/t]; grad_bias is `grad_y` summed over the tokens.",
    ],
    if_stuck="a collective that only some ranks call. Count again whether you need one at all.",
)
