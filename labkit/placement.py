"""Records how each parameter lies among the ranks: which shard of it a rank has, and who has the same one.

The record is made once, where the parameter is made, and read wherever whole parameters or gradients are meant: by data
parallelism, the gradient norm, checkpoints. It belongs to the parameter's name in its module, so what torch puts in the
parameter's place (`to_empty`, `load_state_dict(assign=True)`, `deepcopy`, `fully_shard`) has it too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups


@dataclass(frozen=True)
class Shard:
    """How one dim is divided among the ranks of a group: by `labkit.partition.chunks_of_rank`, padded at the end."""

    dim: int
    whole_size: int  # without padding
    group: dist.ProcessGroup
    stride: int = 1


@dataclass(frozen=True)
class FlatShard:
    """What fully sharding leaves of a parameter: consecutive numbers of it, flattened."""

    shape: torch.Size  # before
    start: int  # the flat index of this rank's first number
    group: dist.ProcessGroup  # which has all numbers


@dataclass(frozen=True)
class Placement:
    """How a parameter lies among the ranks. By default every data-parallel replica has the whole."""

    shards: tuple[Shard, ...] = ()  # the dims that are divided
    copy_groups: tuple[dist.ProcessGroup, ...] = ()  # groups in which every rank has the same shard, beside replicas
    is_tied_copy: bool = False  # another stage has the same weight, which stands for both in norms and checkpoints
    replica_group: dist.ProcessGroup | None = None  # replicas, whose gradients are averaged; None: the wrapper's group
    grad_divisor: int | None = None  # what the sum of the replicas' gradients is divided by; None: their number
    defer_grad_reduce: bool = False  # each rank of the tensor group has a part of the gradient until the step's end
    flat: FlatShard | None = None

    def __deepcopy__(self, memo) -> "Placement":
        return self  # it cannot change

    def __reduce__(self):
        return Placement, ()  # a parameter that is sent to another process leaves its groups behind


def placement_of(parameter: torch.Tensor) -> Placement:
    """Return a parameter's placement; the default for one that no `PlacedModule` has made."""
    return getattr(parameter, "placement", Placement())


def shape_before_flat(parameter: torch.Tensor) -> torch.Size:
    """Return the shape that a parameter has, or had before it was fully sharded."""
    flat = placement_of(parameter).flat
    return parameter.shape if flat is None else flat.shape


def set_placement(parameter: torch.Tensor, placement: Placement) -> None:
    """Give a parameter a different placement, for example one with its `FlatShard`."""
    parameter.placement = placement  # pyright: ignore[reportAttributeAccessIssue]


def copy_groups_of(parameter: torch.Tensor, groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Return the groups in which every rank has the same numbers of a parameter, the data replicas among them."""
    placement = placement_of(parameter)
    replicas = placement.replica_group or groups.dp_cp
    if placement.flat is not None:  # then only hybrid sharding leaves replicas
        replicas = groups.replicate if placement.flat.group is groups.shard else None
    return [*placement.copy_groups, *([replicas] if replicas is not None else [])]


class PlacedModule(nn.Module):
    """A module that knows by name how its own parameters lie among the ranks."""

    def place(self, **placements: Placement) -> None:
        """Record the placements of parameters, by name."""
        if not isinstance(self._parameters, _Parameters):
            vars(self)["_parameters"] = _Parameters(type(self).__name__, self._parameters)
        self._parameters.placements |= placements  # pyright: ignore[reportAttributeAccessIssue]
        for name, placement in placements.items():
            if (parameter := self._parameters.get(name)) is not None:
                set_placement(parameter, placement)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        for name, parameter in self._parameters.items():  # torch may have swapped their contents
            self._parameters[name] = parameter
        return self


class _Parameters(dict[str, Any]):
    """A module's parameters. One that comes without a placement gets the one recorded for its name."""

    def __init__(self, owner: str = "", parameters=()):
        super().__init__(parameters)
        self.owner, self.placements = owner, {}

    def __setitem__(self, name: str, parameter) -> None:
        if name in self.placements and parameter is not None and not hasattr(parameter, "placement"):
            set_placement(parameter, self.placements[name])
        super().__setitem__(name, parameter)

    def __delitem__(self, name: str) -> None:
        if name in self.placements:
            gone = f"{self.owner} no longer has its parameter {name!r}, which lies among the ranks in a way of its own"
            raise ValueError(f"{gone}: do not use weight_norm or another parametrization on it")
        super().__delitem__(name)
