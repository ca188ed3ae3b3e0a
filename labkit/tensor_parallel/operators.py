"""Defines the conjugate operators of tensor parallelism: forward decides what backward must do.

A tensor is *replicated* when every rank of the group holds the same, *sharded* when each holds a slice,
and *partial* when the true value is the sum over the ranks. The gradient of a replicated tensor that
each rank used for its own shard is partial. So an identity in forward is an all-reduce in backward, and so on.

| operator | forward | backward |
|---|---|---|
| `copy_to_tp` | identity | all-reduce |
| `reduce_from_tp` | all-reduce | identity |
| `scatter_to_tp` | own slice of the last dim | all-gather |
| `gather_from_tp` | all-gather along the last dim | own slice |
| `scatter_to_sequence` | own slice of the sequence | all-gather |
| `gather_from_sequence` | all-gather along the sequence | reduce-scatter |
| `reduce_scatter_to_sequence` | reduce-scatter along the sequence | all-gather |

All take ``(x, group)`` with ``x: [..., seq, hidden]`` and leave the caller's tensor as it is. In a group of one they
return x and send nothing.

Source: arXiv 1909.08053, section 3 (f and g); arXiv 2205.05198, section 4.2 (along the sequence).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.communication import all_gather_single, reduce_scatter_single
from labkit.partition import check_divides

HIDDEN_DIM, SEQUENCE_DIM = -1, -2


def copy_to_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Hand a replicated tensor to sharded work: identity forward, all-reduce backward ("f" in the paper)."""
    return _operator(x, group, forward=identity, backward=all_reduce)


def reduce_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up partial tensors for replicated work: all-reduce forward, identity backward ("g" in the paper)."""
    return _operator(x, group, forward=all_reduce, backward=identity)


def scatter_to_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's slice of the last dim of a replicated tensor: [..., h] -> [..., h/t]."""
    return _operator(x, group, HIDDEN_DIM, forward=own_slice, backward=all_gather)


def gather_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the slices of the last dim for replicated work: [..., h/t] -> [..., h]."""
    return _operator(x, group, HIDDEN_DIM, forward=all_gather, backward=own_slice)


def scatter_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's slice of the sequence of a replicated tensor: [..., s, h] -> [..., s/t, h]."""
    return _operator(x, group, SEQUENCE_DIM, forward=own_slice, backward=all_gather)


def gather_from_sequence(
    x: torch.Tensor, group: dist.ProcessGroup, *, tensor_parallel_output_grad: bool = True
) -> torch.Tensor:
    """Join the slices of the sequence: [..., s/t, h] -> [..., s, h].

    Sharded work after it leaves a partial gradient, so backward is a reduce-scatter. Before replicated work (every rank
    computes the loss of the whole sequence) that would make gradients t times too large: with
    ``tensor_parallel_output_grad=False`` backward keeps this rank's slice.
    """
    backward = reduce_scatter if tensor_parallel_output_grad else own_slice
    return _operator(x, group, SEQUENCE_DIM, forward=all_gather, backward=backward)


def reduce_scatter_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up partial tensors and keep this rank's slice of the sequence: [..., s, h] -> [..., s/t, h]."""
    return _operator(x, group, SEQUENCE_DIM, forward=reduce_scatter, backward=all_gather)


def _operator(x: torch.Tensor, group: dist.ProcessGroup, *dim: int, forward: Callable, backward: Callable) -> Any:
    return _Conjugate.apply(x, forward, backward, group, *dim) if group.size() > 1 else x


class _Conjugate(torch.autograd.Function):
    """Calls one function of ``(tensor, group, *dim)`` on x in forward, and another on the gradient in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward, *where):
        ctx.functions, ctx.where = (backward, forward), where
        return forward(x, *where)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        # itself such a function, so that a gradient can be differentiated again
        return _Conjugate.apply(grad, *ctx.functions, *ctx.where), None, None, *(None for _ in ctx.where)


# -- what they are made of: out of place, along any dim, right on strided tensors -------------------------------


def identity(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x, as a new view that has a place of its own in the graph."""
    return x.view_as(x)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' x in a new, contiguous tensor: of a strided one gloo adds the wrong elements."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return all ranks' x, joined along ``dim`` in the order of the group."""
    shards, work = start_all_gather(x, group)
    work.wait()
    return torch.cat(shards.unbind(), dim)


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Start to gather all ranks' x, [t, *x.shape]: they are there when ``wait()`` of the handle returns."""
    shards = x.new_empty(group.size(), *x.shape)
    return shards, all_gather_single(shards.flatten(0, 1), x.contiguous(), group=group, async_op=True)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of the sum of all ranks' x."""
    mine, work = start_reduce_scatter(x, group, dim)
    work.wait()
    return mine


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> tuple[torch.Tensor, dist.Work]:
    """Start a `reduce_scatter`: the slice is filled when ``wait()`` of the handle returns."""
    slices = torch.cat(_slices(x, group, dim))  # one tensor: gloo would reduce a list one by one
    mine = torch.empty_like(slices[: len(slices) // group.size()])
    return mine, reduce_scatter_single(mine, slices, group=group, async_op=True)


def own_slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return a copy of this rank's slice of x along ``dim``."""
    return _slices(x, group, dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _slices(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> tuple[torch.Tensor, ...]:
    if x.size(dim):  # an empty dim has any number of slices
        check_divides(group.size(), f"x.size({dim})", x.size(dim), parts_name="group.size()")
    return x.tensor_split(group.size(), dim)
