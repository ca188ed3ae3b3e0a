"""Computes attention block by block, as the keys and values of all ranks come by: what ring and gathered share.

How they come is an argument, two functions (forward, backward):
- `forward(kv, group)` yields every rank and its keys and values.
- `backward(kv, group, add_gradients)` calls `add_gradients(source, kv, dkv)` for every rank's keys and values, which
  adds to dkv the gradients that this rank's queries give them. It returns the sums over all ranks for this rank's own.

Keys and values are one tensor, [2, b, h_kv, s/c, d]. Their gradients are summed in float32 or better.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from labkit.context_parallel.block import OnlineSoftmax, add_gradients
from labkit.context_parallel.positions import check_fit, part_with_work


def blockwise_attention(q, k, v, group, causal: bool, balanced: bool, forward, backward) -> torch.Tensor:
    check_fit(q, k, v, group.size(), balanced)
    return _Blockwise.apply(q, k, v, group, (causal, balanced), forward, backward)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, group, mask, forward, backward):
        ctx.group, ctx.mask, ctx.backward_of_kv = group, (q.size(-2), *mask), backward
        softmax = OnlineSoftmax(q)
        for source, kv in forward(_stack(k, v), group):
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
                add_gradients(dq, dkv, (q, out, lse), grad, kv, part)

        dkv = ctx.backward_of_kv(_stack(k, v), ctx.group, add_block)
        return dq.to(q.dtype), *dkv.to(k.dtype), None, None, None, None


def _stack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.stack([k, v]).contiguous()  # torch may stack them transposed
