"""Records how each parameter is sharded: which shard of it a rank has, and which ranks have the
same one.

The layer that makes a parameter records its placement; data parallelism, the gradient norm and
checkpoints read it. It belongs to the parameter's name in its module, so a parameter that replaces
it (after `to_empty`, `load_state_dict(assign=True)`, `deepcopy` or `fully_shard`) gets it too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups


@dataclass(frozen=True)
class Shard:
    """How one dim is divided among the ranks of a group: by `labkit.partition.chunks_of_rank`,
    padded at the end.
    """

    dim: int
    unsharded_size: int  # without padding
    group: dist.ProcessGroup
    stride: int = 1


@dataclass(frozen=True)
class FlatShard:
    """A rank's shard under FSDP: consecutive numbers of the flattened parameter."""

    shape: torch.Size  # before it was flattened
    start: int  # the flat index of this rank's first number
    # With hybrid sharding, the groups whose ranks have the same numbers
    replicas: tuple[dist.ProcessGroup, ...] = ()


@dataclass(frozen=True)
class Placement:
    """How a parameter is sharded and replicated.

    By default every data-parallel replica has the whole.
    """

    shards: tuple[Shard, ...] = ()  # the dims that are divided
    # Groups with the same shard on every rank, not counting replicas
    copy_groups: tuple[dist.ProcessGroup, ...] = ()
    is_tied_copy: bool = False  # norms and checkpoints skip it: another stage has the original
    # Over which gradients are averaged; None: the wrapper's
    replica_group: dist.ProcessGroup | None = None
    grad_divisor: int | None = None  # of the replicas' sum; None: the number of replicas
    defer_grad_reduce: bool = False  # the gradient stays partial over tp until the step's end
    flat: FlatShard | None = None

    def __deepcopy__(self, memo) -> "Placement":
        return self  # it is immutable

    def __reduce__(self):
        return Placement, ()  # groups cannot be pickled


def placement_of(parameter: torch.Tensor) -> Placement:
    """Return a parameter's placement; the default if none was recorded."""
    return getattr(parameter, "placement", Placement())


def shape_before_flat(parameter: torch.Tensor) -> torch.Size:
    """Return a parameter's shape, or under FSDP the one before it was flattened."""
    flat = placement_of(parameter).flat
    return parameter.shape if flat is None else flat.shape


def unsharded_size(parameter: torch.Tensor) -> list[int]:
    """Return the size of the whole tensor that a parameter is a shard of, without padding."""
    sizes = {shard.dim: shard.unsharded_size for shard in placement_of(parameter).shards}
    return [sizes.get(dim, size) for dim, size in enumerate(shape_before_flat(parameter))]


def set_placement(parameter: torch.Tensor, placement: Placement) -> None:
    """Replace a parameter's placement."""
    parameter.placement = placement  # pyright: ignore[reportAttributeAccessIssue]


def copy_groups_of(parameter: torch.Tensor, groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Return the groups, data-parallel ones included, whose ranks all have the same shard of a
    parameter.
    """
    placement = placement_of(parameter)
    if placement.flat:
        return [*placement.copy_groups, *placement.flat.replicas]
    return [*placement.copy_groups, placement.replica_group or groups.dp_cp]


class PlacedModule(nn.Module):
    """A module that keeps the placements of its own parameters, by name."""

    def set_placements(self, **placements: Placement) -> None:
        """Record placements by parameter name."""
        if not isinstance(self._parameters, _Parameters):
            vars(self)["_parameters"] = _Parameters(type(self).__name__, self._parameters)
        self._parameters.placements |= placements  # pyright: ignore[reportAttributeAccessIssue]
        for name, placement in placements.items():
            if (parameter := self._parameters.get(name)) is not None:
                set_placement(parameter, placement)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # torch may have replaced parameters, or swapped their attributes.
        for name, parameter in self._parameters.items():
            self._parameters[name] = parameter
        return self


class _Parameters(dict[str, Any]):
    """A module's parameters. A new one without a placement gets the one recorded for its name."""

    def __init__(self, owner: str = "", parameters=()):
        super().__init__(parameters)
        self.owner = owner
        self.placements: dict[str, Placement] = {}

    def __setitem__(self, name: str, parameter) -> None:
        placement = self.placements.get(name)
        if placement and parameter is not None and not hasattr(parameter, "placement"):
            set_placement(parameter, placement)
        super().__setitem__(name, parameter)

    def __delitem__(self, name: str) -> None:
        if name in self.placements:
            fault = f"{self.owner} no longer has its parameter {name!r}, whose placement is"
            way_out = "do not use weight_norm or another parametrization on it"
            raise ValueError(f"{fault} recorded by this name: {way_out}")
        super().__delitem__(name)
