"""Computes attention while keys and values go around a ring of ranks and queries stay.

    step         0    1    2    3          c = 4: whose keys and values a rank has at each step
    rank 0     kv 0 kv 3 kv 2 kv 1
    rank 1     kv 1 kv 0 kv 3 kv 2         while it computes with them, it sends them
    rank 2     kv 2 kv 1 kv 0 kv 3         to the next rank, and receives those of the next step
    rank 3     kv 3 kv 2 kv 1 kv 0

Backward sends the keys and values around again. Their gradients follow one step behind; each rank
adds its own, and the last hop returns them to their owner. So a rank sends c - 1 messages forward
and (c - 1) + c backward, 3c - 2 of 2 b h_kv (s/c) d numbers each. Gradients are sent in float32 or
better.

Source: arXiv 2310.01889 (Ring Attention); zigzag chunks as in `labkit.context_parallel.positions`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from labkit.context_parallel.block import sum_dtype
from labkit.context_parallel.blockwise import blockwise_attention


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal=True,
    zigzag=True,
) -> torch.Tensor:
    """Return attention of this rank's queries to the keys of all ranks,
    [batch, heads, seq/c, head_size].

    q: [batch, heads, seq/c, head_size]; k and v have as many heads, or fewer that divide them
    (grouped queries). Tokens are those of `positions`, with the same ``zigzag``. There is no
    dropout. A rank holds two ranks' keys and values at a time, and in backward three buffers of as
    many float32 numbers as one rank's; it saves q, k, v, the output and its lse for backward.

    Raises:
        ValueError: the sizes do not fit together. Nothing has been sent then.
    """
    return blockwise_attention(q, k, v, group, causal, zigzag, _rotate_kv, _rotate_kv_and_gradients)


def _rotate_kv(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each rank with its keys and values, this rank's first; the next are received while the
    caller computes.
    """
    recv_buffer = torch.empty_like(kv)
    for step in range(group.size()):
        is_last = step == group.size() - 1
        works = [] if is_last else _send_recv(kv, recv_buffer, group)
        yield (group.rank() - step) % group.size(), kv
        _wait(works)
        kv, recv_buffer = recv_buffer, kv


def _rotate_kv_and_gradients(
    local_kv: torch.Tensor, group: dist.ProcessGroup, add_block: Callable
) -> torch.Tensor:
    """Send keys and values around, followed by their gradients; return the gradient of this rank's
    keys and values.
    """
    dkv = torch.zeros_like(local_kv, dtype=sum_dtype(local_kv))
    recv_buffer = torch.zeros_like(dkv)
    works = []
    for source, kv in _rotate_kv(local_kv, group):
        block_dkv = torch.zeros_like(dkv)
        add_block(source, kv, block_dkv)
        _wait(works)  # the sum from earlier ranks, received while the block was computed
        dkv, recv_buffer = recv_buffer, dkv
        dkv += block_dkv
        works = _send_recv(dkv, recv_buffer, group)
    _wait(works)  # the gradient of this rank's keys and values is back
    return recv_buffer


def _send_recv(
    tensor: torch.Tensor, recv_buffer: torch.Tensor, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to send a tensor to the next rank and to receive one of its size from the previous
    rank.

    Both are one batch: a ring of sends that each wait for a receive would deadlock on NCCL.
    """
    if group.size() == 1:
        recv_buffer.copy_(tensor)  # a rank is its own neighbour
        return []
    next_rank = (group.rank() + 1) % group.size()
    previous_rank = (group.rank() - 1) % group.size()
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=next_rank)
    recv = dist.P2POp(dist.irecv, recv_buffer, group=group, group_peer=previous_rank)
    return dist.batch_isend_irecv([send, recv])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
