"""Sizing against real models: parameters of every stage and shard, and FLOPs that torch counted while they ran."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.model import ParallelGPT
from labkit.sizing import GPT, Plan, flops_per_step, stage_parameters

SHAPE = GPT(num_layers=12, hidden_size=16, seq_length=8, vocab_size=32, num_attention_heads=4)


def parameters_of(shape, group, stage, num_stages):
    model = ParallelGPT(shape, group, stage=stage, num_stages=num_stages)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_parameters_of_each_stage_are_those_of_the_model(p):
    plan = Plan(SHAPE, p, p, pp_size=p)
    for stage in range(p):
        assert stage_parameters(plan, stage) == parameters_of(SHAPE, group_of_one(), stage, p)


def shard_parameters(shape, num_stages):
    return [parameters_of(shape, dist.group.WORLD, stage, num_stages) for stage in range(num_stages)]


@pytest.mark.parametrize(("t", "p"), [(2, 1), (2, 3), (4, 2)])
def test_parameters_of_each_shard_are_those_on_real_ranks(t, p):
    plan = Plan(SHAPE, t * p, 4, t, p)
    for counted in launch(shard_parameters, SHAPE, p, world_size=t):
        assert counted == [stage_parameters(plan, stage) for stage in range(p)]


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (2, 3)])
def test_parameters_of_a_ranks_chunks(p, v):
    plan = Plan(SHAPE, p, 2 * p, pp_size=p, num_chunks=v)
    chunks = [parameters_of(SHAPE, group_of_one(), number, p * v) for number in range(p * v)]
    assert [sum(chunks[rank::p]) for rank in range(p)] == [stage_parameters(plan, rank) for rank in range(p)]


def counted_flops(recompute, batch_size=2):
    shape = GPT(num_layers=3, hidden_size=32, seq_length=16, vocab_size=40, num_attention_heads=4)
    model = ParallelGPT(shape, group_of_one(), recompute=recompute)
    tokens = torch.randint(40, (batch_size, 16))
    every_product = sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False)  # torch would skip the last one
    with every_product[0], every_product[1], FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return counter.get_total_flops(), shape


def test_flops_are_those_that_torch_counts():
    counted, shape = counted_flops(recompute=False)
    assert counted == flops_per_step(shape, 2, "none")


def test_flops_with_recomputation_are_those_that_torch_counts():
    counted, shape = counted_flops(recompute=True)
    assert counted == flops_per_step(shape, 2, "full")
