"""What a rank holds in bfloat16 with Adam: what `course.sizing` says, at the end of a step and at most within it."""

import gc
from dataclasses import astuple, replace
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from course.sizing.fully_sharded import sharded_memory
from course.sizing.plan import Plan
from labkit.groups import init_groups
from labkit.train import TrainConfig, Trainer, training
from labkit.train.check import what_a_rank_holds

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
    return after / config.shape.num_parameters, (after - grads + most_more(profiler)) / config.shape.num_parameters


def most_more(profiler):
    """How many bytes more there were at most than when the profiler began."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def bytes_to_build(config):
    """On a rank: the most that it holds while its model is made and sharded, and what is left then."""
    with init_groups(config.layout(dist.get_world_size())) as groups:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer = Trainer(config, groups)
        shards = sum(flat.shard.nbytes for chunk in trainer.chunks for flat in chunk._flats)
    return most_more(profiler), shards


@pytest.mark.parametrize("options", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_a_model_is_built_unit_by_unit(on_ranks, options):
    """Of ZeRO-3 a rank never holds more than its shards and one unit, while one of its weights is drawn and cut."""
    config = TrainConfig(zero_stage=3, hidden_size=128, num_layers=16, num_attention_heads=8, tied=False, **options)
    layer = config.shape.num_matrix_parameters * 4 / config.tp_size
    unsharded = config.shape.num_parameters * 4 / (config.tp_size * config.pp_size)
    weight = 4 * config.hidden_size**2 * 4  # the largest, as all ranks draw it
    for most, shards in on_ranks(bytes_to_build, config, world_size=4):
        assert shards == pytest.approx(config.shape.num_parameters, rel=0.05)  # 4 bytes of each, on 4 ranks
        assert most < shards + 1.5 * layer + 3 * weight < unsharded


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bytes_of_a_parameter(on_ranks, zero_stage):
    config = replace(FEW_TOKENS, zero_stage=zero_stage)
    plan = Plan(config.shape, 2, config.batch_size, recompute="none", zero_stage=zero_stage)
    expected = sharded_memory(plan).total / config.shape.num_parameters
    _, checked = what_a_rank_holds(config, 2, 0)
    said = sum(astuple(checked)) / config.shape.num_parameters
    for after, most in on_ranks(bytes_held, config):
        assert after == pytest.approx(9 if zero_stage else 18, rel=0.01)
        assert expected - 0.1 < most < expected + (MESSAGES if zero_stage else 0.2)
        assert said == pytest.approx(most, rel=0.1)
