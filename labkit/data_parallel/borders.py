"""Detects when backward enters or leaves a unit, and refuses parameters that are used
outside it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map


class SavedTensors(saved_tensors_hooks):
    """Calls ``before_use`` when backward unpacks a saved tensor that is in one of the ``buffers``.

    Tensors are packed by the enclosing hooks, such as those of a checkpoint, or as torch itself
    would.
    """

    def __init__(self, buffers: list[torch.Tensor], before_use: Callable[[], None]):
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore - not in its stubs
        save, restore = around or (_without_graph, _unchanged)

        def unpack(packed) -> torch.Tensor:
            saved, is_in_buffer = packed
            if is_in_buffer:
                before_use()
            return restore(saved)

        super().__init__(lambda x: (save(x), lies_in(x, buffers)), unpack)


def lies_in(x, buffers: list[torch.Tensor]) -> bool:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return False
    return any(x.untyped_storage()._cdata == buffer.untyped_storage()._cdata for buffer in buffers)


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


def with_own_nodes(tree) -> tuple[Any, list[torch.Tensor]]:
    """Give each tensor that enters or leaves a unit its own autograd node; return the tree and
    these tensors.

    Otherwise two consecutive units would hook the same tensor, and one of the hooks would run too
    late.
    """
    tree = tree_map(lambda x: x.view_as(x) if _needs_grad(x) else x, tree)
    return tree, list(filter(_needs_grad, tree_leaves(tree)))


def on_exit(inputs: list[torch.Tensor], call: Callable[[], None]) -> None:
    """Call ``call`` when the gradients of all these tensors are there, in the first backward that
    computes them.
    """

    def once(grads) -> None:
        # Torch's hook keeps the nodes that keep it, and with them the graph, until it is removed.
        watch.remove()
        call()

    watch = register_multi_grad_hook(inputs, once, mode="all")


def outputs_to_watch(module: nn.Module, outputs: list[torch.Tensor], output) -> list[torch.Tensor]:
    """Return these outputs of a unit, and all other tensors through which backward may enter it."""
    # Attributes of returned objects, such as dataclasses, and of its modules.
    objects = [
        x for x in tree_leaves(output) if hasattr(x, "__dict__") and not isinstance(x, torch.Tensor)
    ]
    values = [value for owner in (*objects, *module.modules()) for value in vars(owner).values()]
    outputs = outputs + [x for x in values if _needs_grad(x) and not x.is_leaf]
    # An in-place op on a view gives it a new autograd node; its base keeps its own.
    return outputs + [
        x._base
        for x in outputs
        if x._base is not None and _needs_grad(x._base) and not x._base.is_leaf
    ]


def _needs_grad(x) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def refuse_graph() -> None:
    if torch.is_grad_enabled():
        refuse("a sharded module has no backward(create_graph=True): use the plain module")


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
