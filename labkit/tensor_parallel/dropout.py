"""Seeds dropout on ranks: the same mask where a tensor is replicated, different masks where it is sharded.

For replicated tensors `torch.nn.Dropout` will do: it draws from torch's default generator, and ranks of a tensor group
that seed it alike draw alike. For a sharded tensor they draw one common seed from it, from which each derives its own.
So that generator stays common, and `torch.utils.checkpoint`, which restores it to compute again, repeats every mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.sizes import check_probability


def seed_replicas(seed: int, groups: ProcessGroups) -> None:
    """Seed torch alike within a tensor group, and differently for each data (and context) replica and pipeline stage.

    Call it after the model is made, whose weights must start alike in all replicas.
    """
    place, layout = groups.coords, groups.layout
    _seed(seed + 1 + (place.pp * layout.dp_size + place.dp) * layout.cp_size + place.cp)


@contextmanager
def own_random_stream(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Give this rank a default generator of its own inside the block; the common one only loses a single number."""
    common_seed = int(torch.randint(1 << 40, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _seed(common_seed * group.size() + group.rank())
        yield


def _seed(seed: int) -> None:
    """Do what `torch.manual_seed` does, without the stack trace that it records for devices that are not here."""
    torch.default_generator.manual_seed(seed)
    if local_device().type == "cuda":
        torch.cuda.manual_seed(seed)


class ShardedDropout(nn.Dropout):
    """`torch.nn.Dropout` for a shard: each rank draws a mask of its own."""

    def __init__(self, p: float, group: dist.ProcessGroup):
        super().__init__(check_probability("p", p))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x
        with own_random_stream(self.group, x.device):
            return super().forward(x)
