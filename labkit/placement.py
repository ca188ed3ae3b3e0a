"""Records for every parameter how it lies among the ranks: which part a rank has, and who has the same part.

The record is made once, where the parameter is made (`place`), and read by all who deal with whole parameters or
gradients: data parallelism, the gradient norm, checkpoints. It stays with the parameter's name in its module, so that
what torch puts in a parameter's place (`to_empty`, `load_state_dict(assign=True)`, `deepcopy`, `fully_shard`) has it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Shard:
    """How a dim is divided among the ranks of a group: by `labkit.partition.chunks_of_rank`, the last part padded."""

    dim: int
    whole_size: int  # without padding
    group: dist.ProcessGroup
    stride: int = 1


@dataclass(frozen=True)
class FlatShard:
    """What fully sharding leaves to a rank: some consecutive numbers of the flattened parameter."""

    shape: torch.Size  # of the parameter before
    start: int  # the flat index of this rank's first number
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Placement:
    """How a parameter lies among the ranks. The default: every data-parallel replica has the whole."""

    shards: tuple[Shard, ...] = ()  # the dims that are divided
    copy_groups: tuple[dist.ProcessGroup, ...] = ()  # beside the replicas: groups in which every rank has the same part
    replica_group: dist.ProcessGroup | None = None  # over which gradients are averaged; None: the wrapper's own group
    grad_divisor: int | None = None  # what the sum of the gradients is divided by; None: the number of replicas
    defer_grad_reduce: bool = False  # the tensor group's gradients are added up at the end of the step, by the trainer
    flat: FlatShard | None = None


WHOLE = Placement()


def place(module: nn.Module, **placements: Placement) -> None:
    """Record the placements of a module's own parameters, by name, also for what takes their place later."""
    if not isinstance(module._parameters, _PlacedParameters):
        vars(module)["_parameters"] = _PlacedParameters(module._parameters)
    module._parameters.placements |= placements  # pyright: ignore[reportAttributeAccessIssue]
    for name, placement in placements.items():
        if (parameter := module._parameters[name]) is not None:
            set_placement(parameter, placement)


def placement_of(parameter: torch.Tensor) -> Placement:
    """Return a parameter's placement."""
    return getattr(parameter, "placement", WHOLE)


def set_placement(parameter: torch.Tensor, placement: Placement) -> None:
    """Give one parameter a placement, such as that of the flat shard which has taken its place."""
    parameter.placement = placement  # pyright: ignore[reportAttributeAccessIssue]


class _PlacedParameters(dict[str, Any]):
    """A module's parameters by name. One without a placement gets the one of its name."""

    def __init__(self, parameters=()):
        super().__init__(parameters)
        self.placements: dict[str, Placement] = {}

    def __setitem__(self, name: str, parameter) -> None:
        if parameter is not None and name in self.placements and not hasattr(parameter, "placement"):
            set_placement(parameter, self.placements[name])
        super().__setitem__(name, parameter)

    def __delitem__(self, name: str) -> None:
        if name in self.placements:
            gone = f"the parameter {name!r} is placed among the ranks and cannot be replaced by something else"
            raise ValueError(f"{gone}: do not use weight_norm or another parametrization on it")
        super().__delitem__(name)
