"""Which piece of a weight a rank keeps, and why all ranks cut the same weight.

Every rank draws the whole *master weight* from the same seed and keeps its shard. So neither the weights nor any
result depends on how many ranks share them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.groups import local_device
from labkit.partition import chunks_of_rank
from labkit.tensor_parallel.operators import all_gather


def draw_master_weight(
    shape: Sequence[int], init_method: Callable[[torch.Tensor], object], group: dist.ProcessGroup, dtype=None
) -> torch.Tensor:
    """Return the weight before it is cut, drawn on the CPU from torch's default generator.

    Raises:
        ValueError: the ranks of the group drew different weights: their seeds differ.
    """
    master = torch.empty(*shape, dtype=dtype, device="cpu")
    init_method(master)
    if group.size() > 1:
        fingerprint = master.sum(dtype=torch.float64).nan_to_num().item()
        highest = torch.tensor([fingerprint, -fingerprint], dtype=torch.float64, device=local_device())
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        if highest[0] != -highest[1]:
            raise ValueError(
                f"the ranks of this tensor-parallel group drew different weights of shape {list(shape)}: "
                "set the same seed on all of them before the layer is made, for example torch.manual_seed(1234)"
            )
    return master


def own_shard(master: torch.Tensor, group: dist.ProcessGroup, dim: int, stride: int = 1) -> torch.Tensor:
    """Return this rank's part of a master weight, cut along ``dim`` by `chunks_of_rank` and filled up with zeros."""
    if padding := -master.size(dim) % (group.size() * stride):
        master = F.pad(master.movedim(dim, -1), (0, padding)).movedim(-1, dim)
    chunks = chunks_of_rank(master.size(dim), group.size(), group.rank(), stride)
    return torch.cat([master.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


class Shard(NamedTuple):
    """How a parameter was cut from its master weight: along which dim, how long that was, and with which stride."""

    dim: int
    whole_size: int  # without padding
    stride: int = 1


class ShardedModule(nn.Module):
    """A layer that knows by name how its parameters are cut: ``shards``.

    In `to_empty`, `load_state_dict(assign=True)` and FSDP2's `fully_shard`, torch puts new tensors in a parameter's
    place, without the note that `shard_of` reads. So a parameter gets its note whenever somebody asks for it.
    """

    shards: dict[str, Shard]

    def __getattr__(self, name: str) -> Any:  # here torch looks up parameters
        value, shard = super().__getattr__(name), vars(self).get("shards", {}).get(name)
        if shard is not None and value is not None:
            value.shard = shard  # pyright: ignore[reportAttributeAccessIssue]
        return value

    def named_modules(self, *args, **kwargs):  # here torch passes on its way to all parameters of a model
        for name in self.shards:
            if name not in self._parameters:
                gone = f"{type(self).__name__} no longer has its parameter {name!r}, which is cut among the ranks"
                raise ValueError(f"{gone}: do not use weight_norm or another parametrization on it")
            getattr(self, name)
        return super().named_modules(*args, **kwargs)


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """Return how a parameter of a layer was cut, or None if every rank has the whole."""
    return getattr(parameter, "shard", None)


def gather_whole(tensor: torch.Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """Return on every rank the whole of a tensor that is cut like the parameter: its values, or its gradient."""
    shard = shard_of(parameter)
    if shard is None or group.size() == 1:
        return tensor
    joined = all_gather(tensor.detach(), group, shard.dim).movedim(shard.dim, -1)
    return transpose_chunks(joined, group.size(), shard.stride)[..., : shard.whole_size].movedim(-1, shard.dim)


def cut_like(whole: torch.Tensor, parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of a whole tensor: the inverse of `gather_whole`."""
    shard = shard_of(parameter)
    return whole if shard is None else own_shard(whole, group, shard.dim, shard.stride)


def transpose_chunks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Read a grid of chunks, stored row by row in the last dim, by columns: in 2 rows, 0 1 2 3 4 5 becomes 0 3 1 4 2 5.

    With stride rows and t columns, the chunks of each rank become neighbours; with t rows, they go back.
    """
    return x.unflatten(-1, (rows, columns, -1)).transpose(-3, -2).flatten(-3) if min(rows, columns) > 1 else x
