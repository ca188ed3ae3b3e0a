"""Defines the conjugate operators of tensor parallelism: one collective in forward, its conjugate
in backward.

A tensor is *replicated* if every rank of the group has the same values, *sharded* if each has a
slice, and *partial* if the true value is the sum over the ranks. If each rank uses a replicated
tensor for its own shard, the gradient is partial: so an identity in forward is an all-reduce in
backward. The table of operators is at the end of this file.

Source: arXiv 1909.08053, section 3 (f and g); arXiv 2205.05198, section 4.2 (along the sequence).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.autograd import first_derivative_only
from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.partition import check_divides

HIDDEN_DIM = -1
SEQUENCE_DIM = -2


class Operator(NamedTuple):
    """Applies one function of ``(tensor, group, *dim)`` to x in forward, and another to the
    gradient in backward.

    Call it with ``(x, group)``, ``x: [..., seq, hidden]``; x is not modified. In a group of one it
    returns x itself.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., torch.Tensor]
    dim: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return _Apply.apply(x, self, group) if group.size() > 1 else x


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, operator, group):
        ctx.operator = operator
        ctx.group = group
        return operator.forward(x, group, *operator.dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.operator.backward(grad, ctx.group, *ctx.operator.dim), None, None


# -- collectives and slices: out of place, any dim, strided tensors too ----------------------------


def identity(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a view of x: a tensor, and an autograd node, of its own."""
    return x.view_as(x)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' x.

    The copy is contiguous: gloo reduces strided tensors wrongly.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return all ranks' x, concatenated along ``dim`` in the order of the group."""
    shards, work = start_all_gather(x, group)
    work.wait()
    return torch.cat(shards.unbind(), dim)


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start to gather all ranks' x, ``[t, *x.shape]``: valid after ``work.wait()``."""
    shards = x.new_empty(group.size(), *x.shape)
    flat = shards.flatten(0, 1)  # a view: torch wants the ranks' tensors one after the other
    work = all_gather_single(flat, x.contiguous(), group=group, async_op=True)
    return shards, work


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of the sum of all ranks' x."""
    local, work = start_reduce_scatter(x, group, dim)
    work.wait()
    return local


def start_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> tuple[torch.Tensor, dist.Work]:
    """Start a `reduce_scatter`; the result is valid after ``work.wait()``."""
    slices = torch.cat(_slices(x, group, dim))  # one tensor: gloo would reduce a list one by one
    local = torch.empty_like(slices[: len(slices) // group.size()])
    work = reduce_scatter_single(local, slices, group=group, async_op=True)
    return local, work


def local_slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return a copy of this rank's slice of x along ``dim``."""
    return _slices(x, group, dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _slices(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> tuple[torch.Tensor, ...]:
    if x.size(dim):  # an empty dim can always be split
        check_divides(group.size(), f"x.size({dim})", x.size(dim), parts_name="group.size()")
    return x.tensor_split(group.size(), dim)


# -- the operators ---------------------------------------------------------------------------------

#                              the value in forward        its gradient in backward
# copy_to_tp                   replicated -> replicated    partial    -> replicated
# reduce_from_tp               partial    -> replicated    replicated -> replicated
# scatter_to_tp, _sequence     replicated -> sharded       sharded    -> replicated
# gather_from_tp               sharded    -> replicated    replicated -> sharded
# gather_from_sequence         sharded    -> replicated    partial    -> sharded
# reduce_scatter_to_sequence   partial    -> sharded       sharded    -> replicated
#
# gather_from_sequence feeds sharded work, whose gradients are partial; gather_from_tp feeds
# replicated work. At the end of a row below: what becomes of x [..., s, h] in forward.
#
# What a rank sends, of x with n bytes before it is cut or after it is gathered: an all-gather or a
# reduce-scatter (t - 1)/t n, an all-reduce twice that; identity and local_slice send nothing.
HIDDEN = (HIDDEN_DIM,)
SEQUENCE = (SEQUENCE_DIM,)

# fmt: off
#                                     forward         backward
copy_to_tp                 = Operator(identity,       all_reduce)                # "f" in the paper
reduce_from_tp             = Operator(all_reduce,     identity)                  # "g" in the paper
scatter_to_tp              = Operator(local_slice,    all_gather,     HIDDEN)    # h -> h/t
gather_from_tp             = Operator(all_gather,     local_slice,    HIDDEN)    # h/t -> h
scatter_to_sequence        = Operator(local_slice,    all_gather,     SEQUENCE)  # s -> s/t
gather_from_sequence       = Operator(all_gather,     reduce_scatter, SEQUENCE)  # s/t -> s
reduce_scatter_to_sequence = Operator(reduce_scatter, all_gather,     SEQUENCE)  # s -> s/t
# fmt: on
