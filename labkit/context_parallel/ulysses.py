"""Computes attention after an all-to-all by which ranks divide the heads instead of the sequence (Ulysses).

    [batch, heads, seq/c, head_size]   -- all-to-all -->   [batch, heads/c, seq, head_size]

Every rank then has the whole sequence for its own heads, so that any attention kernel will do, and the work is equal
whatever the mask. Queries, keys, values and the output each take one all-to-all forward and one backward, of which
(c - 1)/c leaves the rank. The number of kv heads limits c. Source: arXiv 2309.14509 (DeepSpeed Ulysses).
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
    """Return what whole attention gives to this rank's queries; arguments and errors as in `ring_attention`.

    c must also divide the heads and the kv heads. ``balanced`` says which tokens the ranks hold, as for the ring: the
    work is equal either way, but the causal mask needs the tokens in their order.
    """
    c = group.size()
    check_fit(q, k, v, c, balanced)
    check_divides(c, "num_heads", q.size(HEADS_DIM), parts_name="cp_size")
    check_divides(c, "num_kv_heads", k.size(HEADS_DIM), parts_name="cp_size")
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=q.size(1) != k.size(1))
    q, k, v = (_exchange(x, group, HEADS_DIM, SEQUENCE_DIM) for x in (q, k, v))  # [b, h/c, s, d]
    if not balanced or c == 1:
        out = attend(q, k, v)
    else:
        held = torch.cat([positions(q.size(SEQUENCE_DIM), c, rank) for rank in range(c)]).to(q.device)
        q, k, v = (x.index_select(SEQUENCE_DIM, held.argsort()) for x in (q, k, v))
        out = attend(q, k, v).index_select(SEQUENCE_DIM, held)
    return _exchange(out, group, SEQUENCE_DIM, HEADS_DIM)  # [b, h, s/c, d]


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Any:
    """Send each rank its chunk of one dim, and join what comes along the other."""
    return _Exchange.apply(x, group, split_dim, join_dim) if group.size() > 1 else x


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose backward is the all-to-all that puts everything back."""

    @staticmethod
    def forward(ctx: Any, x, group, split_dim, join_dim):
        ctx.back = group, join_dim, split_dim
        send_buffer = torch.stack(x.chunk(group.size(), split_dim)).contiguous()  # [c, ...]: one chunk for each rank
        recv_buffer = torch.empty_like(send_buffer)
        dist.all_to_all_single(recv_buffer, send_buffer, group=group)
        return torch.cat(recv_buffer.unbind(), join_dim)

    @staticmethod
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad, *ctx.back), None, None, None
