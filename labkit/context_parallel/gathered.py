"""Computes attention after one all-gather of all keys and values; each rank works on its own queries.

For a while each rank holds the keys and values of the whole sequence. With few kv heads they are small, and one large
message is fast. Backward gathers again, and reduce-scatters the gradients, in float32 or better.
Source: arXiv 2407.21783 (Llama 3), section 3.3.2.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from labkit.communication import reduce_scatter_single
from labkit.context_parallel.block import sum_dtype
from labkit.context_parallel.blockwise import blockwise_attention


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, *, causal=True, balanced=True
) -> torch.Tensor:
    """Return what whole attention gives to this rank's queries; all arguments and errors as in `ring_attention`."""
    return blockwise_attention(q, k, v, group, causal, balanced, _gather, _reduce_scatter)


def _gather(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    if group.size() == 1:
        return enumerate([kv])
    kv_of_ranks = [torch.empty_like(kv) for _ in range(group.size())]
    dist.all_gather(kv_of_ranks, kv, group=group)
    return enumerate(kv_of_ranks)


def _reduce_scatter(own_kv: torch.Tensor, group: dist.ProcessGroup, add_block: Callable) -> torch.Tensor:
    dkv = torch.zeros(group.size(), *own_kv.shape, dtype=sum_dtype(own_kv), device=own_kv.device)
    for source, kv in _gather(own_kv, group):
        add_block(source, kv, dkv[source])
    if group.size() == 1:
        return dkv[0]
    own = torch.empty_like(dkv[0])
    reduce_scatter_single(own, dkv.flatten(0, 1), group=group)
    return own
