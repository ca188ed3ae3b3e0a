"""The log of PyTorch's pipeline ops: what a stage ran, in order, and nothing after the block."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from course.ops_log import METHODS, ops_log
from labkit.launch import World
from labkit.schedules import interleaved, one_f_one_b, zero_bubble

NUM_RANKS = 2


@pytest.fixture(scope="module")
def world():
    with World(NUM_RANKS, backend="gloo") as two_ranks:
        yield two_ranks


def two_steps(name, schedule):
    """On a rank: the ops of a logged step, after a step that nobody logs."""
    rank = dist.get_rank()
    place = schedule.num_stages, torch.device("cpu")
    stages = [pipelining.PipelineStage(nn.Linear(2, 2), number, *place) for number in schedule.stages[rank]]
    taken = stages[0] if name == "Schedule1F1B" else stages
    make = getattr(pipelining, name)
    theirs = make(taken, schedule.num_micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.ones(8, 2)
    inputs = [x] if rank == 0 else []
    theirs.step(*inputs, target=x)
    with ops_log() as ops:
        theirs.step(*inputs, target=x)
    return ops


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("Schedule1F1B", one_f_one_b(NUM_RANKS, 4)),
        ("ScheduleInterleaved1F1B", interleaved(NUM_RANKS, 4, num_chunks=2)),
        ("ScheduleInterleavedZeroBubble", zero_bubble(NUM_RANKS, 4)),
    ],
)
def test_one_step_is_noted_op_by_op(world, name, schedule):
    assert world.run(two_steps, name, schedule) == [list(row) for row in schedule.ranks]


def methods():
    return {name: getattr(pipelining.PipelineStage, name) for name in METHODS.values()}


def log_and_fail():
    with ops_log():
        raise ZeroDivisionError


def test_the_stages_are_as_before_when_the_block_ends():
    before = methods()
    with ops_log():
        assert not set(methods().values()) & set(before.values())
    with pytest.raises(ZeroDivisionError):
        log_and_fail()
    assert methods() == before
