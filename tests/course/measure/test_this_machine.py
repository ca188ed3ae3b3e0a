"""This machine as a Hardware: every rate is measured, plausible, and fit for an estimate."""

import math

import pytest

from course.measure.this_machine import measured_hardware
from course.sizing import Plan, step_time
from labkit.shape import GPT


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_measured_rates_are_plausible_and_can_be_planned_with(num_ranks):
    here = measured_hardware(num_ranks)
    assert f"{num_ranks} rank" in here.name
    assert here.gpus_per_node == num_ranks
    assert 1e8 < here.peak_flops < 2e15
    assert 1e8 < here.memory_bytes_per_second < 1e13
    assert here.memory_bytes > 2**26
    assert (here.node_bytes_per_second == math.inf) == (num_ranks == 1)
    plan = Plan(GPT(2, 64, 32, 100, 4), num_ranks, 4, zero_stage=0)
    assert 0 < step_time(plan, here).total < 60
    # nothing is taken off twice
    assert (here.product_efficiency, here.memory_efficiency, here.node_efficiency) == (1, 1, 1)
    assert here.layer_overhead_seconds == 0
