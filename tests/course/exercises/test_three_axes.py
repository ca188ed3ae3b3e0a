"""The exercises of notebook 08: cases that differ, solutions that agree with labkit, and deadlocks with advice."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import three_axes
from labkit.gradients import loss_and_grad_norm
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.placement import Placement, Shard
from labkit.tensor_parallel import unshard


def test_each_case_of_place_teaches_something_else():
    found = [three_axes.my_place(*case) for case in three_axes.place.cases]
    assert found[:8] == [(1, 1, 8), (2, 1, 4), (2, 2, 2), (1, 4, 2), (1, 2, 4), (2, 4, 1), (4, 2, 1), (4, 1, 2)]
    assert found[8:] == [None, (8, 1, 1), (1, 8, 1), None]
    assert all(t * p * d == 8 for t, p, d in filter(None, found))


def as_the_trainer_counts(num_stages):
    """The same gradients on parameters, counted by `loss_and_grad_norm`."""
    with init_groups(ParallelLayout(2 * num_stages, tp_size=2, pp_size=num_stages)) as groups:
        gradients, kinds, tp_rank = three_axes.norm_inputs(num_stages)
        assert (groups.coords.tp, groups.coords.pp) == (tp_rank, dist.get_rank() // 2)
        placed = {}
        for gradient, kind in zip(gradients, kinds, strict=True):
            parameter = torch.nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient
            whole, cut = Placement(copy_groups=(groups.tp,)), (Shard(0, 2 * len(parameter), groups.tp),)
            placed[parameter] = whole if kind == "whole" else Placement(cut, is_tied_copy=kind == "copy")
        first, placement = next(iter(placed.items()))
        assert unshard(first, placement).shape == (6,)
        _, counted, *_ = loss_and_grad_norm(torch.zeros(()), placed, groups)
    return counted, three_axes.my_norm(gradients, kinds, tp_rank).item()


def norm_by_average(gradients, kinds, tp_rank):
    total = torch.zeros(())
    for gradient, kind in zip(gradients, kinds, strict=True):
        if kind == "shard" or (kind == "whole" and tp_rank == 0):
            total += gradient.square().sum()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.sqrt()


def test_an_average_of_the_squares_is_recognised(launches_on_kept_ranks):
    assert "squares were averaged" in " ".join(three_axes.norm.verdict(norm_by_average).text.split())


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_norm_is_the_trainers(num_stages):
    for counted, mine in launch(as_the_trainer_counts, num_stages, world_size=2 * num_stages, backend="gloo"):
        assert counted == pytest.approx(mine, rel=1e-6)


def forgotten_by_one_end(gradient, num_stages):
    ends = dist.new_group([0, num_stages - 1])
    if dist.get_rank() == 0:
        dist.all_reduce(gradient, group=ends)
    return gradient


def test_an_all_reduce_by_one_end_alone_is_a_deadlock_with_advice(launches_on_kept_ranks):
    verdict = three_axes.tied.verdict(forgotten_by_one_end)
    assert verdict.status == "stuck" and "`new_group` is called by every rank" in " ".join(verdict.text.split())


def reduced_in_the_world(gradient, num_stages):
    dist.new_group([0, num_stages - 1])
    if gradient is not None:
        dist.all_reduce(gradient)  # group= is forgotten
    return gradient


@pytest.mark.gloo  # who is missing at the first use of a group has no number
def test_an_all_reduce_without_the_group_is_a_deadlock_with_advice_and_no_crash():
    """And the report names no collective of the check's own, which the learner never called."""
    verdict = three_axes.tied.verdict(reduced_in_the_world)
    text = " ".join(verdict.text.split())
    assert verdict.status == "stuck" and "pass `group=`" in text
    assert "of the world [0, 1, 2, 3]: ranks 0, 3 wait; ranks 1, 2" in text and "rank 1, 2: has returned" in text


def group_made_by_its_members(gradient, num_stages):
    return gradient if gradient is None else three_axes.my_tied(gradient, num_stages)


def test_a_group_that_only_its_members_make_is_noticed_though_the_gradients_are_right(launches_on_kept_ranks):
    verdict = three_axes.tied.verdict(group_made_by_its_members)
    assert verdict.status == "wrong" and "Not every rank calls `new_group`" in " ".join(verdict.text.split())
