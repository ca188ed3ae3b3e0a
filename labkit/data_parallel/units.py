"""Divides a module into units, whose parameters are materialized, gathered, freed and reduced
together.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from labkit.data_parallel.borders import refuse
from labkit.data_parallel.flat_parameter import FlatParameter, Form, Owners
from labkit.data_parallel.gradients import GroupsOf, in_buckets
from labkit.data_parallel.replicas import grad_dtype_of, materialize
from labkit.groups import local_device

Gradients = Sequence[torch.Tensor | None]


def divide(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, Owners]:
    """Return the parameters of the root (all that is in no unit) and of each unit."""
    names = {inner: name for name, inner in module.named_modules()}
    for number, unit in enumerate(units):
        if unit is module or unit not in names or type(unit).forward is nn.Module.forward:
            this = (
                f"units[{number}], a {type(unit).__name__}, is not a unit of this "
                f"{type(module).__name__}"
            )
            way_out = "name modules inside it that are called; instead of a list, name its layers"
            raise ValueError(f"{this}: {way_out}")
        others = units[:number] + units[number + 1 :]
        inner = [submodule for submodule in unit.modules() if submodule in others]
        if inner:
            both = f"units {names[unit]} and {names[inner[0]]} contain each other"
            raise ValueError(f"{both}: leave one of them out")

    in_a_unit = {inner for unit in units for inner in unit.modules()}
    divided: dict[nn.Module, Owners] = {}
    owners: dict[nn.Parameter, nn.Module] = {}
    full_names: dict[nn.Parameter, str] = {}
    for unit in [module, *units]:
        divided[unit] = {}
        unit_name = f"unit {names[unit]}" if names[unit] else "the root"
        for prefix, inner in unit.named_modules(prefix=names[unit]):
            if unit is module and inner in in_a_unit:
                continue
            for name, p in inner.named_parameters(recurse=False, remove_duplicate=False):
                full_name = f"{prefix}.{name} ({unit_name})".lstrip(".")
                if owners.setdefault(p, unit) is not unit:
                    way_out = "make one unit of a module that has both, or leave both to the root"
                    raise ValueError(
                        f"{full_names[p]} and {full_name} are one parameter in two units: {way_out}"
                    )
                full_names.setdefault(p, full_name)
                divided[unit].setdefault(p, []).append((inner, name))
    return divided


class GatherUnit(torch.autograd.Function):
    """A conjugate operator: forward gathers a unit's shards, backward reduces their gradients.

    Forward returns views of the gathered weights. Autograd calls backward when it has all their
    gradients, whatever the unit returns; ``reduce`` takes these, so the weights get none.
    """

    @staticmethod
    def forward(ctx, gather, reduce, *weights):
        gather()
        ctx.reduce = reduce
        ctx.set_materialize_grads(False)  # a weight that was not used has no gradient
        return tuple(weight.data for weight in weights)  # .data: memory that comes and goes

    @staticmethod
    def backward(ctx, *gradients):
        ctx.reduce(gradients)
        return None, None, *(None for _ in gradients)


class Unit:
    """Parameters that are gathered and freed together: one flat parameter for each kind (dtype,
    device, group).

    Meta tensors are materialized here, so a rank that makes units one by one holds one whole unit
    at a time.
    """

    def __init__(self, name: str, module: nn.Module, owners: Owners, groups: GroupsOf):
        self.name = f"unit {name}" if name else "the root"
        kinds = in_buckets(owners, math.inf)
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
        self.trained = [param for param in self.parameters if param.shard.requires_grad]
        self.free()
        self.show("shard")
        self.in_backward = self.has_unreduced_grads = False

    @property
    def version(self) -> int:
        """The version of the shards when they were last gathered."""
        return sum(flat.version for flat in self.flats)

    def free(self) -> None:
        for flat in self.flats:
            flat.free()

    def compute_with(self, gather: Callable[[], None], reduce: Callable) -> None:
        """Put views of the gathered weights into the modules; frozen ones need no operator."""
        self.show("unsharded")
        views = GatherUnit.apply(gather, reduce, *(param.unsharded for param in self.trained))
        for param, view in zip(self.trained, views):
            vars(view).update(vars(param.unsharded))
            param.show(view)

    def add_gradients(self, gradients: Gradients) -> None:
        for param, gradient in zip(self.trained, gradients):
            if gradient is not None:
                gradient = gradient.to_dense().to(grad_dtype_of(param.unsharded))
                # Not in place: autograd may use this tensor elsewhere too.
                param.grad = gradient if param.grad is None else param.grad + gradient

    def show(self, form: Form) -> None:
        """Put this form of the parameters into the modules."""
        for param in self.parameters:
            param.show(getattr(param, form))

    def refuse_to_return(self, output) -> None:
        freed = {flat.buffer.untyped_storage()._cdata for flat in self.flats}
        for x in tree_leaves(output):
            is_dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
            if is_dense and x.untyped_storage()._cdata in freed:
                way_out = "return what it computes with it, or leave its module to the root"
                rule = "returns one of its own parameters, which is freed now"
                refuse(f"{self.name} {rule}: {way_out}")

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
    if not all(has_grad):  # otherwise the host need not wait for a copy
        flags.copy_(torch.tensor(has_grad))
    for group in flats[0].groups:
        dist.all_reduce(flags, group=group)
    on_any_rank = iter(has_grad if all(has_grad) else flags.tolist())
    for flat in flats:
        flat.assign_grads(on_any_rank)
