"""Shards parameters, gradients and optimizer states (ZeRO-3): a unit of the model is whole only
while it computes.

The parameters of a *unit*, such as one layer, are flattened into a buffer, of which each of d ranks
keeps 1/d. While unit k computes, forward gathers k+1, and backward gathers k-1 and reduce-scatters
the gradients of k+1. A rank sends 3(d-1)/d numbers per parameter and step; plain data parallelism,
by ring all-reduce, sends 2(d-1)/d.
Sources: arXiv 1910.02054, section 5.3; "PyTorch FSDP", arXiv 2304.11277, sections 3 and 4; torch's
`fully_shard`.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.data_parallel.borders import (
    SavedTensors,
    any_requires_grad,
    in_backward,
    refuse,
)
from labkit.data_parallel.flat_parameter import FlatParameter, Form
from labkit.data_parallel.gradients import GroupsOf
from labkit.data_parallel.replicas import (
    DataParallelBase,
    GradSync,
    Hook,
    check_replicas,
    copy_from_first,
)
from labkit.data_parallel.units import Gradients, Unit, assign_grads, divide
from labkit.sizes import check_size


@dataclass(eq=False)
class Run:
    """One forward of a unit, which backward comes to after all later ones."""

    unit: Unit
    version: int = -1  # of the shards that were gathered


class FullyShardedDataParallel(DataParallelBase):
    """A module whose parameters, gradients and optimizer states are divided over the group.

    Outside of forward a parameter is this rank's flat shard of it, possibly empty: the same object
    as before, unless that was on the meta device. Use an element-wise optimizer (not Adafactor,
    Muon or L-BFGS). A gradient is a shard of the average that `DataParallel` makes, and None if it
    is None on every rank.

    All ranks run the same units in the same order; inside a unit they may use different parameters.
    Parameters in no unit belong to the root, which is whole from the start of forward to the end of
    backward. Inside `no_sync`, each rank keeps whole gradients. All ranks start with the values of
    the first, and get its buffers with each average. On GPUs the host synchronizes only if a
    parameter has no gradient here, to learn whether another rank has one.

    To autograd a unit is a conjugate operator, as in tensor parallelism: it gathers its shards
    forward, and reduces their gradients backward, when autograd has all of them. A unit's backward
    starts when autograd first needs a tensor that it saved. Called twice, it is reduced twice.
    A checkpoint inside a unit must call a module of it: only then are parameters gathered again.

    Args:
        units: modules inside ``module``, in the order in which forward calls them.
        reshard_after_forward: free each unit after forward, and gather it again for backward.
            Otherwise it stays whole until its backward is done (with `no_sync`, the last one). A
            forward without backward needs no_grad.
        prefetch: gather this many units ahead: at most 1 + ``prefetch`` and the root are whole at a
            time.
        replicate_group: the ranks with the same shard (hybrid sharding); gradients are averaged
            over it too.
        own_groups: for each ``replica_group`` of parameters, the replicate and the shard
            group to use for them.

    Raises:
        ValueError: before any communication, if units are not in the module, contain each other or
            share a parameter; on every rank, if the ranks' parameters differ. In forward or
            backward, if a parameter is used outside its unit, has been frozen or unfrozen, or has
            changed since forward. In ``backward(create_graph=True)``.
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
        own_groups: GroupsOf | None = None,
    ):
        super().__init__(reduces_whole_units=True)
        self.prefetch = check_size("prefetch", prefetch, least=0)
        if any(
            isinstance(hook, Hook)
            for submodule in module.modules()
            for hook in submodule._forward_pre_hooks.values()
        ):
            raise ValueError(
                "this module is sharded already: load its state_dict into a new one, and shard that"
            )
        divided = divide(module, list(units))
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.groups = (group,) if replicate_group is None else (replicate_group, group)
        check_replicas(module, *self.groups)
        names = {submodule: name for name, submodule in module.named_modules()}
        groups_of: GroupsOf = {None: self.groups, **(own_groups or {})}
        # The root last: its module contains the units, which are materialized by then.
        made = {
            unit_module: Unit(names[unit_module], unit_module, owners, groups_of)
            for unit_module, owners in reversed(divided.items())
        }
        self._units = [*reversed(made.values())]
        self._root = made[module]
        self._backward_order = [self._root, *self._units[:0:-1]]
        self._flats = [flat for unit in self._units for flat in unit.flats]
        self._reducing: list[FlatParameter] = []  # whose reduce-scatters are in flight
        # Of units that do not compute; "missing" during the root's forward.
        self._idle_form: Form = "shard"
        copy_from_first(module.buffers(), *self.groups)
        self._runs: list[Run] = []  # of the last forward, which backward has not come to
        self._entered: list[Run] = []  # of the forward that backward is in
        self._hooks: list[SavedTensors] = []  # of the units that compute
        self._shards = {param.shard for flat in self._flats for param in flat.parameters}
        for unit_module, unit in made.items():
            unit_module.register_forward_pre_hook(
                Hook(self._before_forward, unit), with_kwargs=True
            )
            unit_module.register_forward_hook(Hook(self._after_forward, unit), always_call=True)
        weakref.finalize(
            self, register_optimizer_step_post_hook(Hook(self._after_optimizer_step)).remove
        )

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def sync_gradients(self) -> None:
        """Reduce what is left and wait for all gradients.

        Backward calls it, but not in `no_sync` or `reducing`.
        """
        for unit in reversed(self._units):
            unit.free()
            if unit.has_unreduced_grads:
                self._reduce(unit)
        self._finish_reducing()
        for flat in self._flats:
            flat.start_average()
        for flat in self._flats:
            flat.finish_average()
        flats = [flat for flat in self._flats if flat.average is not None]
        for groups in dict.fromkeys(flat.groups for flat in flats):
            assign_grads([flat for flat in flats if flat.groups == groups])
        copy_from_first(self.module.buffers(), *self.groups)

    def state_dict(self, *args, **kwargs):
        """Return the plain module's state dict, whole on every rank. All ranks call this."""
        with self._all_unsharded():
            return copy.deepcopy(self.module.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict, strict: bool = True):
        """Load the plain module's state dict: each rank keeps its shards. All ranks call this."""
        with self._all_unsharded():
            result = self.module.load_state_dict(state_dict, strict)
            for flat in self._flats:
                flat.keep_shard()
        return result

    @contextmanager
    def _all_unsharded(self) -> Iterator[None]:
        try:
            for unit in self._units:
                self._gather(unit, refresh=True)
                unit.show("unsharded")
            yield
        finally:
            for unit in self._units:
                unit.show("shard")
                unit.free()

    def _apply(self, fn, recurse=True):
        raise ValueError(
            "a sharded module cannot move or change its type: do that before you shard it"
        )

    def _gather(self, unit: Unit, order: Sequence[Unit] = (), *, refresh: bool = False) -> None:
        """Gather a unit, and start to gather the next ones in this order."""
        ahead = order[order.index(unit) + 1 :][: self.prefetch] if order else ()
        for gathered in (unit, *ahead):
            for flat in gathered.flats:
                flat.gather(refresh=refresh)
        for flat in unit.flats:
            flat.wait()

    def _begin_forward(self) -> None:
        self._discard_failed_backward()
        self._idle_form = "missing"
        self._runs = []
        while self._hooks:  # the last forward was interrupted
            self._hooks.pop().__exit__()
        for unit in self._units:
            unit.show("missing")

    def _before_forward(self, unit: Unit, module, args, kwargs) -> None:
        if unit is self._root and not in_backward():
            self._begin_forward()
        runs = self._runs
        gather = partial(self._gather, unit, self._units, refresh=True)
        if in_backward():  # recomputation, in a different order than forward
            self._begin_backward()
            unit.in_backward = True
            runs = []
            gather = partial(self._gather, unit)
        run = Run(unit)
        if torch.is_grad_enabled() and (unit.trained or any_requires_grad(args, kwargs)):
            runs.append(run)
        unit.compute_with(gather, partial(self._reduce_run, runs, run))
        run.version = unit.version
        self._hooks.append(SavedTensors(partial(self._enter, runs, run)))
        self._hooks[-1].__enter__()

    def _after_forward(self, unit: Unit, module, args, output) -> None:
        self._hooks.pop().__exit__()  # also after an exception
        if in_backward():
            return
        is_root = unit is self._root
        if is_root:
            self._idle_form = "shard"
        for idle in self._units if is_root else (unit,):
            idle.show(self._idle_form)
        has_no_backward = output is None or not torch.is_grad_enabled()
        if has_no_backward or (self.reshard_after_forward and not is_root):
            unit.refuse_to_return(output)
            unit.free()

    def _enter(self, runs: list[Run], run: Run) -> None:
        """Gather a unit for backward, which needs what this run saved, or has all its gradients."""
        if torch.is_grad_enabled():
            refuse("a sharded module has no backward(create_graph=True): use the plain module")
        self._begin_backward()
        unit = run.unit
        if unit.in_backward:
            return
        if run in runs and unit is not self._root:
            self._entered = runs
            while runs[-1] is not run:  # they get no gradients, but on other ranks they may
                self._leave(runs.pop().unit)
        unit.in_backward = True
        with torch.enable_grad():  # for what a checkpoint inside the unit computes again
            gather = partial(self._gather, unit, self._backward_order)
            unit.compute_with(gather, unit.add_gradients)
        if unit.version != run.version:
            rule = f"parameters of {unit.name} have changed between forward and backward"
            refuse(f"{rule}: call backward before a step")

    def _reduce_run(self, runs: list[Run], run: Run, gradients: Gradients) -> None:
        """Reduce the gradients of a run, all of which autograd has."""
        if run not in runs:  # recomputed, or backward has come to it before
            runs.append(run)
        self._enter(runs, run)
        run.unit.add_gradients(gradients)
        while run in runs:
            self._leave(runs.pop().unit)

    def _leave(self, unit: Unit) -> None:
        """Free a unit after its part of backward, and reduce its gradients.

        All ranks send the same messages, so it is gathered even if it got no gradient here.
        """
        if not unit.in_backward:
            self._gather(unit, self._backward_order)
        unit.in_backward = False
        unit.show(self._idle_form)
        if self.reshard_after_forward or self._grad_mode is GradSync.AVERAGE_AND_WAIT:
            unit.free()
        unit.has_unreduced_grads = True
        if self._grad_mode is not GradSync.ACCUMULATE:
            self._reduce(unit)

    def _end_backward(self) -> None:
        while self._entered:
            self._leave(self._entered.pop().unit)
        for unit in reversed(self._units):
            if unit.in_backward:  # recomputed, but it got no gradient
                self._leave(unit)
        super()._end_backward()

    def _backward_failed(self, at_end: weakref.ref) -> None:
        for unit in self._units:
            unit.show("shard")

    def _reset(self) -> None:
        self._reducing = []
        self._entered = []
        for unit in self._units:
            unit.reset()

    def _reduce(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients; wait for the previous ones first, to bound memory."""
        self._finish_reducing()
        unit.has_unreduced_grads = False
        # Otherwise more is to come.
        self._averages = self._grad_mode in (GradSync.AVERAGE, GradSync.AVERAGE_AND_WAIT)
        self._reducing = [flat for flat in unit.flats if flat.is_trained]
        for flat in self._reducing:
            flat.finish_average()
            flat.start_reduce()

    def _finish_reducing(self) -> None:
        for flat in self._reducing:
            flat.finish_reduce()
            if self._averages:
                flat.start_average()
        self._reducing = []

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if any(p in self._shards for group in optimizer.param_groups for p in group["params"]):
            for flat in self._flats:
                flat.num_changes += 1
