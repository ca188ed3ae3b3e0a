"""Which gradients a backward pass needs: an autograd function that computes more wastes products and messages."""

import torch


def needed_gradients(ctx) -> tuple[bool, ...]:
    """Return, for each input of an autograd function (tensors first), whether this backward pass needs its gradient.

    ``ctx.needs_input_grad`` says which gradients any pass needs. `labkit.pipeline.split_backward` makes one pass for
    the gradient of a layer's input and one for its weights, and only torch's engine knows which nodes a pass reaches.
    Inside `torch.autograd.grad` it does not answer for leaves: then whatever any pass needs counts as needed.
    """
    required = ctx.needs_input_grad
    nodes = [node for node, _ in ctx.next_functions]  # of the tensors only
    try:
        return tuple(need and torch._C._will_engine_execute_node(nodes[i]) for i, need in enumerate(required))
    except RuntimeError:
        return required
