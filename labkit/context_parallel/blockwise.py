"""Computes attention block by block as the keys and values of all ranks arrive, from a ring or from
an all-gather.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from labkit.autograd import first_derivative_only, refuse_autocast
from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.context_parallel.block import attend, attend_backward, sum_dtype
from labkit.context_parallel.positions import Part, check_fit, part_with_work


class OnlineSoftmax:
    """Attention over the keys so far: ``out`` [b, h, n, d] and ``lse`` [b, h, n, 1], which starts
    at -inf.
    """

    def __init__(self, q: torch.Tensor):
        self.out = torch.zeros_like(q, dtype=sum_dtype(q), memory_format=torch.contiguous_format)
        self.lse = torch.full_like(self.out[..., :1], -math.inf)

    def add(self, q: torch.Tensor, kv: torch.Tensor, part: Part) -> None:
        """Merge in this part of a block; kv: [2, b, h_kv, m, d]."""
        k, v = kv[..., part.keys, :]
        block_out, block_lse = attend(q[..., part.queries, :], k, v, part.causal)
        out = self.out[..., part.queries, :]
        lse = self.lse[..., part.queries, :]
        # The block's share of the weight: exp(block_lse) / (exp(block_lse) + exp(lse))
        share = torch.sigmoid(block_lse - lse)
        out.lerp_(block_out, share)
        lse.copy_(torch.logaddexp(lse, block_lse))


def blockwise_attention(
    q, k, v, group, causal: bool, zigzag: bool, kv_of_ranks, kv_gradients
) -> torch.Tensor:
    """Return attention of this rank's queries to all keys; errors and other arguments as in
    `ring_attention`.

    Args:
        kv_of_ranks: ``(kv, group)`` yields each rank with its keys and values, stacked
            [2, b, h_kv, s/c, d].
        kv_gradients: ``(kv, group, add_block)`` returns the gradient of this rank's kv, summed over
            all ranks. It calls ``add_block(source, kv, dkv)`` for each rank's kv, which adds the
            gradient from this rank's queries to dkv.
    """
    refuse_autocast("attention over a context-parallel group", q.device)
    check_fit(q, k, v, group.size(), zigzag)
    out: Any = _Blockwise.apply(q, k, v, group, causal, zigzag, kv_of_ranks, kv_gradients)
    return out


class _Blockwise(torch.autograd.Function):
    """softmax(Q K^T) V for this rank's Q, over the keys and values of all ranks.

    Communication, if a rank's keys and values have n bytes; queries and outputs stay where they
    are:

    - forward: each rank's keys and values get to all others; a rank sends (c - 1) n.
    - backward: they are not kept, so they are sent again, (c - 1) n. Then each rank has a part of
      the gradient of all keys and values, and their sums get to the ranks that these come from:
      (c - 1) n bytes, or c n around a ring. In bfloat16 it is twice as many, as gradients are
      summed and sent in float32.

    ``kv_of_ranks`` and ``kv_gradients`` decide the way: a ring, or one all-gather and one
    reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, group, causal, zigzag, kv_of_ranks, kv_gradients):
        ctx.group = group
        ctx.mask = q.size(-2), causal, zigzag
        ctx.kv_gradients = kv_gradients
        softmax = OnlineSoftmax(q)
        local_kv = torch.stack([k, v]).contiguous()  # stack may return a transposed layout
        for source, kv in kv_of_ranks(local_kv, group):
            if part := part_with_work(group.rank(), source, *ctx.mask):
                softmax.add(q, kv, part)
        out = softmax.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, softmax.lse)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def add_block(source: int, kv: torch.Tensor, dkv: torch.Tensor) -> None:
            part = part_with_work(ctx.group.rank(), source, *ctx.mask)
            if part is None:
                return
            rows = (..., part.queries, slice(None))
            keys = (..., part.keys, slice(None))
            block_k, block_v = kv[keys]
            gradients = attend_backward(
                grad[rows], q[rows], block_k, block_v, out[rows], lse[rows], part.causal
            )
            totals = (dq[rows], *dkv[keys])  # views: the sums stay in dq and dkv
            for total, gradient in zip(totals, gradients):
                total += gradient

        dkv = ctx.kv_gradients(torch.stack([k, v]).contiguous(), ctx.group, add_block)
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None, None, None, None


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal=True,
    zigzag=True,
) -> torch.Tensor:
    """Return attention of this rank's queries to all keys; arguments and errors as in
    `ring_attention`.

    Each rank gathers the keys and values of the whole sequence, which are small with few kv heads.
    Backward gathers them again, and reduce-scatters their gradients in float32 or better. Each of
    these three collectives sends (c - 1)/c of 2 b h_kv s d numbers; queries and outputs stay.
    Source: arXiv 2407.21783 (Llama 3), section 3.3.2.
    """
    return blockwise_attention(q, k, v, group, causal, zigzag, _gather, _reduce_scatter)


def _gather(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    if group.size() == 1:
        return enumerate([kv])
    # Into one tensor: torch would gather a list into a hidden one, and copy it out.
    kv_of_ranks = kv.new_empty(group.size(), *kv.shape)
    all_gather_single(kv_of_ranks.flatten(0, 1), kv, group=group)
    return enumerate(kv_of_ranks)


def _reduce_scatter(
    local_kv: torch.Tensor, group: dist.ProcessGroup, add_block: Callable
) -> torch.Tensor:
    sizes = (group.size(), *local_kv.shape)
    dkv = torch.zeros(sizes, dtype=sum_dtype(local_kv), device=local_kv.device)
    for source, kv in _gather(local_kv, group):
        add_block(source, kv, dkv[source])
    if group.size() == 1:
        return dkv[0]
    local_dkv = torch.empty_like(dkv[0])
    reduce_scatter_single(local_dkv, dkv.flatten(0, 1), group=group)
    return local_dkv
