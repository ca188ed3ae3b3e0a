"""Gives all replicas the same start, and tells their wrappers when a backward ends or
has failed.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from labkit.placement import Placement, placements
from labkit.sizes import ranks_text


class GradSync(Enum):
    """What backward does with gradients."""

    # On this rank, without communication. FSDP2: set_requires_gradient_sync(False)
    ACCUMULATE = auto()
    # Over the shard group, if any; further backwards add to the result. FSDP2:
    # set_requires_all_reduce(False)
    REDUCE_SHARDS = auto()
    AVERAGE = auto()  # over all replicas
    AVERAGE_AND_WAIT = auto()  # and wait, so that backward returns with averages in the parameters


class DataParallelBase(nn.Module):
    """The base of wrappers that average gradients: the current `GradSync`, and what to do when a
    backward ends.
    """

    module: nn.Module
    groups: tuple[dist.ProcessGroup, ...]  # over which gradients are averaged, one after the other
    sync_gradients: Callable[[], None]  # sends the gradients that are left, and waits for all
    _reset: Callable[[], None]  # discards the state of a failed backward

    def __init__(self, reduces_whole_units: bool = False):
        super().__init__()
        # After each backward through a unit, though it was reduced before.
        self.reduces_whole_units = reduces_whole_units
        self._grad_mode = GradSync.AVERAGE_AND_WAIT
        # The callback queued for the end of backward.
        self._at_end: weakref.ref[Callable] | None = None

    def no_sync(self):
        """Let backward accumulate gradients without communication, in a ``with`` block."""
        return self._with_grads(GradSync.ACCUMULATE)

    def reducing(self, is_last: bool = True):
        """Let backward start to reduce gradients, also inside `no_sync`; ``sync_gradients`` waits
        for them later.

        A pipeline does so after all its ops, to overlap communication with compute. Unless this is
        the last backward of a step (``is_last``), hybrid sharding reduces only within the shard
        group.
        """
        return self._with_grads(GradSync.AVERAGE if is_last else GradSync.REDUCE_SHARDS)

    @contextmanager
    def _with_grads(self, mode: GradSync) -> Iterator[None]:
        before, self._grad_mode = self._grad_mode, mode
        try:
            yield
        finally:
            self._grad_mode = before

    def _begin_backward(self) -> None:
        """Queue `_end_backward` for the end of the current backward."""
        self._discard_failed_backward()
        if self._at_end is None:
            at_end = self._end_backward
            self._at_end = weakref.ref(at_end, Hook(self._backward_failed))
            # Only the queue keeps this bound method alive. If backward fails, the queue drops it,
            # and the weak reference calls _backward_failed.
            Variable._execution_engine.queue_callback(at_end)

    def _end_backward(self) -> None:
        self._at_end = None
        if self._grad_mode is GradSync.AVERAGE_AND_WAIT:
            self.sync_gradients()

    def _backward_failed(self, at_end: weakref.ref) -> None:
        """Restore the modules to their state between steps; called if autograd drops ``at_end``
        without calling it.
        """

    def _discard_failed_backward(self) -> None:
        """Wait for the messages of a failed backward, and discard them."""
        if self._at_end is not None and self._at_end() is None:
            self._at_end = None
            self._reset()


class Hook:
    """Calls a wrapper's method with the ``given`` objects as first arguments; does nothing once the
    wrapper is gone.

    It has only weak references, so as not to keep the wrapper's process group alive, with its
    threads and sockets.
    """

    def __init__(self, method: Callable, *given: object):
        self.method = weakref.WeakMethod(method)
        self.given = [weakref.ref(argument) for argument in given]

    def __call__(self, *args):
        method = self.method()
        if method is not None:
            given = [reference() for reference in self.given]
            return method(*given, *args)


def materialize(module: nn.Module, device: torch.device, memory: dict | None = None) -> None:
    """Replace all meta tensors of a module by ones on ``device``, and let ``reset_parameters()``
    fill them.

    Tensors that modules share stay shared. ``memory`` maps parameters to the tensors to use instead
    of new ones.

    Raises:
        ValueError: a module has parameters or buffers on the meta device, but no
            ``reset_parameters``.
    """
    made: dict[Any, Any] = dict(memory or {})
    for name, submodule in module.named_modules():
        tables: list[dict[str, Any]] = [submodule._parameters, submodule._buffers]
        on_meta = [
            (table, key, x)
            for table in tables
            for key, x in table.items()
            if x is not None and x.is_meta
        ]
        if not on_meta:
            continue
        if not hasattr(submodule, "reset_parameters"):
            _, key, _ = on_meta[0]
            owner = name or "the module"
            fault = f"{key} of {owner} is on the meta device, and nothing can fill it"
            raise ValueError(f"{fault}: give {type(submodule).__name__} a reset_parameters()")
        for table, key, x in on_meta:
            if x not in made:
                empty = torch.empty_like(x, device=device)
                made[x] = like(x, empty) if isinstance(x, nn.Parameter) else empty
            table[key] = made[x]
        submodule.reset_parameters()  # pyright: ignore[reportCallIssue]


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with this data, and all attributes of the given one, its ``grad_dtype``
    included.
    """
    made = nn.Parameter(data, parameter.requires_grad)
    vars(made).update(vars(parameter))
    if grad_dtype_of(parameter) != made.dtype:
        made.grad_dtype = grad_dtype_of(parameter)
    return made


def grad_dtype_of(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which autograd accumulates this parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype  # None accepts any


def check_replicas(module: nn.Module, *groups: dist.ProcessGroup) -> None:
    """Raise a ValueError on every rank unless names, shapes and types agree wherever tensors are
    replicated.
    """
    by_name = placements(module)
    texts: dict[dist.ProcessGroup, list[str]] = {group: [] for group in groups}
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
        # A buffer has no placement
        replica_group = by_name.get(name, Placement()).replica_group
        for group in groups if replica_group is None else (replica_group,):
            texts.setdefault(group, []).append(f"{name} {list(x.shape)} {str(x.dtype)[6:]}{frozen}")
    for group, lines in texts.items():
        numbered = {f"tensor {n} of this module": line for n, line in enumerate(lines, start=1)}
        check_alike(numbered, "make the same module on every rank", group)
    if any(p.requires_grad and grad_dtype_of(p).itemsize < 4 for p in module.parameters()):
        way_out = "set parameter.grad_dtype = torch.float32 for each"
        warnings.warn(
            f"gradients add up and travel in 16 bits, as the parameters have: {way_out}",
            stacklevel=3,
        )


def check_alike(local: dict[str, str], advice: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that a dict is the same on all ranks, or on all of ``group``, each of which calls this.

    Raises:
        ValueError: on every rank, naming the first entry in which the ranks differ, those ranks,
            and the advice.
    """
    dicts = [local] * dist.get_world_size(group)
    dist.all_gather_object(dicts, local, group=group)
    for name in dict.fromkeys(name for entries in dicts for name in entries):
        ranks: dict[str, list[int]] = {}
        for rank, entries in zip(dist.get_process_group_ranks(group), dicts):
            ranks.setdefault(entries.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            text = ", ".join(
                f"{found} on ranks {ranks_text(having)}" for found, having in ranks.items()
            )
            raise ValueError(f"{name} is {text}: {advice}")


def copy_from_first(tensors: Iterable[torch.Tensor], *groups: dist.ProcessGroup) -> None:
    """Broadcast the values of the groups' first rank."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        for group in groups:
            dist.broadcast(values, group_src=0, group=group)
        tensor.detach().copy_(values)
