"""Computes attention block by block, as the keys and values of all ranks come by: what ring and gathered share."""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from labkit.context_parallel.block import attend, attend_backward, sum_dtype
from labkit.context_parallel.positions import Part, check_fit, part_with_work


class OnlineSoftmax:
    """What queries have seen so far: ``out`` [b, h, n, d], and ``lse`` [b, h, n, 1], which is -inf before any key."""

    def __init__(self, q: torch.Tensor):
        self.out = torch.zeros_like(q, dtype=sum_dtype(q), memory_format=torch.contiguous_format)
        self.lse = torch.full_like(self.out[..., :1], -math.inf)

    def add(self, q: torch.Tensor, kv: torch.Tensor, part: Part) -> None:
        """Merge in what this part of the block gives; kv: [2, b, h_kv, m, d]."""
        k, v = kv[..., part.keys, :]
        block_out, block_lse = attend(q[..., part.queries, :], k, v, part.causal)
        out, lse = self.out[..., part.queries, :], self.lse[..., part.queries, :]
        out.lerp_(block_out, torch.sigmoid(block_lse - lse))  # sigmoid: the block's share of the weight
        lse.copy_(torch.logaddexp(lse, block_lse))


def blockwise_attention(q, k, v, group, causal: bool, balanced: bool, kv_of_ranks, kv_gradients) -> torch.Tensor:
    """Return what whole attention gives to this rank's queries; errors and other arguments as in `ring_attention`.

    Keys and values are one tensor, [2, b, h_kv, s/c, d], in what says how they come:

    Args:
        kv_of_ranks: ``(kv, group)`` yields every rank and its keys and values.
        kv_gradients: ``(kv, group, add_block)`` calls ``add_block(source, kv, dkv)``, which adds to dkv what this
            rank's queries give, for every rank's keys and values. It returns the sum over all ranks for its own.
    """
    check_fit(q, k, v, group.size(), balanced)
    return _Blockwise.apply(q, k, v, group, causal, balanced, kv_of_ranks, kv_gradients)  # pyright: ignore[reportReturnType]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, group, causal, balanced, kv_of_ranks, kv_gradients):
        ctx.group, ctx.mask, ctx.kv_gradients = group, (q.size(-2), causal, balanced), kv_gradients
        softmax = OnlineSoftmax(q)
        for source, kv in kv_of_ranks(torch.stack([k, v]).contiguous(), group):  # torch may stack them transposed
            if part := part_with_work(group.rank(), source, *ctx.mask):
                softmax.add(q, kv, part)
        out = softmax.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, softmax.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)

        def add_block(source: int, kv: torch.Tensor, dkv: torch.Tensor) -> None:
            if part := part_with_work(ctx.group.rank(), source, *ctx.mask):
                rows, keys = (..., part.queries, slice(None)), (..., part.keys, slice(None))
                block_k, block_v = kv[keys]
                totals = dq[rows], *dkv[keys]
                gradients = attend_backward(grad[rows], q[rows], block_k, block_v, out[rows], lse[rows], part.causal)
                for total, gradient in zip(totals, gradients):
                    total += gradient

        dkv = ctx.kv_gradients(torch.stack([k, v]).contiguous(), ctx.group, add_block)
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None, None, None, None
