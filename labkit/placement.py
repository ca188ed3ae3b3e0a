"""Records how each parameter is sharded: which shard of it a rank has, and which ranks have the
same one.

A layer has a table of its own parameters, ``placements``: by name, how each is sharded. A parameter
that is in no table is the same on all data-parallel ranks, and on no others. `placements` gives the
tables of all modules of a model together, by full names:

    model = nn.Sequential(ColumnParallelLinear(4, 8, groups.tp), nn.Linear(8, 4))
    placements(model)      {"0.weight": Placement((Shard(dim=0, unsharded_size=8, ...),)),
                            "0.bias": the same, "1.weight": Placement(), "1.bias": Placement()}

Tables belong to modules, so they stay when parameters are replaced, and wrappers change nothing but
the full names. Only FSDP has something to add: it writes into the tables which numbers of a
flattened parameter a rank has. Data parallelism, the gradient norm and checkpoints read them.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups


@dataclass(frozen=True)
class Shard:
    """How one dim is divided among the ranks of a group: by `labkit.partition.chunks_of_rank`,
    padded at the end. Megatron-LM has ``partition_dim`` and ``partition_stride``.
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
    """How a parameter is sharded and replicated over all groups. (DTensor has one placement for
    each dim of a mesh.)

    By default every data-parallel replica has all of it.
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


PlacedParameters = dict[nn.Parameter, Placement]  # in the order of ``model.parameters()``


def placements(*models: nn.Module) -> dict[str, Placement]:
    """Return the placement of each parameter of a model, or of a rank's chunks of one, by its name.

    Raises:
        ValueError: a module no longer has a parameter that its table names.
    """
    found = {}
    for model in models:
        for prefix, module in model.named_modules():
            _check_table(module)
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
                found[f"{prefix}.{name}".lstrip(".")] = placement_of(module, name)
    return found


def _check_table(module: nn.Module) -> None:
    for name in vars(module).get("placements", {}):
        if name not in module._parameters:
            fault = f"{type(module).__name__} no longer has its parameter {name!r}, whose placement"
            way_out = "do not use weight_norm or another parametrization on it"
            raise ValueError(f"{fault} is recorded by this name: {way_out}")


def placement_of(module: nn.Module, name: str) -> Placement:
    """Return the placement of one of a module's own parameters."""
    return vars(module).get("placements", {}).get(name, Placement())


def set_placement(module: nn.Module, name: str, placement: Placement) -> None:
    """Replace the placement of one of a module's own parameters."""
    vars(module).setdefault("placements", {})[name] = placement


def placed_parameters(*models: nn.Module) -> PlacedParameters:
    """Return the parameters of a model, or of a rank's chunks of one, each with its placement."""
    placed: PlacedParameters = {}
    for model in models:  # chunks may have equal names
        by_name = placements(model)
        placed |= {parameter: by_name[name] for name, parameter in model.named_parameters()}
    return placed


def shape_before_flat(tensor: torch.Tensor, placement: Placement) -> torch.Size:
    """Return the shape of a parameter, or under FSDP the one before it was flattened."""
    return tensor.shape if placement.flat is None else placement.flat.shape


def unsharded_size(tensor: torch.Tensor, placement: Placement) -> list[int]:
    """Return the size of the unsharded tensor that this one is a shard of, without padding."""
    sizes = {shard.dim: shard.unsharded_size for shard in placement.shards}
    return [sizes.get(dim, size) for dim, size in enumerate(shape_before_flat(tensor, placement))]


def copy_groups_of(placement: Placement, groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """Return the groups, data-parallel ones included, whose ranks all have the same shard."""
    if placement.flat:
        return [*placement.copy_groups, *placement.flat.replicas]
    return [*placement.copy_groups, placement.replica_group or groups.dp_cp]
