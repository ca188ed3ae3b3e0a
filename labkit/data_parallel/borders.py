"""Notices when backward enters a unit, and refuses parameters that are used outside it."""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


class SavedTensors(saved_tensors_hooks):
    """Calls ``before_use`` when backward unpacks a saved tensor: of this unit, backward begins.

    Tensors are packed by the enclosing hooks, such as those of a checkpoint, or as torch itself
    would.
    """

    def __init__(self, before_use: Callable[[], None]):
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore - not in its stubs
        save, restore = around or (_without_graph, _unchanged)

        def unpack(packed) -> torch.Tensor:
            before_use()
            return restore(packed)

        super().__init__(save, unpack)


def _without_graph(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what to save of a tensor: if a node saved its own output with the graph, neither would
    ever be freed.
    """
    return x.detach(), x._version


def _unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = saved  # torch itself skips this check where there are hooks
    if x._version != version:
        what = f"{list(x.shape)} is at version {x._version}, expected version {version}"
        raise RuntimeError(
            f"a tensor needed for gradients has been modified by an inplace operation: {what}"
        )
    return x


def any_requires_grad(*trees) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(trees))


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


METADATA = [
    getattr(torch.Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_leaf", "grad")
]
METADATA.append(torch.Tensor.untyped_storage)


class Missing(torch.Tensor):
    """Stands in for a parameter that is not gathered: only metadata, such as its dtype and device,
    can be read.
    """

    why: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        refuse(
            next(missing.why for missing in tree_leaves((args, kwargs)) if isinstance(missing, cls))
        )


def refuse(why: str, *_) -> NoReturn:
    raise ValueError(why)
