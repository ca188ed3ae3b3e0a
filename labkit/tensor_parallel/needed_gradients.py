"""Which gradients a backward pass needs: an autograd function that computes more wastes products and messages."""

import torch


def needed_gradients(ctx) -> tuple[bool, ...]:
    """Return, for each input of an autograd function (tensors first), whether this backward pass needs its gradient.

    ``ctx.needs_input_grad`` says which gradients are needed at all. `labkit.pipeline.split_backward` makes two passes,
    one for the gradient of a layer's input and one for its weights: by ``ctx`` alone, both would compute everything.

    torch's engine knows which nodes a pass will reach, but Python can only ask it by a private call, so a test
    (tests/labkit/pipeline/test_split_backward.py) checks that the call works. Inside `torch.autograd.grad` the engine
    does not answer for leaves. Then every gradient that some pass may need counts as needed.
    """
    required = ctx.needs_input_grad
    nodes = [node for node, _ in ctx.next_functions]  # of the tensors only
    try:
        return tuple(need and torch._C._will_engine_execute_node(nodes[i]) for i, need in enumerate(required))
    except RuntimeError:
        return required
