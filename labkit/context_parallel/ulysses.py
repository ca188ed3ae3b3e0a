"""Computes attention after an all-to-all that shards the heads instead of the sequence (Ulysses).

    [batch, heads, seq/c, head_size]   -- all-to-all -->   [batch, heads/c, seq, head_size]

Every rank then has the whole sequence for its own heads, so any attention kernel works, and the work is balanced
whatever the mask. Queries, keys, values and the output each take one all-to-all forward and one backward, which send
(c - 1)/c of the tensor. c is at most the number of kv heads. Source: arXiv 2309.14509 (DeepSpeed Ulysses).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.context_parallel.positions import check_fit, positions
from labkit.partition import check_divides

HEADS_DIM, SEQUENCE_DIM = 1, 2


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, *, causal=True, balanced=True
) -> torch.Tensor:
    """Return attention of this rank's queries to all keys; arguments and errors as in `ring_attention`.

    c must also divide the heads and the kv heads. ``balanced`` only says which tokens the ranks hold: the causal mask
    needs them in order.
    """
    c = group.size()
    check_fit(q, k, v, c, balanced)
    check_divides(c, "num_heads", q.size(HEADS_DIM), parts_name="cp_size")
    check_divides(c, "num_kv_heads", k.size(HEADS_DIM), parts_name="cp_size")
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=q.size(1) != k.size(1))
    q, k, v = (_all_to_all(x, group, HEADS_DIM, SEQUENCE_DIM) for x in (q, k, v))  # [b, h/c, s, d]
    if not balanced or c == 1:
        out = attend(q, k, v)
    else:
        order = torch.cat([positions(q.size(SEQUENCE_DIM), c, rank) for rank in range(c)]).to(q.device)
        q, k, v = (x.index_select(SEQUENCE_DIM, order.argsort()) for x in (q, k, v))
        out = attend(q, k, v).index_select(SEQUENCE_DIM, order)
    return _all_to_all(out, group, SEQUENCE_DIM, HEADS_DIM)  # [b, h, s/c, d]


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Any:
    """Send each rank its chunk along ``split_dim``, and concatenate the chunks received along ``join_dim``."""
    return _AllToAll.apply(x, group, split_dim, join_dim) if group.size() > 1 else x


class _AllToAll(torch.autograd.Function):
    """An all-to-all, whose backward is the inverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, x, group, split_dim, join_dim):
        ctx.inverse = group, join_dim, split_dim
        send_buffer = torch.stack(x.chunk(group.size(), split_dim)).contiguous()  # [c, ...]: one chunk for each rank
        recv_buffer = torch.empty_like(send_buffer)
        dist.all_to_all_single(recv_buffer, send_buffer, group=group)
        return torch.cat(recv_buffer.unbind(), join_dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad, *ctx.inverse), None, None, None
