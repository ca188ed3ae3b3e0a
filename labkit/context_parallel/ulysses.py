"""Computes attention after an all-to-all that shards the heads instead of the sequence (Ulysses).

    [batch, heads, seq/c, head_size]   -- all-to-all -->   [batch, heads/c, seq, head_size]

Every rank then has the whole sequence for its own heads, so any attention kernel works, and the
work is balanced whatever the mask. Queries, keys, values and the output each take one all-to-all
forward and one backward, which send (c - 1)/c of the tensor. c is at most the number of kv heads.
Source: arXiv 2309.14509 (DeepSpeed Ulysses).
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.autograd import refuse_autocast
from labkit.collectives import all_to_all
from labkit.context_parallel.positions import check_fit, positions
from labkit.partition import check_divides

HEADS_DIM = 1
SEQUENCE_DIM = 2


def ulysses_attention(
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

    c must also divide the heads and the kv heads. ``zigzag`` only says which tokens the ranks hold:
    the causal mask needs them in order.
    """
    refuse_autocast("ulysses_attention", q.device)
    c = group.size()
    check_fit(q, k, v, c, zigzag)
    check_divides(c, "num_heads", q.size(HEADS_DIM), parts_name="cp_size")
    check_divides(c, "num_kv_heads", k.size(HEADS_DIM), parts_name="cp_size")
    grouped = q.size(HEADS_DIM) != k.size(HEADS_DIM)
    attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped)
    q, k, v = (_exchange(x, group, HEADS_DIM, SEQUENCE_DIM) for x in (q, k, v))  # [b, h/c, s, d]
    if not zigzag or c == 1:
        out = attend(q, k, v)
    else:
        # The positions of the tokens as the ranks sent them: put them in order, and back.
        seq_length = q.size(SEQUENCE_DIM)
        order = torch.cat([positions(seq_length, c, rank, device=q.device) for rank in range(c)])
        in_order = order.argsort()
        q, k, v = (x.index_select(SEQUENCE_DIM, in_order) for x in (q, k, v))
        out = attend(q, k, v).index_select(SEQUENCE_DIM, order)
    return _exchange(out, group, SEQUENCE_DIM, HEADS_DIM)  # [b, h, s/c, d]


def _exchange(
    x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
) -> torch.Tensor:
    """Send each rank its chunk along ``split_dim``, and concatenate the chunks received along
    ``join_dim``.
    """
    chunks = torch.stack(x.chunk(group.size(), split_dim))  # [c, ...], one for each rank
    received = all_to_all(chunks, group)
    return torch.cat(received.unbind(), join_dim)
