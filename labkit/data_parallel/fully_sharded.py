"""ZeRO-3: each rank keeps a shard of every parameter, and a part of the model is whole only while it computes.

The parameters of a *unit*, such as one layer, lie side by side in a buffer; each of d ranks keeps 1/d of it. While
unit k computes, forward gathers k+1, and backward gathers k-1 and reduce-scatters the gradients of k+1. A rank sends
3(d-1)/d numbers per parameter and step; to average whole gradients by all-reduce takes 2(d-1)/d.
Sources: Rajbhandari et al., arXiv 1910.02054, section 5.3; Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277),
sections 3 and 4; torch's `fully_shard` for where the hooks are.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from labkit.data_parallel.replicas import Hook, Replica, copy_from_first, start_alike
from labkit.data_parallel.units import Unit, divide
from labkit.sizes import check_size


class FullyShardedDataParallel(Replica):
    """A module whose parameters, gradients and optimizer states are divided over the group.

    Outside of forward a parameter is this rank's piece of it, [m] with m from 0 to all its numbers. It stays the same
    object, so an optimizer made before still has it. Use one that treats numbers one by one (not Adafactor, Muon or
    L-BFGS). A gradient is a piece of the average that `DataParallel` makes; it travels in ``grad_dtype``, and is None
    if it is None on every rank. The norm of all gradients is a sum over ``group`` alone.

    All ranks run the same units in the same order; inside a unit they may use different parameters. What is in no unit
    is the root's: whole from the start of forward to the end of backward. A unit that is called twice is gathered and
    sent twice. Inside `no_sync`, gradients stay whole on each rank. While a unit's gradients are put side by side, they
    exist twice. All ranks start with the values of the first, and get its buffers with each average. On GPUs the host
    waits for no message, except to hear whether other ranks have a gradient for a parameter that has none here.

    Args:
        units: modules inside ``module``, in the order in which forward calls them.
        reshard_after_forward: free each unit after forward, and gather it again for backward. Otherwise it stays whole
            until its backward is done (with `no_sync`, the last one). A forward without backward needs no_grad.
        prefetch: gather this many units ahead: at most 1 + ``prefetch`` are whole at a time, and the root.
        replicate_group: the ranks with the same shard (hybrid sharding); gradients are averaged over it too.

    Raises:
        ValueError: before any communication, if units are not in the module, contain each other or share a parameter;
            on every rank, if the ranks' parameters differ. In ``backward(create_graph=True)``, and in forward, if a
            parameter was frozen or unfrozen since.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        units: Iterable[nn.Module],
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        replicate_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.prefetch = check_size("prefetch", prefetch, least=0)
        if any(isinstance(hook, Hook) for each in module.modules() for hook in each._forward_pre_hooks.values()):
            raise ValueError("this module is sharded already: load its state_dict into a new one, and shard that")
        divided = divide(module, list(units))
        self.module, self.reshard_after_forward = module, reshard_after_forward
        self._groups = [group] if replicate_group is None else [replicate_group, group]
        for each in self._groups:
            start_alike(module, each)
        self._units = [Unit(parameters, group) for parameters in divided.values()]
        self._flats = [flat for unit in self._units for flat in unit.flats]
        self._backward_order = [self._units[0], *self._units[:0:-1]]
        self._in_backward = False
        self._averages: list[Iterator[bool]] = []  # sent since the last sync_gradients
        for each, unit in zip(divided, self._units):
            each.register_forward_pre_hook(Hook(self._before_forward, unit), with_kwargs=True)
            each.register_forward_hook(Hook(self._after_forward, unit), with_kwargs=True, always_call=True)

    def forward(self, *args, **kwargs):
        if self._in_backward and torch._C._current_graph_task_id() == -1:  # the last backward failed: drop what it left
            self._averages, self._in_backward = [], False
            for unit in self._units:
                unit.reset()
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Send the gradients that are left and wait for all. Backward calls it, but not in `no_sync` or `sending`."""
        for unit in reversed(self._units):
            unit.free()
            if unit.owes:
                self._send(unit)
        while self._averages:
            self._receive()
        flats = [flat for flat in self._flats if flat.average is not None]
        if arrived := [each for flat in flats for each in flat.arrived]:
            flags = torch.ones(len(arrived), device=flats[0].shard.device)
            if not all(arrived):  # else the host need not wait
                flags.copy_(torch.tensor(arrived))
            for group in self._groups:
                dist.all_reduce(flags, group=group)
            anywhere = iter(arrived if all(arrived) else flags.tolist())
            for flat in flats:
                flat.give(anywhere)
        for group in self._groups:
            copy_from_first(self.module.buffers(), group)

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        return next(flat.whole[parameter] for flat in self._flats if parameter in flat.whole)

    def state_dict(self, *args, **kwargs):
        """Return the plain module's state dict, which it can load, whole on every rank. All ranks call this."""
        with self._whole():
            return copy.deepcopy(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict, strict: bool = True):
        """Load the plain module's state dict: each rank keeps its pieces. All ranks call this."""
        with self._whole():
            result = self.module.load_state_dict(state_dict, strict)
            for flat in self._flats:
                flat.shard.copy_(flat.mine)
        return result

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            for unit in self._units:
                self._gather(unit)
                unit.show(whole=True)
            yield
        finally:
            for unit in self._units:
                unit.show(whole=False)
                unit.free()

    def _apply(self, fn, recurse=True):
        raise ValueError("a sharded module cannot move or change its type: do that before you shard it")

    def _gather(self, unit: Unit, order=()) -> None:
        """Start to gather a unit, then those that come next in this order; wait for the first."""
        place = order.index(unit) if order else 0
        for each in [unit, *order[place + 1 : place + 1 + self.prefetch]]:
            for flat in each.flats:
                flat.gather()
        for flat in unit.flats:
            flat.wait()

    def _before_forward(self, unit: Unit, module, args, kwargs):
        self._gather(unit, () if self._in_backward else self._units)  # in backward to recompute, in a different order
        unit.show(whole=True)
        if unit is not self._units[0]:
            (args, kwargs), _ = _watch((args, kwargs), Hook(self._after_backward, unit), mode="all")
        return args, kwargs

    def _after_forward(self, unit: Unit, module, args, kwargs, output):
        unit.show(whole=False)  # also after an exception
        output, needs_backward = _watch(output, Hook(self._before_backward, unit), mode="any")
        needs_backward |= torch._C._current_graph_task_id() != -1  # computed again in backward, perhaps not to its end
        stays = needs_backward and (unit is self._units[0] or not self.reshard_after_forward)
        if not (stays or unit.in_backward):
            unit.free()
        return output

    def _before_backward(self, unit: Unit, grad) -> None:
        if torch.is_grad_enabled():
            raise ValueError("a sharded module has no backward(create_graph=True): use the plain module")
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)  # runs when this backward is done
        unit.in_backward = unit.owes = True
        self._gather(unit, self._backward_order)

    def _after_backward(self, unit: Unit, grads=None) -> None:
        unit.in_backward = False
        if self.reshard_after_forward or not self._accumulating:
            unit.free()
        if unit.owes and (self._sending or not self._accumulating):
            self._send(unit)

    def _end_backward(self) -> None:
        for unit in reversed(self._units):  # the root, and units whose inputs need no gradient, are still there
            self._after_backward(unit)
        if not (self._accumulating or self._sending):
            self.sync_gradients()
        self._in_backward = False

    def _send(self, unit: Unit) -> None:
        """Start to average a unit's gradients, after waiting for those sent before: whole ones must not pile up."""
        self._receive()
        unit.owes = False
        for flat in unit.flats:
            if flat.is_trained:
                self._averages.append(average := flat.averaging(self._groups, self._is_last))
                next(average)  # as far as its first message

    def _receive(self) -> None:
        self._averages = [average for average in self._averages if next(average, False)]


def _watch(tree, hook, mode: Literal["all", "any"]) -> tuple[Any, bool]:
    """Give each tensor at a unit's border a node where backward calls the hook. Return them, and whether there are any.

    A hook on the tensor itself would come too late: the unit below has one there as well.
    """

    def needs_gradient(x) -> bool:
        return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()

    tree = tree_map(lambda x: x.view_as(x) if needs_gradient(x) else x, tree)
    watched = list(filter(needs_gradient, tree_leaves(tree)))
    if watched:
        register_multi_grad_hook(watched, hook, mode=mode)
    return tree, bool(watched)
