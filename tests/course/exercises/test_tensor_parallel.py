"""The exercises of notebooks 06 and 11: solutions agree with torch, with what ranks measure, and with the model."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.exercises import tensor_parallel as exercises
from course.exercises.values import same
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention, ShardedDropout, seed_replicas
from labkit.tensor_parallel.operators import all_gather
from labtrain.model import ParallelGPT


def backward_by_torch():
    """The solution's values and those of torch's own linear layer on the whole weight, on one rank."""
    grad_y, x, weight = exercises.gather_gradient_inputs(3, 2)
    whole = all_gather(weight, dist.group.WORLD, 0).requires_grad_()
    x = x.requires_grad_()
    F.linear(x, whole).backward(grad_y)
    ours = exercises.my_gather_backward(grad_y, x.detach(), weight)
    return ours, [x.grad, whole.grad.chunk(dist.get_world_size(), 0)[dist.get_rank()]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_backward_solution_agrees_with_torch(world_size):
    for ours, torchs in launch(backward_by_torch, world_size=world_size):
        assert same(ours, torchs)


def test_gathering_the_weight_is_right_but_not_the_way(launches_on_kept_ranks):
    def gathers(grad_y, x, weight):
        mine = grad_y.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        return grad_y @ all_gather(weight, dist.group.WORLD, 0), mine.T @ x

    text = exercises.gather_backward.verdict(gathers).text
    assert "the values are right" in text
    assert "It calls all_gather" in text


def test_a_second_all_reduce_is_told_how_many_bytes_it_sent(launches_on_kept_ranks):
    def reduces_twice(grad_y, x, weight):
        dist.all_reduce(torch.zeros(9))
        return exercises.my_gather_backward(grad_y, x, weight)

    text = " ".join(exercises.gather_backward.verdict(reduces_twice).text.split())
    assert "It sends 72 bytes into all-reduces. One of the size of x is enough: 36 bytes." in text


@pytest.mark.parametrize("fault", exercises.FAULTS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_spread_is_what_ranks_measure(launches_on_kept_ranks, tp_size, fault):
    assert exercises.measured_spread(tp_size, fault) == pytest.approx(exercises.my_spread(tp_size, fault), rel=0.05)


def test_measuring_an_unknown_fault_is_refused(capsys):
    with pytest.raises(ValueError, match="fault='seed' is unknown: use 'same seed', 'local width', 'both'"):
        exercises.measure(2, "seed")
    exercises.measure(1, "both")
    assert capsys.readouterr().out.splitlines()[-1] == "t = 1, both: 1.00 times the right standard deviation"


def masks_of_the_model(sequence_parallel):
    """What a rank of 2 x 2 drops of hidden states and of attention weights, and the same when recomputed."""
    groups = init_groups(ParallelLayout(4, tp_size=2))
    shape = GPT(num_layers=1, hidden_size=16, seq_length=8, vocab_size=11, num_attention_heads=4)
    options = {"dropout": 0.5, "recompute": "full", "sequence_parallel": sequence_parallel}
    model = ParallelGPT(shape, groups.tp, **options)
    seen = {"hidden states": [], "attention weights": []}

    def hidden(module, inputs, output):
        seen["hidden states"].append(output.eq(0))

    def attended(module, inputs):
        seen["attention weights"].append(inputs[0].detach().clone())

    for module in model.layers.modules():
        if isinstance(module, (nn.Dropout, ShardedDropout)):
            module.register_forward_hook(hidden)
        if isinstance(module, ParallelSelfAttention):  # all heads alike, and v = 1: only the mask makes a difference
            nn.init.zeros_(module.qkv.weight)
            nn.init.ones_(module.qkv.bias)
            module.out.register_forward_pre_hook(attended)
    seed_replicas(0, groups)
    ids = torch.zeros(2, 8, dtype=torch.long)
    loss = model.loss(model(ids), ids)
    forward = {place: list(tensors) for place, tensors in seen.items()}
    loss.backward()
    groups.close()
    return {place: (first, seen[place][len(first) :]) for place, first in forward.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_masks_are_those_of_the_model(sequence_parallel):
    ranks = launch(masks_of_the_model, sequence_parallel, world_size=4)  # tensor groups 0 1 and 2 3

    def relation(one, other):
        return "same" if all(map(torch.equal, one, other)) else "different"

    for place in exercises.PLACES:
        first, again = ranks[0][place]
        assert first and again  # torch recomputes no more than it needs: the last mask is not seen again
        found = {
            "tensor ranks": relation(first, ranks[1][place][0]),
            "data replicas": relation(first, ranks[2][place][0]),
            "recomputation": relation(first, again),
        }
        assert found == {across: exercises.my_mask(place, across, sequence_parallel) for across in exercises.ACROSS}
