"""Divides a module into units, whose parameters are materialized, gathered, freed and reduced
together.
"""

import math
from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from labkit.data_parallel.borders import SavedTensors, lies_in, refuse
from labkit.data_parallel.flat_parameter import FlatParameter, Form, Owners
from labkit.data_parallel.gradients import GroupsOf, in_buckets
from labkit.data_parallel.replicas import materialize
from labkit.groups import local_device
from labkit.placement import placement_of


def divide(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, Owners]:
    """Return the parameters of the root (all that is in no unit) and of each unit."""
    names = {submodule: name for name, submodule in module.named_modules()}
    _check_units(module, units, names)
    in_a_unit = {submodule for unit in units for submodule in unit.modules()}
    divided: dict[nn.Module, Owners] = {}
    first_seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}  # its unit, and its name there
    for unit in [module, *units]:
        divided[unit] = {}
        unit_name = f"unit {names[unit]}" if names[unit] else "the root"
        for prefix, submodule in unit.named_modules(prefix=names[unit]):
            if unit is module and submodule in in_a_unit:
                continue
            for name, p in submodule.named_parameters(recurse=False, remove_duplicate=False):
                full_name = f"{prefix}.{name} ({unit_name})".lstrip(".")
                first_unit, first_name = first_seen.setdefault(p, (unit, full_name))
                if first_unit is not unit:
                    fault = f"{first_name} and {full_name} are one parameter in two units"
                    way_out = "make one unit of a module that has both, or leave both to the root"
                    raise ValueError(f"{fault}: {way_out}")
                divided[unit].setdefault(p, []).append((submodule, name))
    return divided


def _check_units(module: nn.Module, units: list[nn.Module], names: dict[nn.Module, str]) -> None:
    """Raise a ValueError unless units are modules inside ``module`` that somebody calls, and none
    contains another.
    """
    for number, unit in enumerate(units):
        if unit is module or unit not in names or type(unit).forward is nn.Module.forward:
            kind = type(unit).__name__
            fault = f"units[{number}], a {kind}, is not a unit of this {type(module).__name__}"
            way_out = "name modules inside it that are called; instead of a list, name its layers"
            raise ValueError(f"{fault}: {way_out}")
        others = units[:number] + units[number + 1 :]
        for submodule in unit.modules():
            if submodule in others:
                fault = f"units {names[unit]} and {names[submodule]} contain each other"
                raise ValueError(f"{fault}: leave one of them out")


class Unit:
    """Parameters that are gathered and freed together: one flat parameter for each kind (dtype,
    device, group).

    Communication, when a unit is made: each group's first rank broadcasts the buffer, n numbers;
    then each rank keeps its shard.

    Meta tensors are materialized here, so a rank that makes units one by one holds one whole unit
    at a time.
    """

    def __init__(self, name: str, module: nn.Module, owners: Owners, groups: GroupsOf):
        self.name = f"unit {name}" if name else "the root"
        placed = {param: placement_of(*places[0]) for param, places in owners.items()}
        kinds = in_buckets(placed, math.inf)
        self.flats = [
            FlatParameter({p: owners[p] for p in kind}, groups, self.name) for kind in kinds
        ]
        self.parameters = [param for flat in self.flats for param in flat.parameters]
        unsharded = [param.unsharded for param in self.parameters]
        materialize(module, local_device(), dict(zip(chain(*kinds), unsharded)))
        for flat in self.flats:
            for group in flat.groups:
                dist.broadcast(flat.buffer, group_src=0, group=group)
            flat.keep_shard()
        self.buffers = [flat.buffer for flat in self.flats]
        self.free()
        self.show("shard")
        self.in_backward = self.has_unreduced_grads = False
        self.saved_tensors: SavedTensors | None = None  # while forward computes

    @property
    def version(self) -> int:
        """The version of the shards when they were last gathered."""
        return sum(flat.version for flat in self.flats)

    def free(self) -> None:
        for flat in self.flats:
            flat.free()

    def show(self, form: Form) -> None:
        """Put this form of the parameters into the modules."""
        for param in self.parameters:
            for module, name in param.owners:
                module._parameters[name] = getattr(param, form)

    def watch_saved_tensors(self, before_use: Callable[[], None]) -> None:
        self.saved_tensors = SavedTensors(self.buffers, before_use)
        self.saved_tensors.__enter__()

    def unwatch_saved_tensors(self) -> None:
        if self.saved_tensors is not None:
            self.saved_tensors.__exit__()
            self.saved_tensors = None

    def refuse_to_return(self, output) -> None:
        if any(lies_in(x, self.buffers) for x in tree_leaves(output)):
            way_out = "return what it computes with it, or leave its module to the root"
            refuse(f"{self.name} returns one of its own parameters, which is freed now: {way_out}")

    def reset(self) -> None:
        """Discard the state of a failed backward."""
        self.in_backward = self.has_unreduced_grads = False
        self.free()
        for flat in self.flats:
            flat.reset()


def assign_grads(flats: list[FlatParameter]) -> None:
    """Assign averages to the parameters with a gradient on any rank.

    The flat parameters share their groups.
    """
    has_grad = [param.has_grad for flat in flats for param in flat.parameters]
    flags = torch.ones(len(has_grad), device=flats[0].shard.device)
    has_all = all(has_grad)
    if not has_all:
        flags.copy_(torch.tensor(has_grad))
    for group in flats[0].groups:
        dist.all_reduce(flags, group=group)
    if not has_all:  # otherwise the host need not wait for the sum
        has_grad = flags.tolist()
    on_any_rank = iter(has_grad)
    for flat in flats:
        flat.assign_grads(on_any_rank)
