"""The conjugate operators of tensor parallelism: what the forward pass does decides what backward must do.

A tensor is *replicated* when every rank of the group holds the same, *sharded* when each holds a slice,
and *partial* when the true value is the sum over the ranks. The gradient of a replicated tensor that
each rank used for its own shard is partial: hence an identity forward is an all-reduce backward, and so on.

| operator | forward | backward |
|---|---|---|
| `copy_to_tp` | identity | all-reduce |
| `reduce_from_tp` | all-reduce | identity |
| `scatter_to_tp` | own slice of the last dim | all-gather |
| `gather_from_tp` | all-gather along the last dim | own slice |
| `scatter_to_sequence` | own slice of the sequence | all-gather |
| `gather_from_sequence` | all-gather along the sequence | reduce-scatter |
| `reduce_scatter_to_sequence` | reduce-scatter along the sequence | all-gather |

All take ``(x, group)`` with ``x: [..., seq, hidden]``, leave the caller's tensor as it is, and are the
identity without communication for a group of one.

Source: arXiv 1909.08053, section 3 (f and g); arXiv 2205.05198, section 4.2 (along the sequence).
"""

import torch
import torch.distributed as dist

HIDDEN_DIM, SEQUENCE_DIM = -1, -2


def copy_to_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Hand a replicated tensor to sharded work. Forward identity, backward all-reduce ("f")."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def reduce_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up partial tensors, for replicated work. Forward all-reduce, backward identity ("g")."""
    return _Reduce.apply(x, group) if group.size() > 1 else x


def scatter_to_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's slice of the last dim of a replicated tensor: [..., h] -> [..., h/t]. Backward all-gather."""
    return _Scatter.apply(x, group, HIDDEN_DIM) if group.size() > 1 else x


def gather_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the slices of the last dim, for replicated work: [..., h/t] -> [..., h]. Backward keeps the own slice."""
    return _Gather.apply(x, group, HIDDEN_DIM) if group.size() > 1 else x


def scatter_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's slice of the sequence: [..., s, h] -> [..., s/t, h]. Backward all-gather."""
    return _Scatter.apply(x, group, SEQUENCE_DIM) if group.size() > 1 else x


def gather_from_sequence(
    x: torch.Tensor, group: dist.ProcessGroup, *, tensor_parallel_output_grad: bool = True
) -> torch.Tensor:
    """Join the slices of the sequence: [..., s/t, h] -> [..., s, h].

    For sharded work, whose input gradient is partial: backward is a reduce-scatter. Before replicated work (a
    loss on the whole sequence, computed by all), say ``tensor_parallel_output_grad=False``, and backward keeps
    the own slice; else gradients come out t times too large.
    """
    if group.size() == 1:
        return x
    if tensor_parallel_output_grad:
        return _GatherForShardedWork.apply(x, group, SEQUENCE_DIM)
    return _Gather.apply(x, group, SEQUENCE_DIM)


def reduce_scatter_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up partial tensors and keep a slice of the sequence: [..., s, h] -> [..., s/t, h]. Backward all-gather."""
    return _ReduceScatter.apply(x, group, SEQUENCE_DIM) if group.size() > 1 else x


# -- forward and backward, side by side -----------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return own_slice(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return own_slice(grad, ctx.group, ctx.dim), None, None


class _GatherForShardedWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group, ctx.dim), None, None


# -- the communication under them: out of place, along any dim, right on strided tensors ------------------------

# torch 2.13 renamed the forms that take one tensor and warns about the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' x, in a new tensor. (gloo adds the wrong elements of a strided one.)"""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """All ranks' x, joined along ``dim`` in the order of the group."""
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's slice along ``dim`` of the sum of all ranks' x."""
    mine, travelling = start_reduce_scatter(x, group, dim)
    travelling.wait()
    return mine


def start_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> tuple[torch.Tensor, dist.Work]:
    """The same, under way: the slice is there when the handle's ``wait()`` returns."""
    pieces = torch.cat(_slices(x, group, dim))  # one below the other: as a list gloo would reduce them one by one
    mine = torch.empty_like(pieces[: len(pieces) // group.size()])
    travelling = reduce_scatter_single(mine, pieces, group=group, async_op=True)
    assert travelling is not None  # this rank is in the group
    return mine, travelling


def own_slice(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's slice of x along ``dim``, in memory of its own."""
    return _slices(x, group, dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _slices(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> tuple[torch.Tensor, ...]:
    size, pieces = x.size(dim), group.size()
    if size % pieces:
        raise ValueError(
            f"a group of {pieces} does not divide dim {dim} of size {size}: "
            f"use a size of {max(size // pieces, 1) * pieces} or {(size // pieces + 1) * pieces}"
        )
    return x.split(size // pieces, dim)
