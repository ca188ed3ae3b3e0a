"""The exercises of notebook 16: solutions agree with what the lab computes."""

import pytest

from course.exercises import planning as exercises
from course.sizing import Plan, goodput, memory, training_days
from course.sizing.runs import LLAMA_70B


@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_are_those_of_sizing(sharded):
    plan = Plan(LLAMA_70B, 64, 64, 8, 4, zero_stage=int(sharded))
    held = memory(plan)
    ours = exercises.my_state_bytes(plan.model.num_parameters, 8, 4, 2, sharded)
    assert held.total - held.activations == pytest.approx(ours, rel=0.15)  # the embedding is on one stage of four


def test_the_gpus_meet_the_deadline_and_one_less_does_not():
    gpus = exercises.my_gpus_needed(300, 175, 34, 140)
    assert training_days(300e9, 175e9, gpus, 140e12) <= 34 < training_days(300e9, 175e9, gpus - 1, 140e12)


def test_new_work_is_the_share_of_goodput():
    found = goodput(16_384, 3.8e-3, 60, 600, interval_seconds=1200)
    ours = exercises.my_new_work(found.failure_seconds / 3600, 20, 1, 10)
    assert ours == pytest.approx(found.share)
