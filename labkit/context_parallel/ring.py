"""Computes attention while the keys and values of every rank go around a ring; queries stay.

    step         0    1    2    3          c = 4: whose keys and values a rank has
    rank 0     kv 0 kv 3 kv 2 kv 1
    rank 1     kv 1 kv 0 kv 3 kv 2         while it computes with them, it sends them to the next rank,
    rank 2     kv 2 kv 1 kv 0 kv 3         and receives those of the next step
    rank 3     kv 3 kv 2 kv 1 kv 0

Backward goes around once more. The gradients of the keys and values follow, one step late, and collect what each rank
adds, until they are home. So a rank sends c - 1 messages forward, and (c - 1) + c backward: 3c - 2, each of the
2 b h_kv (s/c) d numbers of a rank's keys and values. Gradients travel in float32 or better.

Source: arXiv 2310.01889 (Ring Attention); balanced chunks as in `labkit.context_parallel.positions`.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from labkit.context_parallel.block import sum_dtype
from labkit.context_parallel.blockwise import blockwise_attention


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, *, causal=True, balanced=True
) -> torch.Tensor:
    """Return what whole attention gives to this rank's queries, [batch, heads, seq/c, head_size].

    q: [batch, heads, seq/c, head_size]; k and v have as many heads, or fewer that divide them (grouped queries). Tokens
    are those of `positions`, with the same ``balanced``. There is no dropout. A rank holds two ranks' keys and values
    at a time, in backward also three of their gradients; what is kept for backward is q, k, v, the output and its lse.

    Raises:
        ValueError: the sizes do not fit together. Nothing has been sent then.
    """
    return blockwise_attention(q, k, v, group, causal, balanced, _go_around, _go_around_with_gradients)


def _go_around(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield every rank and its keys and values, this rank's own first; while the caller computes, the next come."""
    recv_buffer = torch.empty_like(kv)
    for step in range(group.size()):
        is_last = step == group.size() - 1
        work = [] if is_last else _pass_on(kv, recv_buffer, group)
        yield (group.rank() - step) % group.size(), kv
        _wait(work)
        kv, recv_buffer = recv_buffer, kv


def _go_around_with_gradients(own_kv: torch.Tensor, group: dist.ProcessGroup, add_block: Callable) -> torch.Tensor:
    """Send keys and values around again, and their gradients after them; return those that have come home."""
    dkv, recv_buffer = (torch.zeros_like(own_kv, dtype=sum_dtype(own_kv)) for _ in range(2))
    work = []
    for source, kv in _go_around(own_kv, group):
        added = torch.zeros_like(dkv)
        add_block(source, kv, added)
        _wait(work)  # what the ranks before this one have added came while the block was computed
        dkv, recv_buffer = recv_buffer, dkv
        dkv += added
        work = _pass_on(dkv, recv_buffer, group)
    _wait(work)  # home
    return recv_buffer


def _pass_on(tensor: torch.Tensor, recv_buffer: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send a tensor to the next rank, and to receive one of its size from the rank before, as one batch.

    On a ring of sends that wait for receives NCCL would deadlock.
    """
    if group.size() == 1:
        recv_buffer.copy_(tensor)  # it is its own neighbour
        return []
    next_rank, rank_before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=next_rank)
    recv = dist.P2POp(dist.irecv, recv_buffer, group=group, group_peer=rank_before)
    return dist.batch_isend_irecv([send, recv])


def _wait(work: list[dist.Work]) -> None:
    for each in work:
        each.wait()
