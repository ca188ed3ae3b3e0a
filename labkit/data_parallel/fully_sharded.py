"""Shards parameters, gradients and optimizer states (ZeRO-3): a unit of the model is whole only
while it computes.

The parameters of a *unit*, such as one layer, are flattened into a buffer, of which each of d ranks
keeps 1/d. While unit k computes, forward gathers k+1, and backward gathers k-1 and reduce-scatters
the gradients of k+1. For one micro-batch a rank sends 3(d-1)/d numbers per parameter; plain data
parallelism, by ring all-reduce, sends 2(d-1)/d. With m micro-batches it is m times as much if each
is gathered and reduced (stage 3 in labtrain), while plain data parallelism stays at 2(d-1)/d.
Sources: arXiv 1910.02054, section 5.3; "PyTorch FSDP", arXiv 2304.11277, sections 3 and 4; torch's
`fully_shard`.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit.data_parallel.borders import (
    in_backward,
    on_exit,
    outputs_to_watch,
    refuse,
    refuse_graph,
    with_own_nodes,
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
from labkit.data_parallel.units import Unit, assign_grads, divide
from labkit.sizes import check_size


class FullyShardedDataParallel(DataParallelBase):
    """A module whose parameters, gradients and optimizer states are divided over the group.

    Communication of a unit of n parameters, of b bytes each, over d ranks; each collective is
    started early, and waited for where its result is needed:

    1. Before forward: all-gather of the shards. Each rank sends and receives (d-1)/d n b bytes.
       It starts one unit ahead (``prefetch``).
    2. Before backward, if the unit was freed after forward: the same again, in reverse order.
    3. After backward: reduce-scatter of the gradients. Each rank sends (d-1)/d n numbers, and keeps
       the sum of its shard; that travels while the unit before computes.
    4. Hybrid sharding only, in the last backward of a step, when a unit's reduce-scatter has ended:
       all-reduce of the shard of gradients, n/d numbers, over the ``replicate_group``.
    5. At the end of the last backward: all-reduce of one number for each parameter, whether a rank
       has a gradient of it; then the first rank broadcasts the module's buffers.

    Outside forward and backward each parameter of the module is flat: this rank's shard, which may
    be empty. The parameter object stays the same (only a meta parameter is replaced), so an
    optimizer may hold it. Use an element-wise optimizer (not Adafactor, Muon or L-BFGS). A gradient
    is a shard of the average that `DataParallel` makes, and None if it is None on every rank.

    On all ranks forward and backward must enter the same units in the same order; inside a unit
    they may use different parameters. Parameters in no unit belong to the root, which is whole from
    the start of forward to the end of backward. Inside `no_sync`, each rank keeps whole gradients.
    All ranks start with the values of the first, and get its buffers with each average. On GPUs the
    host synchronizes only if a parameter has no gradient here, to learn whether another rank has
    one.

    A unit's part of backward starts when one of its outputs gets a gradient, or autograd first
    needs one of its parameters. It ends when its inputs have their gradients. Gradients that come
    later are reduced at the end of backward. A unit that forward calls twice is reduced twice.

    Args:
        units: modules inside ``module``, in the order in which forward calls them.
        reshard_after_forward: free each unit after forward, and gather it again for backward.
            Otherwise it stays whole until its backward is done (with `no_sync`, the last one). A
            forward without backward needs no_grad.
        prefetch: gather this many units ahead: at most 1 + ``prefetch`` and the root are whole at a
            time.
        replicate_group: the ranks with the same shard (hybrid sharding); gradients are averaged
            over it too.
        own_groups: {replica_group: (replicate group, shard group)}, for parameters with a
            ``replica_group``, as experts have.

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
        hooks = [
            hook for submodule in module.modules() for hook in submodule._forward_pre_hooks.values()
        ]
        if any(isinstance(hook, Hook) for hook in hooks):
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
        self._root = made[module]
        self._units = [*reversed(made.values())]  # the root, then units in the order of forward
        # The root is whole first here, too; then the units, from the last to the first.
        self._backward_order = [self._root, *reversed(self._units[1:])]
        self._flats = [flat for unit in self._units for flat in unit.flats]
        self._reducing: list[FlatParameter] = []  # whose reduce-scatters are in flight
        # Of units that do not compute; "missing" during the root's forward.
        self._idle_form: Form = "shard"
        copy_from_first(module.buffers(), *self.groups)
        for unit_module, unit in made.items():
            self._watch(unit_module, unit)
        self._shards = {param.shard for unit in self._units for param in unit.parameters}
        # Steps are counted: see FlatParameter._shard_version.
        step_hook = register_optimizer_step_post_hook(Hook(self._after_optimizer_step))
        weakref.finalize(self, step_hook.remove)

    def _watch(self, module: nn.Module, unit: Unit) -> None:
        """Have this wrapper called when a unit's forward begins and ends, and when a gradient
        arrives.
        """
        module.register_forward_pre_hook(Hook(self._before_forward, unit), with_kwargs=True)
        module.register_forward_hook(
            Hook(self._after_forward, unit), with_kwargs=True, always_call=True
        )
        for param in unit.parameters:
            if param.unsharded.requires_grad:
                hook = Hook(self._grad_arrived, unit)
                param.unsharded.register_post_accumulate_grad_hook(hook)

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
        """Gather a unit, and start to gather the next ones in this order.

        The order is the same on all ranks, so their all-gathers meet.
        """
        ahead: Sequence[Unit] = ()
        if order:
            next_one = order.index(unit) + 1
            ahead = order[next_one : next_one + self.prefetch]
        for gathered in (unit, *ahead):
            for flat in gathered.flats:
                flat.gather(refresh=refresh)
        for flat in unit.flats:
            flat.wait()

    # -- forward ---------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        self._discard_failed_backward()
        self._idle_form = "missing"
        for unit in self._units:
            unit.unwatch_saved_tensors()  # if the last forward was interrupted
            unit.show("missing")

    def _before_forward(self, unit: Unit, module, args, kwargs):
        """Gather a unit, and watch for the two moments at which backward enters and leaves it."""
        if in_backward():  # activation checkpointing runs this forward again, inside backward
            self._start_backward(unit)
        else:
            if unit is self._root:
                self._begin_forward()
            self._gather(unit, self._units, refresh=True)
            unit.show("unsharded")
        # Backward enters when it unpacks a saved parameter, or an output gets a gradient (see
        # _after_forward).
        unit.watch_saved_tensors(partial(self._before_backward, unit, unit.version))
        if unit is self._root:  # backward leaves it at the end
            return None
        # Backward leaves the unit when its inputs have their gradients.
        (args, kwargs), inputs = with_own_nodes((args, kwargs))
        on_exit(inputs, Hook(self._after_backward, unit))
        return args, kwargs

    def _after_forward(self, unit: Unit, module, args, kwargs, output):
        """Free a unit, and watch its outputs: backward enters it when one gets a gradient."""
        unit.unwatch_saved_tensors()  # also after an exception
        if in_backward():  # recomputed: its part of backward is next
            return output
        is_root = unit is self._root
        if is_root:
            self._idle_form = "shard"
        for idle in self._units if is_root else (unit,):
            idle.show(self._idle_form)
        output, outputs = with_own_nodes(output)
        hook = partial(Hook(self._before_backward, unit), unit.version)
        register_multi_grad_hook(outputs_to_watch(module, outputs, output), hook, mode="any")
        has_no_backward = output is None or not torch.is_grad_enabled()
        if has_no_backward or (self.reshard_after_forward and not is_root):
            unit.refuse_to_return(output)
            unit.free()
        return output

    # -- backward --------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, version: int, grad=None) -> None:
        refuse_graph()
        self._start_backward(unit, self._backward_order)
        if unit.version != version:
            fault = f"parameters of {unit.name} have changed between forward and backward"
            refuse(f"{fault}: call backward before a step")

    def _start_backward(self, unit: Unit, order: Sequence[Unit] = ()) -> None:
        """Gather a unit for its part of backward, and have its gradients reduced after it, even if
        it gets none.
        """
        self._begin_backward()
        if not unit.in_backward:
            unit.in_backward = unit.has_unreduced_grads = True
            self._gather(unit, order)
            unit.show("unsharded")

    def _grad_arrived(self, unit: Unit, parameter) -> None:
        refuse_graph()
        self._begin_backward()
        # Even after its part of backward: then they are reduced at the end.
        unit.has_unreduced_grads = True

    def _after_backward(self, unit: Unit) -> None:
        """Free a unit, unless more micro-batches need it, and start to reduce its gradients."""
        unit.in_backward = False
        unit.show(self._idle_form)
        # AVERAGE_AND_WAIT: the last backward of a step, so no micro-batch needs the unit again.
        if self.reshard_after_forward or self._grad_mode is GradSync.AVERAGE_AND_WAIT:
            unit.free()
        if unit.has_unreduced_grads and self._grad_mode is not GradSync.ACCUMULATE:
            self._reduce(unit)

    def _end_backward(self) -> None:
        # The root, and units whose inputs need no gradient, are still open. Others may have
        # gradients that came late.
        for unit in reversed(self._units):
            self._after_backward(unit)
        super()._end_backward()

    def _backward_failed(self, at_end: weakref.ref) -> None:
        for unit in self._units:
            unit.show("shard")

    def _reset(self) -> None:
        self._reducing = []
        for unit in self._units:
            unit.reset()

    def _reduce(self, unit: Unit) -> None:
        """Start to reduce-scatter a unit's gradients.

        The previous unit's come first: at most one buffer of whole gradients is on its way.
        """
        self._finish_reducing()
        unit.has_unreduced_grads = False
        # Whether the sum goes to the replicas now; if not, further micro-batches add to it first
        self._then_averages = self._grad_mode in (GradSync.AVERAGE, GradSync.AVERAGE_AND_WAIT)
        self._reducing = [flat for flat in unit.flats if flat.is_trained]
        for flat in self._reducing:
            flat.finish_average()
            flat.start_reduce()

    def _finish_reducing(self) -> None:
        for flat in self._reducing:
            flat.finish_reduce()
            if self._then_averages:
                flat.start_average()
        self._reducing = []

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p in self._shards for p in params):
            for flat in self._flats:
                flat.num_changes += 1
