"""What a rank holds in bfloat16 with Adam: what `course.sizing` says, at the end of a step and at most within it."""

import gc
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from course.sizing.fully_sharded import sharded_memory
from course.sizing.plan import Plan
from labkit.train import TrainConfig, training

FEW_TOKENS = TrainConfig(
    precision="bfloat16", batch_size=4, micro_batch_size=1, seq_length=4, hidden_size=32, num_layers=16
)
MESSAGES = 0.8  # bytes: a few units' gradients that gloo's threads have let go, which torch's profiler does not see


def storages():
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def bytes_held(config):
    """Return what this rank holds after a step, and at most during the next, per parameter of the model."""
    before = storages()
    with training(config) as trainer:
        trainer.step()
        after = sum(size for address, size in storages().items() if address not in before)
        grads = sum(p.grad.nbytes for p in trainer.parameters) if config.zero_stage else 0
        trainer.optimizer.zero_grad()  # at stage 0 they stay in their buckets
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    more = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return after / config.shape.num_parameters, (after - grads + max(more)) / config.shape.num_parameters


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch adds gradients up in the weights' type")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bytes_of_a_parameter(on_ranks, zero_stage):
    config = replace(FEW_TOKENS, zero_stage=zero_stage)
    plan = Plan(config.shape, 2, config.batch_size, recompute="none", zero_stage=zero_stage)
    expected = sharded_memory(plan).total / config.shape.num_parameters
    for after, most in on_ranks(bytes_held, config):
        assert after == pytest.approx(9 if zero_stage else 18, rel=0.01)
        assert expected - 0.1 < most < expected + (MESSAGES if zero_stage else 0.2)
