"""A stage gives the gradients of one process, whatever it is made of, and holds activations no longer than it must."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit import pipeline
from labkit.groups import init_groups
from labkit.launch import World, launch
from labkit.layout import ParallelLayout
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from tests.support.pipelines import WIDTHS, even, mean_square, model_chunks, parity


class ForgetsItsInput(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return (2 * self.weight).expand(len(x), -1)


def frozen_chunks(which, count):
    chunks = model_chunks(count, square=True)
    for number in which:
        chunks[number].requires_grad_(False)
    return chunks


def chunks_with(number, make, count):
    chunks: list[nn.Module] = list(model_chunks(count, square=True))
    chunks[number] = make()
    return chunks


def unusual_stages():
    for number in range(3):
        yield partial(frozen_chunks, [number])
        yield partial(chunks_with, number, partial(ForgetsItsInput, WIDTHS[0]))
        yield partial(chunks_with, number, nn.Identity)
    yield partial(frozen_chunks, [0, 1])


@pytest.mark.parametrize("make_schedule", [gpipe, one_f_one_b, zero_bubble])
def test_stages_that_are_frozen_or_forget_their_input_or_do_nothing(make_schedule):
    with World(3) as world:
        for make in unusual_stages():
            world.run(parity, make_schedule(3, 4), rows=even, make=make)


def test_the_mean_is_over_rows_whatever_their_number_in_a_micro_batch():
    launch(parity, one_f_one_b(2, 4), rows=lambda m: [4, 1, 3, 2], targets=True, world_size=2)


def test_the_loss_of_several_targets_is_that_of_cross_entropy():
    def classify():
        groups = init_groups(ParallelLayout(2, pp_size=2))
        torch.manual_seed(0)
        chunks = [nn.Linear(4, 4), nn.Linear(4, 3)]
        x, labels = torch.randn(6, 4), torch.randint(0, 3, (6,))
        mine = [chunks[groups.coords.pp]]
        got = pipeline.run(gpipe(2, 3), mine, groups, x.split(2), targets=labels.split(2), loss=F.cross_entropy)
        return got, F.cross_entropy(nn.Sequential(*chunks)(x), labels)

    _, (got, expected) = launch(classify, world_size=2)
    torch.testing.assert_close(got, expected.detach())


class Activation:
    """What a node of autograd's graph keeps until its backward."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, given):
        ctx.activation = Activation()
        given.append(weakref.ref(ctx.activation))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def most_alive(schedule):
    """For how many passes this rank kept activations at once, and for how many after the step."""
    groups = init_groups(ParallelLayout(schedule.num_stages, pp_size=schedule.num_stages))
    given, alive = [], []

    class Watched(nn.Linear):
        def forward(self, x):
            output = Keeps.apply(super().forward(x), given)
            alive.append(sum(each() is not None for each in given))
            return output

    inputs = torch.zeros(schedule.num_micro_batches, 4).split(1)
    pipeline.run(schedule, [Watched(4, 4) for _ in range(schedule.num_chunks)], groups, inputs, loss=mean_square)
    return max(alive), sum(each() is not None for each in given)


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), one_f_one_b(4, 6), interleaved(4, 6, 2), zero_bubble(4, 6), zero_bubble(4, 9, 3)]
)
def test_activations_live_until_their_backward_and_no_longer(schedule):
    found = launch(most_alive, schedule, world_size=4)
    assert found == [(schedule.peak_in_flight(rank), 0) for rank in range(4)]
