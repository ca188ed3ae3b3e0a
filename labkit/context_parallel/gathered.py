"""Gathered attention: every rank gets all keys and values by one all-gather, then works on its own queries.

The blocks are those of the ring, but nothing travels while a rank computes, and for a while it holds the keys and
values of the whole sequence. With few kv heads they are small, and one large message is fast. Backward gathers again,
so that nothing long is kept, and reduce-scatters the gradients, in float32 or better.

Source: arXiv 2407.21783 (Llama 3), section 3.3.2.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from labkit.communication import reduce_scatter_single
from labkit.context_parallel.block import Attended, add_gradients, together
from labkit.context_parallel.positions import check_fit, part_with_work


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, *, causal=True, balanced=True
) -> torch.Tensor:
    """Return what whole attention gives to this rank's queries; all arguments and errors as in `ring_attention`."""
    check_fit(q, k, v, group.size(), balanced)
    return _Gathered.apply(q, k, v, group, causal, balanced)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, group, causal, balanced):
        ctx.group, ctx.mask = group, (q.size(-2), causal, balanced)
        attended = Attended(q)
        for source, kv in enumerate(_gather(together(k, v), group)):
            if part := part_with_work(group.rank(), source, *ctx.mask):
                attended.add(q, kv, part)
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, attended.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        everyones = _gather(together(k, v), ctx.group)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = torch.zeros(len(everyones), 2, *k.shape, dtype=lse.dtype, device=k.device)
        for source, kv in enumerate(everyones):
            if part := part_with_work(ctx.group.rank(), source, *ctx.mask):
                add_gradients(dq, dkv[source], (q, out, lse), grad, kv, part)
        return dq.to(q.dtype), *_reduce_scatter(dkv, ctx.group).to(k.dtype), None, None, None


def _gather(kv: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the keys and values of every rank, [2, b, h_kv, s/c, d] each."""
    if group.size() == 1:
        return [kv]
    everyones = [torch.empty_like(kv) for _ in range(group.size())]
    dist.all_gather(everyones, kv, group=group)
    return everyones


def _reduce_scatter(dkv: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of all ranks' gradients for this rank's keys and values: [c, 2, ...] -> [2, ...]."""
    if group.size() == 1:
        return dkv[0]
    mine = torch.empty_like(dkv[0])
    reduce_scatter_single(mine, dkv.flatten(0, 1), group=group)
    return mine
