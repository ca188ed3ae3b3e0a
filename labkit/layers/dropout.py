"""Dropout on ranks: the same mask where a tensor is replicated, another where it is sharded.

Replicated tensors need nothing new: `torch.nn.Dropout` draws from torch's default generator, which runs alike
on all ranks of a tensor group as long as they are seeded alike and draw alike. For a sharded tensor the ranks
draw one common seed from that generator and each derives its own from it. So the default generator stays
common; and `torch.utils.checkpoint`, which restores it for recomputation, replays every mask.
"""

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups


def seed_replicas(seed: int, groups: ProcessGroups) -> None:
    """Seed torch alike within a tensor group, and apart for each data (and context) replica and pipeline stage.

    To be called when the model has been made (whose weights must start alike in all replicas), before training.
    """
    place, layout = groups.coords, groups.layout
    torch.manual_seed(seed + 1 + (place.pp * layout.dp_size + place.dp) * layout.cp_size + place.cp)


def sharded_dropout(x: torch.Tensor, p: float, group: dist.ProcessGroup, training: bool = True) -> torch.Tensor:
    """`torch.nn.functional.dropout` of a shard, with a mask of this rank's own.

    Raises:
        ValueError: p is not a probability below 1.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p={p} is not a probability to drop: use a number from 0 up to, not including, 1")
    if not training or p == 0.0:
        return x
    common_seed = int(torch.randint(1 << 40, ()))
    generator = torch.Generator(x.device).manual_seed(common_seed * group.size() + group.rank())
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return x * keep / (1.0 - p)


class ShardedDropout(nn.Module):
    """`sharded_dropout` as a layer."""

    def __init__(self, p: float, group: dist.ProcessGroup):
        super().__init__()
        self.p, self.group = p, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sharded_dropout(x, self.p, self.group, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
