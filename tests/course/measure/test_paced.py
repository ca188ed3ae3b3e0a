"""Stages that sleep: what they compute, and in which order their gradients come."""

import torch

from course.measure.paced import PacedStage


def test_it_returns_its_input_and_has_the_weights_gradient_before_the_inputs():
    """So that a bucket with the weight can travel while the rest of backward sleeps."""
    stage, seen = PacedStage(0.0, 0.0, num_weights=5), []
    stage.weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))
    x = torch.arange(3.0, requires_grad=True)
    x.register_hook(lambda _: seen.append("input"))
    y = stage(x)
    y.sum().backward()
    assert torch.equal(y, x)
    assert stage.weight.grad is not None and stage.weight.grad.shape == (5,)
    assert seen == ["weight", "input"]
