"""Dropout on ranks: the same mask where a tensor is replicated, another where it is sharded.

Replicated tensors need nothing new: `torch.nn.Dropout` draws from torch's default generator, which runs alike
on all ranks of a tensor group as long as they are seeded alike and draw alike. For a sharded tensor the ranks
draw one common seed from that generator and each derives its own from it. So the default generator stays
common; and `torch.utils.checkpoint`, which restores it for recomputation, replays every mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.groups import ProcessGroups


def seed_replicas(seed: int, groups: ProcessGroups) -> None:
    """Seed torch alike within a tensor group, and apart for each data (and context) replica and pipeline stage.

    To be called when the model has been made (whose weights must start alike in all replicas), before training.
    """
    place, layout = groups.coords, groups.layout
    torch.manual_seed(seed + 1 + (place.pp * layout.dp_size + place.dp) * layout.cp_size + place.cp)


@contextmanager
def own_random_stream(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Inside the block torch's default generator is this rank's own; afterwards it is as if one number was drawn."""
    common_seed = int(torch.randint(1 << 40, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(common_seed * group.size() + group.rank())
        yield


def sharded_dropout(x: torch.Tensor, p: float, group: dist.ProcessGroup, training: bool = True) -> torch.Tensor:
    """`torch.nn.functional.dropout` of a shard, with a mask of this rank's own.

    Raises:
        ValueError: p is not a probability below 1.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p={p} is not a probability to drop: use a number from 0 up to, not including, 1")
    if not training or p == 0.0:
        return x
    with own_random_stream(group, x.device):
        return F.dropout(x, p)


class ShardedDropout(nn.Module):
    """`sharded_dropout` as a layer."""

    def __init__(self, p: float, group: dist.ProcessGroup):
        super().__init__()
        self.p, self.group = p, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sharded_dropout(x, self.p, self.group, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
