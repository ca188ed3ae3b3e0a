"""Watches a unit's borders: in autograd's graph, in what backward has saved, and around its parameters."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map


class SavedTensors(saved_tensors_hooks):
    """Calls ``before_use`` when backward takes out one of the ``buffers`` (or a view) that autograd saved in a block.

    Everything is saved as the hooks around the block say, such as those of a checkpoint, or as torch itself does it.
    """

    def __init__(self, buffers: list[torch.Tensor], before_use: Callable[[], None]):
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore - not in its stubs
        save, restore = around or (lambda x: (x, x._version), _unchanged)

        def unpack(packed) -> torch.Tensor:
            saved, is_in_buffer = packed
            if is_in_buffer:
                before_use()
            return restore(saved)

        super().__init__(lambda x: (save(x), lies_in(x, buffers)), unpack)


def lies_in(x, buffers: list[torch.Tensor]) -> bool:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return False
    return any(x.untyped_storage()._cdata == each.untyped_storage()._cdata for each in buffers)


def _unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, version = saved  # torch compares them itself, but not where there are hooks
    if x._version != version:
        what = f"{list(x.shape)} is at version {x._version}, expected version {version}"
        raise RuntimeError(f"a tensor needed for gradients has been modified by an inplace operation: {what}")
    return x


def marked(tree) -> tuple[Any, list[torch.Tensor]]:
    """Give each tensor at a unit's border a node of its own, and return these tensors too.

    A hook on the tensor itself would come too late: the unit below has one there as well.
    """
    tree = tree_map(lambda x: x.view_as(x) if _needs_grad(x) else x, tree)
    return tree, list(filter(_needs_grad, tree_leaves(tree)))


def outputs_to_watch(module: nn.Module, outputs: list[torch.Tensor], output) -> list[torch.Tensor]:
    """Return a unit's marked outputs, and all else by which backward may come to it first."""
    # Attributes of what it returned, such as a dataclass, or of its modules.
    objects = [x for x in tree_leaves(output) if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor)]
    values = [value for each in (*objects, *module.modules()) for value in vars(each).values()]
    outputs = outputs + [x for x in values if _needs_grad(x) and not x.is_leaf]
    # In-place work on a view gives it a new node in the graph; that of its base stays.
    return outputs + [x._base for x in outputs if x._base is not None and _needs_grad(x._base) and not x._base.is_leaf]


def _needs_grad(x) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def refuse_graph() -> None:
    if torch.is_grad_enabled():
        refuse("a sharded module has no backward(create_graph=True): use the plain module")


METADATA = [getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_leaf", "grad")]
METADATA.append(torch.Tensor.untyped_storage)


class Absent(torch.Tensor):
    """Stands in a module for a parameter that is not whole just now: forward can ask for its type and device, say."""

    why: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        refuse(next(each.why for each in tree_leaves((args, kwargs)) if isinstance(each, cls)))


def refuse(why: str, *_) -> NoReturn:
    raise ValueError(why)
