"""Refuses what sharded layers do not support: autocast, and the gradient of a gradient."""

from collections.abc import Callable
from functools import wraps

import torch


def refuse_autocast(name: str, device: torch.device) -> None:
    """Raise a ValueError if autocast is on for this kind of device.

    It would round inside a layer, between a partial result and the sum over ranks, and tensors that
    meet in one collective could have different dtypes.
    """
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        way_out = (
            "call it outside, and make the model with dtype=torch.bfloat16 to compute in bfloat16"
        )
        raise ValueError(f"{name} does not work under torch.autocast: {way_out}")


def first_derivative_only(backward: Callable) -> Callable:
    """Decorate the backward of an autograd function whose gradients cannot be differentiated again.

    torch's `once_differentiable` raises only if the incoming gradient needs a gradient itself. That
    of a sum is constant, but the saved tensors are not: their part of the second derivative would
    be missing without a word. So this one raises as soon as a graph of the gradients is asked for.
    """

    @wraps(backward)
    def checked(ctx, *grads: torch.Tensor):
        if torch.is_grad_enabled():  # only with create_graph=True
            rule = "the gradients of a sharded layer cannot be differentiated again"
            raise ValueError(
                f"{rule}: leave create_graph=False, or use torch.nn's layers in one process"
            )
        refuse_autocast("the backward of a sharded layer", grads[0].device)
        return backward(ctx, *grads)

    return checked
