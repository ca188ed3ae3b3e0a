"""Replicas of a model start alike: the same parameters on every rank, first by name and shape, then by value."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from labkit.sizes import ranks_text


class Replica(nn.Module):
    """What wrappers that average gradients share: whether a backward sends them, and whether it waits."""

    module: nn.Module

    def __init__(self):
        super().__init__()
        self._accumulating = self._sending = False
        self._is_last = True

    def sync_gradients(self) -> None:
        """Send what is left, and wait for all."""
        raise NotImplementedError

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the module computes with in this parameter's place; backward gives it the gradient."""
        return parameter

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to the gradients without communication."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def sending(self, is_last: bool = True) -> Iterator[None]:
        """Let backward send gradients, also inside `no_sync`, but not wait for them: ``sync_gradients`` waits, later.

        A pipeline calls that after all its ops: until then messages travel while stages work. If this is not the last
        backward before it (``is_last``), gradients may stay inside the group that shares the parameters.
        """
        self._sending, self._is_last = True, is_last
        try:
            yield
        finally:
            self._sending, self._is_last = False, True


class Hook:
    """Calls a wrapper's method, with the ``given`` objects as first arguments; does nothing once the wrapper is gone.

    It refers to them weakly: a hook must not keep the wrapper's process group alive, with its threads and sockets.
    """

    def __init__(self, method: Callable, *given: object):
        self.method, self.given = weakref.WeakMethod(method), [weakref.ref(each) for each in given]

    def __call__(self, *args):
        if method := self.method():
            return method(*(each() for each in self.given), *args)


def start_alike(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the first one's parameters and buffers, once `check_alike` finds the same ones on all ranks."""
    trained = {name: "" if parameter.requires_grad else ", frozen" for name, parameter in module.named_parameters()}
    mine = {
        f"tensor {number} of this module": f"{name} {list(x.shape)} {str(x.dtype)[6:]}{trained.get(name, '')}"
        for number, (name, x) in enumerate([*module.named_parameters(), *module.named_buffers()], start=1)
    }
    check_alike(mine, "make the same module on every rank", group)
    copy_from_first((*module.parameters(), *module.buffers()), group)


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


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that the group's first rank has in these tensors."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, group_src=0, group=group)
        tensor.detach().copy_(values)


def materialize(module: nn.Module, device: torch.device) -> nn.Module:
    """Give a module's parameters memory where they have none, and let ``reset_parameters`` fill them."""
    for each in module.modules():
        made = {name: p for name, p in each._parameters.items() if p is not None and p.is_meta}
        for name, p in made.items():
            each._parameters[name] = new = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
            if grad_dtype := getattr(p, "grad_dtype", None):
                new.grad_dtype = grad_dtype
        if made:
            each.reset_parameters()
    return module
