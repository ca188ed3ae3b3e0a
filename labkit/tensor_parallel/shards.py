"""Which piece of a weight a rank keeps, and how all ranks come to cut the same weight.

Every rank draws the whole *master weight* from the same seed and keeps its shard. So the weights, and
with them all results, do not depend on how many ranks share them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.cuts import chunks_of_rank
from labkit.groups import local_device
from labkit.tensor_parallel.operators import all_gather


def draw_master_weight(
    shape: Sequence[int], init_method: Callable[[torch.Tensor], object], group: dist.ProcessGroup, dtype=None
) -> torch.Tensor:
    """The weight before it is cut, drawn on the CPU from torch's default generator.

    Raises:
        ValueError: it is not the same on all ranks of the group, because their seeds differ.
    """
    master = torch.empty(*shape, dtype=dtype, device="cpu")
    init_method(master)
    if group.size() > 1:
        fingerprint = master.double().sum().nan_to_num().item()
        highest = torch.tensor([fingerprint, -fingerprint], dtype=torch.float64, device=local_device())
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        if highest[0] != -highest[1]:
            raise ValueError(
                f"the ranks of this tensor-parallel group drew different weights of shape {list(shape)}: "
                "set the same seed on all of them before the layer is made, torch.manual_seed(1234) say"
            )
    return master


def own_shard(master: torch.Tensor, group: dist.ProcessGroup, dim: int, stride: int = 1) -> torch.Tensor:
    """Return this rank's part of a master weight, cut along ``dim`` by the stride rule (`chunks_of_rank`)."""
    chunks = chunks_of_rank(master.size(dim), group.size(), group.rank(), stride)
    return torch.cat([master.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


class Shard(NamedTuple):
    """How a parameter was cut from its master weight: along which dim, of what size there, with which stride."""

    dim: int
    whole_size: int  # without padding
    stride: int = 1


def mark_shard(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Note on a parameter what it is a shard of; one without the note is the same on every rank."""
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """How a parameter is cut; None for one that every rank has whole."""
    return getattr(parameter, "shard", None)


def gather_whole(tensor: torch.Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a tensor that is cut like the parameter (its values, its gradient), on every rank."""
    shard = shard_of(parameter)
    if shard is None or group.size() == 1:
        return tensor
    joined = all_gather(tensor.detach(), group, shard.dim).movedim(shard.dim, -1)
    return chunks_in_order(joined, group.size(), shard.stride)[..., : shard.whole_size].movedim(-1, shard.dim)


def cut_like(whole: torch.Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `gather_whole`: this rank's part of a whole tensor, which is padded with zeros if need be."""
    shard = shard_of(parameter)
    if shard is None:
        return whole
    padding = parameter.size(shard.dim) * group.size() - shard.whole_size
    padded = F.pad(whole.movedim(shard.dim, -1), (0, padding)).movedim(-1, shard.dim)
    return own_shard(padded, group, shard.dim, shard.stride)


def chunks_by_rank(x: torch.Tensor, tp_size: int, stride: int) -> torch.Tensor:
    """Reorder the last dim so that the chunks of one rank are next to each other: 0 2 1 3 for t = 2, stride = 2."""
    return x.unflatten(-1, (stride, tp_size, -1)).transpose(-3, -2).flatten(-3) if stride > 1 else x


def chunks_in_order(x: torch.Tensor, tp_size: int, stride: int) -> torch.Tensor:
    """The inverse of `chunks_by_rank`."""
    return chunks_by_rank(x, stride, tp_size) if stride > 1 else x
