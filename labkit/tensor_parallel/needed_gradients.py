"""Which gradients a backward pass needs: an autograd function that computes more wastes products and messages."""

import torch


def needed_gradients(ctx) -> tuple[bool, ...]:
    """Return, for each input of an autograd function (tensors first), whether this backward pass needs its gradient.

    ``ctx.needs_input_grad`` only says whether an input requires a gradient at all. Zero bubble splits backward
    (`labkit.pipeline.split_backward`): one pass is for the gradient of a layer's input, another for those of its
    weights. A function that asks only ``ctx`` would compute them all in both.

    torch's engine knows which nodes a pass will reach, and tells its built-in functions. From Python it takes a
    private call; tests/labkit/pipeline/test_split_backward.py checks that it still works. Inside `torch.autograd.grad`
    the engine does not answer for leaves. Then every gradient that some pass may need counts as needed.
    """
    required = ctx.needs_input_grad
    nodes = [node for node, _ in ctx.next_functions]  # of the tensors only
    try:
        return tuple(need and torch._C._will_engine_execute_node(nodes[i]) for i, need in enumerate(required))
    except RuntimeError:
        return required
