"""What fully sharded data parallelism gathers and frees: a unit's parameters, side by side in a buffer.

A buffer of n numbers is cut in d equal parts, the ranks' shards, wherever that cuts a parameter. So one all-gather
fills the buffer as it is, without a copy, and one reduce-scatter takes its gradients.
Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277), sections 3.2.1 (flat parameters) and 4.2.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.communication import all_gather_single, reduce_scatter_single
from labkit.data_parallel.gradients import grad_dtype_of
from labkit.placement import FlatShard, placement_of, set_placement

ALIGNMENT_BYTES = 64  # each parameter starts at a multiple, as it would alone: products are as fast, and round alike
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]  # parameter -> each module that has it, and its name there


def divide(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, Places]:
    """Return the parameters of the root and of each unit."""
    names = {each: name for name, each in module.named_modules()}
    for number, unit in enumerate(units):
        if unit is module or unit not in names or type(unit).forward is nn.Module.forward:
            kind, whole = type(unit).__name__, type(module).__name__
            way_out = "name modules inside it that are called; instead of a list, name its layers"
            raise ValueError(f"units[{number}], a {kind}, is not a unit of this {whole}: {way_out}")
        if inner := [each for each in unit.modules() if each in units[:number] + units[number + 1 :]]:
            both = f"units {names[unit]} and {names[inner[0]]} contain each other"
            raise ValueError(f"{both}: leave one of them out")
    inside = {each for unit in units for each in unit.modules()}
    divided, owners = {}, {}
    for unit in [module, *units]:
        divided[unit] = {}
        for prefix, each in unit.named_modules(prefix=names[unit]):
            if unit is module and each in inside:
                continue
            for name, p in each.named_parameters(recurse=False, remove_duplicate=False):
                here = unit, f"{prefix}.{name} ({f'unit {names[unit]}' if names[unit] else 'the root'})".lstrip(".")
                there = owners.setdefault(p, here)
                if there[0] is not unit:
                    way_out = "make one unit of a module that has both, or leave both to the root"
                    raise ValueError(f"{there[1]} and {here[1]} are one parameter in two units: {way_out}")
                divided[unit].setdefault(p, []).append((each, name))
    return divided


class Unit:
    """Parameters that are gathered and freed together: one buffer per type and device, and others for frozen ones."""

    def __init__(self, places: Places, group: dist.ProcessGroup):
        kinds: dict[tuple, Places] = {}
        for p, at in places.items():
            kinds.setdefault((p.dtype, grad_dtype_of(p), p.device, p.requires_grad), {})[p] = at
        self.flats = [Flat(kind, group) for kind in kinds.values()]
        self.in_backward = self.owes = False  # gradients, to the other ranks

    def free(self) -> None:
        for flat in self.flats:
            flat.free()

    def show(self, whole: bool) -> None:
        """Let the modules have the parameters whole, or this rank's pieces."""
        for flat in self.flats:
            for p, places in flat.places.items():
                for module, name in places:
                    module._parameters[name] = flat.whole[p] if whole else p

    def reset(self) -> None:
        """Forget a backward that failed."""
        self.in_backward = self.owes = False
        self.free()
        for flat in self.flats:
            flat.partial = flat.average = None
            flat.arrived = [False] * len(flat.places)
            for whole in flat.whole.values():
                whole.grad = None


class SideBySide:
    """Parameters of one type in a ``buffer`` [n], of which this rank's shard [n/d] is ``mine``.

    A parameter lies at ``spans`` in the buffer; what this rank has of it lies at ``pieces`` in the shard.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        first, self.group, self.grad_dtype = parameters[0], group, grad_dtype_of(parameters[0])
        align = ALIGNMENT_BYTES // first.element_size()
        *starts, end = accumulate((-(-p.numel() // align) * align for p in parameters), initial=0)
        size = max(1, -(-end // group.size()))
        self.begin = size * group.rank()
        self.buffer = first.detach().new_zeros(size * group.size())
        self.mine = self.buffer[self.begin :][:size]
        self.spans: dict[nn.Parameter, slice] = {}
        self.pieces: dict[nn.Parameter, slice] = {}
        for p, start in zip(parameters, starts):
            stop = start + p.numel()
            self.buffer[start:stop].view_as(p).copy_(p.detach())
            self.spans[p] = slice(start, stop)
            self.pieces[p] = slice(*(min(max(each - self.begin, 0), size) for each in (start, stop)))

    def gradients(self, parameters: Iterable[nn.Parameter], num_replicas: int) -> torch.Tensor:
        """Return the gradients of these side by side [n], divided before the sum, which then cannot overflow."""
        gradients = torch.empty_like(self.buffer, dtype=self.grad_dtype)
        for p, span in zip(parameters, self.spans.values()):
            view = gradients[span].view_as(p)
            if p.grad is None:
                view.zero_()
            else:
                torch.div(p.grad.to_dense(), num_replicas, out=view)
        return gradients


class Flat(SideBySide):
    """A buffer that has memory only while it is whole, and a ``shard`` of its own, which stays.

    Parameters are views of the shard, ``whole`` of the buffer. The latter are what the module computes with and what
    autograd saves for backward, so they stay while their memory comes and goes.
    """

    def __init__(self, places: Places, group: dist.ProcessGroup):
        super().__init__(list(places), group)
        self.places, self.is_trained = places, next(iter(places)).requires_grad
        self.shard, self.whole = self.mine.clone(), {}
        for p, span in self.spans.items():
            view = self.buffer[span].view_as(p).data  # .data: autograd does not see it change with the buffer
            self.whole[p] = whole = nn.Parameter(view, requires_grad=self.is_trained)
            if self.grad_dtype != p.dtype:
                whole.grad_dtype = self.grad_dtype
            flat = FlatShard(p.shape, max(self.begin - span.start, 0), group)
            set_placement(p, replace(placement_of(p), flat=flat))
            p.grad, p.data = None, self.shard[self.pieces[p]]
        self.arriving, self.version = None, -1
        self.partial: torch.Tensor | None = None  # the sum of this step's gradients so far, before replicas add theirs
        self.average: torch.Tensor | None = None  # and after it
        self.arrived = [False] * len(places)  # which parameters got a gradient here
        self.free()

    def gather(self) -> None:
        """Start to gather the shards, unless they are here or on their way, and ours has not been changed since."""
        for p, [(module, name), *_] in self.places.items():
            if p.requires_grad != self.is_trained:
                now = "trained" if p.requires_grad else "frozen"
                raise ValueError(f"{name} of a {type(module).__name__} is now {now}: change that before you shard it")
        version = sum(p._version for p in self.places)  # every optimizer increments it, except fused ones
        memory = self.buffer.untyped_storage()
        if memory.size() == 0 or version != self.version:
            self.free()
            memory.resize_(self.buffer.nbytes)
            self.arriving = all_gather_single(self.buffer, self.shard, group=self.group, async_op=True)
            self.version = version

    def wait(self) -> None:
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None

    def free(self) -> None:
        self.wait()
        self.buffer.untyped_storage().resize_(0)

    def averaging(self, groups: list[dist.ProcessGroup], is_last: bool) -> Iterator[bool]:
        """Bring the average of the gradients to this rank's shard; yield wherever a message travels."""
        wholes = self.whole.values()
        self.arrived = [before or p.grad is not None for before, p in zip(self.arrived, wholes)]
        gradients = self.gradients(wholes, math.prod(each.size() for each in groups))
        for p in wholes:
            p.grad = None
        shard = torch.empty_like(self.shard, dtype=self.grad_dtype)
        travelling: Any = reduce_scatter_single(shard, gradients, group=self.group, async_op=True)
        del gradients  # free as soon as they have arrived
        yield True
        travelling.wait()
        if self.partial is not None:
            shard += self.partial
        self.partial = None if is_last else shard
        if is_last and len(groups) == 2:
            travelling = dist.all_reduce(shard, group=groups[0], async_op=True)
            yield True
            travelling.wait()
        if is_last:
            self.average = shard if self.average is None else self.average.add_(shard)

    def give(self, anywhere: Iterator) -> None:
        """Add the average to the gradients of the parameters that have one anywhere."""
        assert self.average is not None
        for (p, piece), has_gradient in zip(self.pieces.items(), anywhere):
            if has_gradient:
                p.grad = self.average[piece] if p.grad is None else p.grad.add_(self.average[piece])
        self.average, self.arrived = None, [False] * len(self.places)
