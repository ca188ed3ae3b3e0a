"""Ring attention: queries stay, and every rank's keys and values go around the ring past all of them.

    step         0    1    2    3          c = 4: whose keys and values a rank has
    rank 0     kv 0 kv 3 kv 2 kv 1
    rank 1     kv 1 kv 0 kv 3 kv 2         while it computes with them, it sends them to the next rank,
    rank 2     kv 2 kv 1 kv 0 kv 3         and receives those of the next step
    rank 3     kv 3 kv 2 kv 1 kv 0

Backward goes around once more. The gradients of the keys and values follow, one step late, and collect what each rank
adds, until they are home. So a rank sends c - 1 messages forward, and (c - 1) + c backward: 3c - 2, each of the
2 b h_kv (s/c) d numbers of a rank's keys and values. Gradients travel in float32 or better.

Source: arXiv 2310.01889 (Ring Attention); the balanced cut as in `labkit.context_parallel.positions`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from labkit.context_parallel.block import Attended, add_gradients, together
from labkit.context_parallel.positions import check_fit, part_with_work


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
    check_fit(q, k, v, group.size(), balanced)
    return _Ring.apply(q, k, v, group, causal, balanced)  # pyright: ignore[reportReturnType]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, group, causal, balanced):
        ctx.group, ctx.mask = group, (q.size(-2), causal, balanced)
        attended = Attended(q)
        for source, kv in _go_around(together(k, v), group):
            if part := part_with_work(group.rank(), source, *ctx.mask):
                attended.add(q, kv, part)
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, attended.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        own_kv = together(k, v)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv, arriving = (torch.zeros_like(own_kv, dtype=lse.dtype) for _ in range(2))
        travelling = []
        for source, kv in _go_around(own_kv, ctx.group):
            added = torch.zeros_like(dkv)
            if part := part_with_work(ctx.group.rank(), source, *ctx.mask):
                add_gradients(dq, added, (q, out, lse), grad, kv, part)
            _wait(travelling)  # what the ranks before this one have added came while the block was computed
            dkv, arriving = arriving, dkv
            dkv += added
            travelling = _pass_on(dkv, arriving, ctx.group)
        _wait(travelling)  # home
        return dq.to(q.dtype), *arriving.to(k.dtype), None, None, None


def _go_around(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield every rank and its keys and values, this rank's own first; while the caller computes, the next arrive."""
    arriving = torch.empty_like(kv)
    for step in range(group.size()):
        is_last = step == group.size() - 1
        travelling = [] if is_last else _pass_on(kv, arriving, group)
        yield (group.rank() - step) % group.size(), kv
        _wait(travelling)
        kv, arriving = arriving, kv


def _pass_on(tensor: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send a tensor to the next rank, and to receive one of its size from the rank before.

    As one batch, in which neither waits for the other: NCCL would deadlock on a ring of sends that wait for receives.
    """
    if group.size() == 1:
        arriving.copy_(tensor)  # it is its own neighbour
        return []
    there, here = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=there)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=here)
    return dist.batch_isend_irecv([send, receive])


def _wait(travelling: list[dist.Work]) -> None:
    for work in travelling:
        work.wait()
