"""Defines the operators of tensor parallelism: one communication in forward, its *conjugate* in
backward.

A tensor is *replicated* if every rank of the group has the same values, *sharded* if each has a
slice, and *partial* if the true value is the sum over the ranks.

The conjugate is what the chain rule asks for: a copy in forward is a sum in backward, and a sum is
a copy. If each rank multiplies a replicated x by its own shard of a weight, it gets only a part of
x's gradient. The parts must be added up, so an identity in forward is an all-reduce in backward.
The table of operators is at the end of this file.

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
    """Applies one function of ``(tensor, group, *last_args)`` to x in forward, and another to the
    gradient in backward.

    Call it with ``(x, group)``, ``x: [..., seq, hidden]``; x is not modified. In a group of one it
    returns x itself.
    """

    forward: Callable[..., torch.Tensor]
    backward: Callable[..., torch.Tensor]
    last_args: tuple[int, ...] = ()  # of both functions: (dim,), or () for those without a dim

    def __call__(self, x: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return _Apply.apply(x, self, group) if group.size() > 1 else x


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, operator, group):
        ctx.operator = operator
        ctx.group = group
        return operator.forward(x, group, *operator.last_args)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x = ctx.operator.backward(grad, ctx.group, *ctx.operator.last_args)
        return grad_x, None, None


# -- collectives and slices: out of place, any dim, non-contiguous tensors too ---------------------


def identity(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a view of x: a tensor, and an autograd node, of its own."""
    return x.view_as(x)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' x, in a new tensor, because x may be in use elsewhere
    (Megatron-LM reduces in place).

    It is contiguous: NCCL takes no other, and gloo reduces non-contiguous tensors wrongly.
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
    """Start to gather all ranks' x, ``[t, *x.shape]``.

    Returns at once. Read the result, or change x, only after ``work.wait()``.
    """
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
    """Start a `reduce_scatter`: read the result only after ``work.wait()``."""
    stacked = torch.cat(_slices(x, group, dim))  # one tensor: gloo would reduce a list one by one
    slice_length = len(stacked) // group.size()
    local = torch.empty_like(stacked[:slice_length])
    work = reduce_scatter_single(local, stacked, group=group, async_op=True)
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
#                              (x         -> output)       (arriving  -> returned)
# copy_to_tp                   replicated -> replicated    partial    -> replicated
# reduce_from_tp               partial    -> replicated    replicated -> replicated
# scatter_to_tp                replicated -> sharded       sharded    -> replicated
# scatter_to_sequence          replicated -> sharded       sharded    -> replicated
# gather_from_tp               sharded    -> replicated    replicated -> sharded
# gather_from_sequence         sharded    -> replicated    partial    -> sharded
# reduce_scatter_to_sequence   partial    -> sharded       sharded    -> replicated
#
# gather_from_sequence feeds sharded work, whose gradients are partial; gather_from_tp feeds
# replicated work. At the end of a row below: what becomes of x [..., s, h] in forward.
#
# If the whole x, not a shard of it, has n bytes, a rank of a ring of t sends (t - 1)/t n in an
# all-gather or a reduce-scatter, twice that in an all-reduce, nothing in identity and local_slice.
# Along the sequence, x [batch, seq, hidden] is copied before or after the message, so that the
# ranks' slices stand one after the other. Megatron-LM's [seq, batch, hidden] needs no copy.
#
# Letters: 1909.08053 has f and g; in 2205.05198 g and g-bar are the pair of the sequence, and the
# first paper's g is called f-bar. Megatron-LM: copy_to_tensor_model_parallel_region and so on.
HIDDEN = (HIDDEN_DIM,)
SEQUENCE = (SEQUENCE_DIM,)

# fmt: off
#                                     forward         backward
copy_to_tp                 = Operator(identity,       all_reduce)                # f
reduce_from_tp             = Operator(all_reduce,     identity)                  # g, later f-bar
scatter_to_tp              = Operator(local_slice,    all_gather,     HIDDEN)    # h -> h/t
gather_from_tp             = Operator(all_gather,     local_slice,    HIDDEN)    # h/t -> h
scatter_to_sequence        = Operator(local_slice,    all_gather,     SEQUENCE)  # s -> s/t
gather_from_sequence       = Operator(all_gather,     reduce_scatter, SEQUENCE)  # s/t -> s, g
reduce_scatter_to_sequence = Operator(reduce_scatter, all_gather,     SEQUENCE)  # s -> s/t, g-bar
# fmt: on
