"""What fully sharded data parallelism gathers and frees: a unit's parameters, side by side in a buffer.

A buffer of n numbers is cut in d equal parts, the ranks' shards, wherever that cuts a parameter. So one all-gather
fills the buffer as it is, without a copy, and one reduce-scatter takes its gradients.
Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277), sections 3.2.1 (flat parameters) and 4.2.
"""

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.communication import all_gather_single, reduce_scatter_single
from labkit.data_parallel.gradients import grad_dtype_of
from labkit.data_parallel.replicas import copy_from_first

ALIGNMENT_BYTES = 64  # each parameter starts at a multiple, as it would alone: products are as fast, and round alike
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]  # of parameters: the modules that have them, and names there


def divide(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, Places]:
    """Return the parameters of the root and of each unit."""
    names = {each: name for name, each in module.named_modules()}
    for number, unit in enumerate(units):
        if unit is module or unit not in names or type(unit).forward is nn.Module.forward:
            kind, whole = type(unit).__name__, type(module).__name__
            way_out = "name modules inside it that are called, and of a list its layers"
            raise ValueError(f"units[{number}], a {kind}, is not a unit of this {whole}: {way_out}")
        if inner := [each for each in unit.modules() if each in units[:number] + units[number + 1 :]]:
            both = f"units {names[unit]} and {names[inner[0]]} contain each other"
            raise ValueError(f"{both}: leave one of them out")
    inside = {each for unit in units for each in unit.modules()}
    divided, owners = {}, {}
    for unit in [module, *units]:
        divided[unit] = {}
        for prefix, each in unit.named_modules(prefix=names[unit]):
            parameters = {} if unit is module and each in inside else each._parameters
            for name, p in parameters.items():
                here = unit, f"{prefix}.{name} ({f'unit {names[unit]}' if names[unit] else 'the root'})".lstrip(".")
                if p is not None and (there := owners.setdefault(p, here))[0] is not unit:
                    way_out = "make one unit of a module that has both, or leave both to the root"
                    raise ValueError(f"{there[1]} and {here[1]} are one parameter in two units: {way_out}")
                if p is not None:
                    divided[unit].setdefault(p, []).append((each, name))
    return divided


class Unit:
    """What is gathered and freed together: a buffer for each type of parameters, and for frozen ones."""

    def __init__(self, places: Places, groups: list[dist.ProcessGroup]):
        kinds: dict[tuple, Places] = {}
        for p, at in places.items():
            kinds.setdefault((p.dtype, grad_dtype_of(p), p.device, p.requires_grad), {})[p] = at
        self.flats = [Flat(kind, groups) for kind in kinds.values()]
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


class Flat:
    """Parameters side by side: this rank's ``shard`` [n/d], and the ``buffer`` [n], which has memory while it is whole.

    Parameters are views of the shard, ``whole`` of the buffer. The latter are what the module computes with and what
    autograd saves for backward, so they stay while their memory comes and goes.
    """

    def __init__(self, places: Places, groups: list[dist.ProcessGroup]):
        first, self.places, self.group = next(iter(places)), places, groups[-1]
        self.is_trained, self.grad_dtype = first.requires_grad, grad_dtype_of(first)
        size, self.spans, self.pieces = side_by_side(list(places), self.group)
        self.buffer = first.detach().new_zeros(size * self.group.size())
        begin = size * self.group.rank()
        self.mine = self.buffer[begin : begin + size]
        self.whole = {}
        for p, span in self.spans.items():
            view = self.buffer[span].view_as(p).data  # of which autograd does not see that it changes with the buffer
            self.whole[p] = whole = nn.Parameter(view.copy_(p.detach()), requires_grad=self.is_trained)
            p.piece = p.shape, max(begin - span.start, 0)  # pyright: ignore[reportAttributeAccessIssue]
            if self.grad_dtype != p.dtype:
                whole.grad_dtype = self.grad_dtype
        for each in groups:
            copy_from_first([self.buffer], each)
        self.shard = self.mine.clone()
        for p, piece in self.pieces.items():
            p.grad, p.data = None, self.shard[piece]
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
        version = sum(p._version for p in self.places)  # all optimizers count it up, but for fused ones
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

    def give(self, anywhere: Iterator) -> None:
        """Add the average to the gradients of the parameters that have one anywhere."""
        assert self.average is not None
        for (p, piece), has_gradient in zip(self.pieces.items(), anywhere):
            if has_gradient:
                p.grad = self.average[piece] if p.grad is None else p.grad.add_(self.average[piece])
        self.average, self.arrived = None, [False] * len(self.places)


def side_by_side(
    parameters: list[nn.Parameter], group: dist.ProcessGroup
) -> tuple[int, dict[nn.Parameter, slice], dict[nn.Parameter, slice]]:
    """Return a shard's size, and where each parameter lies: in a buffer of d shards, and its piece in this rank's."""
    align = ALIGNMENT_BYTES // parameters[0].element_size()
    *starts, end = accumulate((-(-p.numel() // align) * align for p in parameters), initial=0)
    size = max(1, -(-end // group.size()))
    spans = {p: slice(start, start + p.numel()) for p, start in zip(parameters, starts)}
    begin = size * group.rank()
    pieces = {
        p: slice(*(min(max(each - begin, 0), size) for each in (span.start, span.stop))) for p, span in spans.items()
    }
    return size, spans, pieces


def piece_of(parameter: nn.Parameter) -> tuple[torch.Size, int]:
    """Return the shape that a sharded parameter has whole, and which of its numbers in a row is the first here."""
    return getattr(parameter, "piece", (parameter.shape, 0))


class Average:
    """The average of a buffer's gradients, on its way to this rank's shard [n/d]."""

    def __init__(self, flat: Flat, groups: list[dist.ProcessGroup], is_last: bool):
        self.flat, self.is_last, self.is_scattered = flat, is_last, False
        self.replicate_group = groups[0] if len(groups) == 2 else None
        gradients = torch.empty_like(flat.buffer, dtype=flat.grad_dtype)
        for number, (p, whole) in enumerate(flat.whole.items()):
            view = gradients[flat.spans[p]].view_as(whole)
            if whole.grad is None:
                view.zero_()
            else:  # divide before the sum, which then cannot overflow
                torch.div(whole.grad.to_dense(), math.prod(each.size() for each in groups), out=view)
                flat.arrived[number] = True
            whole.grad = None
        self.shard = torch.empty_like(flat.shard, dtype=flat.grad_dtype)
        self.travelling: Any = reduce_scatter_single(self.shard, gradients, group=flat.group, async_op=True)

    def receive(self) -> bool:
        """Wait for what travels; return whether more does: after the last shards of a step, the sum over replicas."""
        flat = self.flat
        self.travelling.wait()
        if not self.is_scattered:
            self.is_scattered = True
            if flat.partial is not None:
                self.shard += flat.partial
            flat.partial = None if self.is_last else self.shard
            if self.is_last and self.replicate_group:
                self.travelling = dist.all_reduce(self.shard, group=self.replicate_group, async_op=True)
                return True
        if self.is_last:
            flat.average = self.shard if flat.average is None else flat.average.add_(self.shard)
        return False
