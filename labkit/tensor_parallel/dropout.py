"""Seeds dropout on ranks: the same mask where a tensor is replicated, different masks where it is
sharded.

For replicated tensors use `torch.nn.Dropout`: the default generator is seeded alike within a tensor
group. For sharded tensors the ranks draw one common seed from it, from which each derives its own.
So the default generator stays in sync, and `torch.utils.checkpoint`, which restores it for
recomputation, repeats every mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.sizes import check_number


def seed_replicas(seed: int, groups: ProcessGroups) -> None:
    """Seed torch alike within a tensor group, and differently for each dp, cp and pp rank.

    Call it after the model is made, because weights must start alike in all replicas.
    """
    coords = groups.coords
    layout = groups.layout
    replica = (coords.pp * layout.dp_size + coords.dp) * layout.cp_size + coords.cp
    _seed(seed + 1 + replica)


@contextmanager
def local_random_stream(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Give this rank a random stream of its own inside the block; the default generator advances by
    one number.
    """
    common_seed = int(torch.randint(1 << 40, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _seed(common_seed * group.size() + group.rank())
        yield


def _seed(seed: int) -> None:
    """Do what `torch.manual_seed` does, but record no stack trace for devices that are not
    initialized.
    """
    torch.default_generator.manual_seed(seed)
    if local_device().type == "cuda":
        torch.cuda.manual_seed(seed)


class ShardedDropout(nn.Dropout):
    """`torch.nn.Dropout` for a shard: each rank draws its own mask.

    Communication: none. Ranks derive their seeds from a number that they all draw alike.
    """

    def __init__(self, p: float, group: dist.ProcessGroup):
        super().__init__(check_number("p", p, most=1))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x
        with local_random_stream(self.group, x.device):
            return super().forward(x)
