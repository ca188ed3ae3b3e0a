"""The exercises of notebook 04: a row-parallel layer, forward and backward. The tensor group is the whole world."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from course.communication import CommunicationLog
from course.exercises.on_ranks import Conduct, RankExercise, gathered, only, own, summed, whole_numbers
from labkit.groups import local_device

# -- forward ------------------------------------------------------------------------------------------------------


def my_row_forward(x, weight, bias):
    y = x @ weight.T  # this rank's part of the sum over all inputs
    dist.all_reduce(y)
    return y + bias  # after the reduction: once


def row_inputs(in_shard: int, out_size: int):
    """Return, in small whole numbers, a rank's shards of x [3, in/t] and weight [out, in/t], and all of the bias."""
    rank = dist.get_rank()
    x = whole_numbers((3, in_shard), seed=rank)
    weight = whole_numbers((out_size, in_shard), seed=100 + rank)
    bias = 10 * (1 + torch.arange(out_size, dtype=torch.float32, device=local_device()))
    return x, weight, bias


def reduces_only_the_output(log: CommunicationLog, x, weight, bias) -> str | None:
    output_bytes = x.size(0) * weight.size(0) * x.element_size()
    if log.total_bytes() <= output_bytes:
        return None
    return f"It sends {log.total_bytes()} bytes into all-reduces. One of the output is enough: {output_bytes} bytes."


row_forward = RankExercise(
    "row_forward",
    my_row_forward,
    notebook="04",
    cases=[(2, 2, 3), (4, 1, 2)],
    inputs=row_inputs,
    rule=only("all_reduce", also=reduces_only_the_output),
    hints=[
        "`weight` is stored as [out, in/t], so this rank's part is `x @ weight.T`, of shape [tokens, out].",
        "`dist.all_reduce(y)` adds up all ranks' `y`, in place. It returns None.",
        "When must the bias be added, so that it is added once?",
    ],
)


def output_from(x, weight, bias, output: Callable, of=lambda x, weight: x @ weight.T) -> torch.Tensor:
    """Return ``output(y, bias)`` of this rank's part y of the sum."""
    return output(of(x, weight), bias)


SIDE_BY_SIDE = (
    "The parts are put side by side. That is for a column layer, whose ranks hold different outputs. Here all ranks "
    "have the same outputs, each a part of the sum: add them."
)
row_forward.mistakes_of(
    output_from,
    (
        dict(output=lambda y, bias: summed(y + bias)),
        "The bias went in before the all-reduce. Every rank has the whole bias, so it was added t times: add it after.",
    ),
    (
        dict(output=lambda y, bias: y + bias),
        "This is one rank's part: its slice of the inputs times its slice of the weight. The output is the sum of all "
        "ranks' parts.",
    ),
    (dict(output=lambda y, bias: summed(y)), "The sum is right, but the bias is missing."),
    (
        dict(output=lambda y, bias: summed(y) / dist.get_world_size() + bias),
        "You divided by the number of ranks. Averaging is for gradients of data-parallel replicas. Here each rank "
        "holds different terms of one sum, and they are added.",
    ),
    (dict(output=lambda y, bias: gathered(y + bias, dim=-1)), SIDE_BY_SIDE),
    (dict(output=lambda y, bias: gathered(y, dim=-1) + bias), SIDE_BY_SIDE),
    (dict(output=lambda y, bias: summed(y) + own(bias)), "The bias was cut. Outputs are whole here, so it is too."),
    (
        dict(output=torch.add, of=lambda x, weight: own(x, -1) @ weight.T),
        "x was cut again: it comes as [tokens, in/t].",
    ),
    (dict(output=torch.add, of=torch.matmul), "The weight is stored as [out, in/t]: multiply by its transpose."),
    (
        dict(output=torch.add, of=lambda x, weight: summed(x) @ weight.T),
        "The inputs were added up. They are different slices: multiply each by its slice of the weight, and add that.",
    ),
)


# -- backward -----------------------------------------------------------------------------------------------------


def my_row_backward(grad_y, x, weight):
    grad_x = grad_y @ weight  # [tokens, in/t]: this rank's slice, complete
    grad_weight = grad_y.T @ x  # [out, in/t]
    grad_bias = grad_y.sum(dim=0)  # [out]: the same on every rank, because grad_y is
    return grad_x, grad_weight, grad_bias


def row_gradient_inputs(in_shard: int, out_size: int):
    """Return the gradient of the whole output [3, out], the same on every rank, and a rank's shards of x and weight."""
    x, weight, _ = row_inputs(in_shard, out_size)
    return whole_numbers((3, out_size), seed=200), x, weight


def sends_nothing(log: Conduct, *_) -> str | None:
    if log.kept:
        return "It uses autograd. Write the three gradients by hand."
    return f"It calls {log.records[0].operation}. Backward of this layer needs no message at all." if log else None


row_backward = RankExercise(
    "row_backward",
    my_row_backward,
    notebook="04",
    cases=[(2, 2, 3), (4, 1, 2)],
    inputs=row_gradient_inputs,
    rule=sends_nothing,
    hints=[
        "Write the layer of one rank: y = x @ weight.T + bias, where y is summed over the ranks. The derivative of a "
        "sum with respect to each of its terms is 1, so each rank's part gets `grad_y` as it is.",
        "From there it is an ordinary linear layer: grad_x = grad_y @ weight.",
        "grad_weight has the weight's shape [out, in/t]; grad_bias is `grad_y` summed over the tokens.",
    ],
    if_stuck="a collective that only some ranks call. Think again whether you need one at all.",
)


SLICES_ARE_COMPLETE = "You added up the weight gradients. The ranks hold different slices: there is nothing to add."
row_backward.mistakes_in(
    (
        0,
        summed,
        "You added up the gradients of x. Each rank holds *a different slice* of x: its gradient is complete as it is. "
        "(The column layer must add, because there every rank uses the same x.)",
    ),
    (1, summed, SLICES_ARE_COMPLETE),
    (2, summed, "The bias gradient came out t times too large. Every rank already computes the whole of it."),
    (2, lambda bias: bias / dist.get_world_size(), "You divided the bias gradient. Each rank has the whole of it."),
    (2, lambda bias: bias / 3, "The bias gradient is the sum over the tokens, not their mean."),
    (1, torch.t, "The weight gradient is transposed: it has the weight's shape, [out, in/t]."),
    (
        0,
        lambda grad_x: gathered(grad_x, dim=-1),
        "The gradient of x is gathered to full width. This rank was given a slice of x: return its gradient.",
    ),
)


row_backward.mistakes_of(
    lambda grad_y, x, weight, of: my_row_backward(of(grad_y), x, weight),
    (
        dict(of=summed),
        "You added up the gradient of the output first. It is already the same on every rank, so everything came out t "
        "times too large. Backward of an all-reduce is the identity.",
    ),
    (dict(of=lambda dy: own(dy, -1)), "You cut grad_y. Every rank's part of the sum has all columns: use it as it is."),
)
row_backward.mistakes_of(
    lambda grad_y, x, weight, grad_bias: (*my_row_backward(grad_y, x, weight)[:2], grad_bias(grad_y)),
    (dict(grad_bias=lambda dy: dy), "The bias was added to each token: sum its gradient over the tokens."),
    (dict(grad_bias=lambda dy: dy.sum(1)), "The bias gradient was summed over the outputs. Sum over tokens, dim 0."),
    (dict(grad_bias=torch.sum), "The bias gradient was summed over everything: sum over the tokens, dim 0."),
)
