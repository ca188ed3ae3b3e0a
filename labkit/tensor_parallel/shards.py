"""Shards weights and gathers them: every rank draws the unsharded *master weight* from the same
seed and keeps its shard.

So weights and results do not depend on the number of ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.groups import local_device
from labkit.partition import chunks_of_rank
from labkit.placement import Placement, Shard, placement_of, unsharded_size
from labkit.tensor_parallel.operators import all_gather


def local_shard(
    master: torch.Tensor, group: dist.ProcessGroup, dim: int, stride: int = 1
) -> torch.Tensor:
    """Return this rank's shard of a master weight, divided along ``dim`` by `chunks_of_rank`,
    padded with zeros.
    """
    if padding := -master.size(dim) % (group.size() * stride):
        master = F.pad(master.movedim(dim, -1), (0, padding)).movedim(-1, dim)
    chunks = chunks_of_rank(master.size(dim), group.size(), group.rank(), stride)
    return torch.cat([master.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


class ShardedWeight(nn.Module):
    """A module whose ``weight`` is this rank's shard of a master weight of ``sizes``, divided along
    ``dim``.

    Communication: when the weight is drawn, the ranks all-reduce two numbers, to see that they drew
    the same. What forward and backward send is up to the layers.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        group: dist.ProcessGroup,
        init_method: Callable[[torch.Tensor], object],
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        **factory,
    ):
        super().__init__()
        self.group = group
        self.stride = stride
        self.sizes = sizes
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight_for_test
        self.master_weight: torch.Tensor | None = None
        local_sizes = list(sizes)
        local_sizes[dim] = -(-sizes[dim] // group.size())  # rounded up: the last shards are padded
        self.weight = nn.Parameter(torch.empty(local_sizes, **factory))
        self.placements = {"weight": Placement((Shard(dim, sizes[dim], group, stride),))}

    def reset_parameters(self) -> None:
        """Let every rank `draw` the weight.

        Raises:
            ValueError: the ranks of the group drew different weights: their seeds differ.
        """
        master = draw(self, "weight", self.init_method)
        if master is not None and self.group.size() > 1:
            self._check_same_on_all_ranks(master)
        self.master_weight = master if self.keep_master_weight else None

    def _check_same_on_all_ranks(self, master: torch.Tensor) -> None:
        total = master.sum(dtype=torch.float64).nan_to_num().item()
        bounds = torch.tensor([total, -total], dtype=torch.float64, device=local_device())
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.group)
        highest, minus_lowest = bounds
        if highest != -minus_lowest:
            fault = "the ranks of this tensor-parallel group drew different weights of shape"
            way_out = "set the same seed on all of them before the layer is made"
            raise ValueError(
                f"{fault} {list(self.sizes)}: {way_out}, for example torch.manual_seed(1234)"
            )

    def extra_repr(self) -> str:
        return f"weight={tuple(self.sizes)}, tp_size={self.group.size()}"


@torch.no_grad()
def draw(
    module: nn.Module, name: str, init_method: Callable[[torch.Tensor], object]
) -> torch.Tensor | None:
    """Draw a module's unsharded weight on the CPU, keep this rank's shard, and return all of it; on
    the meta device, do nothing.
    """
    weight = module.get_parameter(name)
    placement = placement_of(module, name)
    if weight.is_meta:
        return None
    master = torch.empty(unsharded_size(weight, placement), dtype=weight.dtype, device="cpu")
    init_method(master)
    weight.copy_(shard_like(master, placement))
    return master


def unshard(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return on every rank the unsharded tensor, of a parameter with this placement or of its
    gradient.

    Communication: an all-gather for each dim that is divided.
    """
    for shard in placement.shards:
        tp_size = shard.group.size()
        if tp_size > 1:
            gathered = all_gather(tensor.detach(), shard.group, shard.dim).movedim(shard.dim, -1)
            padded = transpose_chunks(gathered, tp_size, shard.stride)
            tensor = padded[..., : shard.unsharded_size].movedim(-1, shard.dim)
    return tensor


def shard_like(unsharded: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return this rank's shard of an unsharded tensor: the inverse of `unshard`."""
    tensor = unsharded
    for shard in placement.shards:
        tensor = local_shard(tensor, shard.group, shard.dim, shard.stride)
    return tensor


def transpose_chunks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Transpose a grid of chunks, stored row by row in the last dim: with 2 rows, 0 1 2 3 4 5
    becomes 0 3 1 4 2 5.

    With ``stride`` rows and t columns, each rank's chunks become adjacent; with t rows, that is
    undone.
    """
    if min(rows, columns) == 1:
        return x
    return x.unflatten(-1, (rows, columns, -1)).transpose(-3, -2).flatten(-3)
