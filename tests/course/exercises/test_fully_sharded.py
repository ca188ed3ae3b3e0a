"""The exercises of notebook 14: solutions agree with one process, and wrong ways are named."""

import pytest
import torch
import torch.nn.functional as F

from course.exercises import fully_sharded
from course.exercises.values import same
from course.sizing import Plan, memory
from course.sizing.stage_memory import stage_parameters
from labkit.launch import launch
from labkit.shape import GPT


def unit(in_features, out_features):
    x, shard, _ = fully_sharded.forward_inputs(in_features, out_features)
    out = fully_sharded.my_unit_forward(x, shard, out_features)
    grad_x, grad_shard = fully_sharded.my_unit_backward(grad := torch.ones_like(out) / len(x), x.detach(), shard)
    return [each.detach() for each in (x, shard, out, grad, grad_x, grad_shard)]


def accumulated(num_micro_batches):
    model, micro_batches = fully_sharded.accumulate_inputs(num_micro_batches, num_rows=2)
    model = model.__deepcopy__({})
    return fully_sharded.my_accumulate(model, micro_batches), micro_batches, model.state_dict()


def norm(tp_size, shard_size):
    gradients, is_cut, groups = fully_sharded.norm_inputs(tp_size, shard_size)
    return fully_sharded.my_norm(gradients, is_cut, groups), gradients


def solutions():
    """On one rank: what all solutions answer, and to what."""
    return {"units": [unit(2, 3), unit(2, 4)], "accumulated": accumulated(3), "norms": [norm(2, 2), norm(1, 2)]}


@pytest.fixture(scope="module")
def solved():
    return launch(solutions, world_size=4)


@pytest.mark.parametrize(("number", "out_features"), [(0, 3), (1, 4)])
def test_a_sharded_unit_agrees_with_autograd_in_one_process(solved, number, out_features):
    ranks = zip(*(rank["units"][number] for rank in solved))
    x, shard, out, grad, grad_x, grad_shard = (torch.cat(parts) for parts in ranks)
    x.requires_grad_()
    shard.requires_grad_()
    weight, bias, _ = shard.tensor_split([2 * out_features, 3 * out_features])
    expected = F.linear(x, weight.view(out_features, 2), bias)
    expected.backward(grad)
    assert same(out, expected) and same(grad_x, x.grad)
    assert shard.grad is not None and same(grad_shard, shard.grad / 4)  # the mean over ranks of means over their rows


@pytest.mark.parametrize("gib", [200, 56, 30, 22, 10])
def test_which_stage_fits_agrees_with_the_sizing(gib):
    gpt = GPT(num_layers=32, hidden_size=4096, seq_length=2048, vocab_size=51200, num_attention_heads=32)
    held, plan = [], None
    for stage in range(4):
        plan = Plan(gpt, world_size=16, batch_size=16, zero_stage=stage)
        held.append(memory(plan).total - memory(plan).activations)
    assert plan is not None
    fitting = [stage for stage, each in enumerate(held) if each <= gib * 2**30]
    assert fully_sharded.my_stage(round(stage_parameters(plan, 0)), 16, gib) == (fitting[0] if fitting else None)


def test_accumulation_agrees_with_one_backward_in_one_process(solved):
    ranks = [rank["accumulated"] for rank in solved]
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    layers.load_state_dict(ranks[0][2])
    layers(torch.cat([x for _, micro_batches, _ in ranks for x in micro_batches])).square().mean().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in layers.parameters() if parameter.grad is not None])
    found = [torch.cat(pieces) for pieces in zip(*(pieces for pieces, *_ in ranks))]
    assert same(torch.cat(found), expected)


@pytest.mark.parametrize(("number", "cut", "whole"), [(0, [0, 1, 2, 3], [0, 2]), (1, [0, 1], [0, 1])])
def test_the_norm_is_that_of_the_whole_gradient(solved, number, cut, whole):
    """Which ranks hold the pieces: of two tensor ranks and two shards, then of two shards and two replicas."""
    gradients = [rank["norms"][number][1] for rank in solved]
    everything = torch.cat([*(gradients[rank][0] for rank in cut), *(gradients[rank][1] for rank in whole)])
    for rank in solved:
        assert same(rank["norms"][number][0], everything.norm())
