"""Starts replicas of a model alike, and tells their wrappers when a backward ends, or that it has failed."""

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

from labkit.placement import placement_of
from labkit.sizes import ranks_text


class GradMode(Enum):
    """What backward does with gradients."""

    ACCUMULATE = auto()  # add them up on this rank
    REDUCE = auto()  # over the ranks that share the parameters; further backwards add to that
    FINISH = auto()  # over all replicas
    FINISH_AND_WAIT = auto()  # and have the averages in the parameters when it is done


class Replica(nn.Module):
    """What wrappers that average gradients share: what backward does with gradients, and when it ends."""

    module: nn.Module
    sync_gradients: Callable[[], None]  # sends what is left, and waits for all
    _reset: Callable[[], None]  # forgets a backward that failed

    def __init__(self):
        super().__init__()
        self._grad_mode = GradMode.FINISH_AND_WAIT
        self._at_end: weakref.ref[Callable] | None = None  # what autograd will call when this backward is done

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the module computes with in this parameter's place; backward gives it the gradient."""
        return parameter

    def no_sync(self):
        """Let backward add to the gradients without communication, in a ``with`` block."""
        return self._with_grads(GradMode.ACCUMULATE)

    def reducing(self, is_last: bool = True):
        """Let backward send gradients, also inside `no_sync`, but not wait for them: ``sync_gradients`` does, later.

        A pipeline calls that after all its ops: until then messages travel while stages work. If this is not the last
        backward before it (``is_last``), gradients may stay inside the group that shares the parameters.
        """
        return self._with_grads(GradMode.FINISH if is_last else GradMode.REDUCE)

    @contextmanager
    def _with_grads(self, mode: GradMode) -> Iterator[None]:
        before, self._grad_mode = self._grad_mode, mode
        try:
            yield
        finally:
            self._grad_mode = before

    def _begin_backward(self) -> None:
        """Have `_end_backward` called when the backward under way is done."""
        self._discard_failed_backward()
        if self._at_end is None:
            at_end = self._end_backward
            self._at_end = weakref.ref(at_end, Hook(self._backward_failed))
            Variable._execution_engine.queue_callback(at_end)  # which alone keeps it alive

    def _end_backward(self) -> None:
        self._at_end = None
        if self._grad_mode is GradMode.FINISH_AND_WAIT:
            self.sync_gradients()

    def _backward_failed(self, at_end: weakref.ref) -> None:
        """Leave the modules as they are between steps; called when autograd drops ``at_end`` without calling it."""

    def _discard_failed_backward(self) -> None:
        """Wait for what a backward that failed has sent, and forget it."""
        if self._at_end is not None and self._at_end() is None:
            self._at_end = None
            self._reset()


class Hook:
    """Calls a wrapper's method, with the ``given`` objects as first arguments; does nothing once the wrapper is gone.

    It refers to them weakly: a hook must not keep the wrapper's process group alive, with its threads and sockets.
    """

    def __init__(self, method: Callable, *given: object):
        self.method, self.given = weakref.WeakMethod(method), [weakref.ref(each) for each in given]

    def __call__(self, *args):
        if method := self.method():
            return method(*(each() for each in self.given), *args)


def materialize(
    module: nn.Module, device: torch.device, memory: dict[nn.Parameter, nn.Parameter] | None = None
) -> None:
    """Give all that is on the meta device memory on ``device``, and let each module's ``reset_parameters()`` fill it.

    What modules share stays shared. ``memory`` says which tensors to use for parameters, if not new ones.

    Raises:
        ValueError: a module has parameters or buffers on the meta device, but no ``reset_parameters``.
    """
    made: dict[Any, Any] = dict(memory or {})
    for name, each in module.named_modules():
        tables: list[dict[str, Any]] = [each._parameters, each._buffers]
        on_meta = [(table, key, x) for table in tables for key, x in table.items() if x is not None and x.is_meta]
        if on_meta and not hasattr(each, "reset_parameters"):
            what = f"{on_meta[0][1]} of {name or 'the module'} is on the meta device, and nothing can fill it"
            raise ValueError(f"{what}: give {type(each).__name__} a reset_parameters()")
        for table, key, x in on_meta:
            if x not in made:
                empty = torch.empty_like(x, device=device)
                made[x] = like(x, empty) if isinstance(x, nn.Parameter) else empty
            table[key] = made[x]
        if on_meta:
            each.reset_parameters()  # pyright: ignore[reportCallIssue]


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with this data, and all that is noted at the other one: its placement, its ``grad_dtype``."""
    made = nn.Parameter(data, parameter.requires_grad)
    vars(made).update(vars(parameter))
    if grad_dtype_of(parameter) != made.dtype:
        made.grad_dtype = grad_dtype_of(parameter)
    return made


def grad_dtype_of(parameter: nn.Parameter) -> torch.dtype:
    """Return the type in which autograd adds up this parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype  # before torch 2.10 they are the same


def check_replicas(module: nn.Module, *groups: dist.ProcessGroup) -> None:
    """Raise a ValueError on every rank unless all that replicate a parameter or buffer have the same one."""
    texts: dict[dist.ProcessGroup, list[str]] = {group: [] for group in groups}
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        frozen = ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""
        own = placement_of(x).replica_group
        for group in groups if own is None else (own,):
            texts.setdefault(group, []).append(f"{name} {list(x.shape)} {str(x.dtype)[6:]}{frozen}")
    for each, mine in texts.items():
        numbered = {f"tensor {number} of this module": text for number, text in enumerate(mine, start=1)}
        check_alike(numbered, "make the same module on every rank", each)
    if any(p.requires_grad and grad_dtype_of(p).itemsize < 4 for p in module.parameters()):
        way_out = "with torch 2.10 or newer, set parameter.grad_dtype = torch.float32 for each"
        warnings.warn(f"gradients add up and travel in 16 bits, as the parameters have: {way_out}", stacklevel=3)


def check_alike(mine: dict[str, str], advice: str, group: dist.ProcessGroup | None = None) -> None:
    """Compare a dict with those of all other ranks, or of the others in ``group``. Call it on each of these ranks.

    Raises:
        ValueError: on every rank, naming the first entry in which the ranks differ, those ranks, and the advice.
    """
    dicts = [mine] * dist.get_world_size(group)
    dist.all_gather_object(dicts, mine, group=group)
    for name in dict.fromkeys(name for each in dicts for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in zip(dist.get_process_group_ranks(group), dicts):
            ranks.setdefault(each.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            text = ", ".join(f"{found} on ranks {ranks_text(having)}" for found, having in ranks.items())
            raise ValueError(f"{name} is {text}: {advice}")


def copy_from_first(tensors: Iterable[torch.Tensor], *groups: dist.ProcessGroup) -> None:
    """Give every rank the values of the groups' first rank, or of the first that replicates the parameter."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        for group in groups:
            dist.broadcast(values, group_src=0, group=placement_of(tensor).replica_group or group)
        tensor.detach().copy_(values)
