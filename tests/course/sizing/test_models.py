"""Sizing against real models: parameters, FLOPs that torch counted, what is kept for backward, and messages."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from course.measure.by_axis import sent_by_axis
from course.sizing import Plan, activation_bytes_per_layer, flops_per_step, stage_parameters, step_traffic
from labkit.communication import communication_log
from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT
from labkit.shape import GPT

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


def saved_numbers(num_layers, sequence_parallel, batch_size=2):
    """What a model that recomputes its layers keeps for backward, weights left out."""
    shape = replace(SHAPE, num_layers=num_layers)
    model = ParallelGPT(shape, dist.group.WORLD, recompute=True, sequence_parallel=sequence_parallel)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x):
        model(torch.zeros(batch_size, shape.seq_length, dtype=torch.long))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(kept.numel() for place, kept in saved.items() if place not in weights)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_recomputed_layer_keeps_is_what_real_ranks_keep(sequence_parallel):
    few, many = (launch(saved_numbers, count, sequence_parallel, world_size=4)[0] for count in (1, 3))
    formula = activation_bytes_per_layer(SHAPE, 2, 4, sequence_parallel=sequence_parallel, recompute="full")
    assert (many - few) / 2 == formula / 2  # bytes, 2 for each number


def layers_messages(num_layers, sequence_parallel, recompute, early_stop=False):
    shape = replace(SHAPE, num_layers=num_layers)
    model = ParallelGPT(shape, dist.group.WORLD, recompute=recompute, sequence_parallel=sequence_parallel)
    tokens = torch.zeros(2, shape.seq_length, dtype=torch.long)
    with communication_log() as log, set_checkpoint_early_stop(early_stop):
        model.loss(model(tokens), tokens).backward()
    return log


def counted_bytes(sequence_parallel, recompute, early_stop=False):
    """What two layers more send: what is not a layer's drops out."""
    layout, sums = ParallelLayout(2, tp_size=2), []
    for num_layers in (1, 3):
        logs = launch(layers_messages, num_layers, sequence_parallel, recompute, early_stop, world_size=2)
        sent = sent_by_axis(logs, layout)
        if sequence_parallel:
            sums.append(sent["tp", "all_gather"] + sent["tp", "reduce_scatter"])
        else:
            sums.append(sent["tp", "all_reduce"])
    return sums[1] - sums[0]


def formula_bytes(sequence_parallel, recompute):
    known = dict(gpus_per_node=8, batch_size=2, bytes_per_element=4)
    options = dict(sequence_parallel=sequence_parallel, recompute="full" if recompute else "none")
    return step_traffic(replace(SHAPE, num_layers=2), ParallelLayout(2, tp_size=2), **known, **options)[
        "tp"
    ].total_bytes


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_tensor_messages_of_layers_are_those_of_real_ranks(sequence_parallel, recompute):
    assert counted_bytes(sequence_parallel, recompute) == formula_bytes(sequence_parallel, recompute)


def test_torch_stops_before_the_last_message_of_a_recomputed_layer():
    each = formula_bytes(False, False) / 4  # one all-reduce in each of the layers
    assert counted_bytes(False, True, early_stop=True) == formula_bytes(False, True) - each


def handed_over(sequence_parallel):
    model = ParallelGPT(SHAPE, dist.group.WORLD, num_stages=2, sequence_parallel=sequence_parallel)
    return model(torch.zeros(2, SHAPE.seq_length, dtype=torch.long)).nbytes


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_stage_hands_over_is_what_real_ranks_hand_over(sequence_parallel):
    known = dict(gpus_per_node=8, batch_size=2, bytes_per_element=4, sequence_parallel=sequence_parallel)
    formula = step_traffic(SHAPE, ParallelLayout(4, tp_size=2, pp_size=2), **known)["pp"].total_bytes
    assert formula == 2 * sum(launch(handed_over, sequence_parallel, world_size=2))  # there and back
