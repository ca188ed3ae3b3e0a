"""Compares a model in shards and stages with one of plain torch: the loss, and the gradient of every parameter."""

import pytest
import torch
import torch.distributed as dist

from labkit.context_parallel import positions
from labkit.groups import group_of_one, local_device
from labkit.placement import placements
from labkit.tensor_parallel import shard_like, unshard
from labtrain.model import ParallelGPT, normal
from tests.support.plain import PlainGPT


def tokens(shape, seq=None):
    """Ids and targets [3, seq], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab_size, (2, 3, seq or shape.seq_length), generator=generator).to(local_device())


def any_value(name, size):
    """A value for each parameter that its name decides: also for biases and norms, which start as zeros and ones."""
    value = torch.empty(size, dtype=torch.float64)
    normal(f"test {name}", seed=0, std=0.3)(value)
    return value


def any_values(shape):
    return {name: any_value(name, p.shape) for name, p in ParallelGPT(shape, group_of_one()).named_parameters()}


def stages_of(shape, tp, num_stages=1, **options):
    """All stages of a model, here in one process."""
    options = {"dtype": torch.float64, "device": local_device()} | options
    return [ParallelGPT(shape, tp, stage=stage, num_stages=num_stages, **options) for stage in range(num_stages)]


def give_values(stages, shape):
    """Set every parameter to its shard of `any_value`."""
    unsharded = any_values(shape)
    for stage in stages:
        placed = placements(stage)
        for name, parameter in stage.named_parameters():
            parameter.data.copy_(shard_like(unsharded[name].to(local_device()), placed[name]))


def loss_of(stages, ids, targets):
    x = ids
    for stage in stages:
        x = stage(x)
    return stages[-1].loss(x, targets)


def unsharded_gradients(stages):
    """Of every parameter, by name; the tied embedding's are added up over the stages that hold it."""
    gradients = {}
    for stage in stages:
        placed = placements(stage)
        for name, parameter in stage.named_parameters():
            gradient = unshard(parameter.grad, placed[name]).contiguous()
            gradients[name] = gradients.get(name, 0) + gradient
    return gradients


def loss_and_gradients(shape, tp, cp=None, seq=None, **options):
    """The loss and the unsharded gradients of the whole sequence, from this rank's tokens and shards."""
    cp = cp or group_of_one()
    stages = stages_of(shape, tp, cp_group=cp, **options)
    give_values(stages, shape)
    held = positions(seq or shape.seq_length, cp.size(), cp.rank(), options.get("zigzag", True))
    loss = loss_of(stages, *tokens(shape, seq)[:, :, held])
    loss.backward()
    loss, gradients = loss.detach(), unsharded_gradients(stages)
    if cp.size() > 1:  # the mean over ranks with as many tokens each
        for tensor in (loss, *gradients.values()):
            dist.all_reduce(tensor, group=cp)
            tensor /= cp.size()
    return loss.item(), {name: gradient.cpu() for name, gradient in gradients.items()}


def plain_loss_and_gradients(shape, seq=None):
    plain = PlainGPT(shape, any_values(shape))
    loss = plain.loss(*tokens(shape, seq))
    loss.backward()
    return loss.item(), plain.gradients


def assert_same(got, expected, what=""):
    (loss, gradients), (expected_loss, expected_gradients) = got, expected
    assert loss == pytest.approx(expected_loss, rel=1e-10, abs=0), what
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient to compare"
        text = f"{name}, {what}: "
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, t=text: t + m)
