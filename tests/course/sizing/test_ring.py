"""The cost of a collective on a ring."""

import pytest

from course.sizing.ring import bus_factor, ring_steps


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 1024])
def test_bus_factors_are_those_of_nccl_tests(world_size):
    n = world_size
    assert bus_factor("all_reduce", n) == pytest.approx(2 * (n - 1) / n)
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(operation, n) == pytest.approx((n - 1) / n)


def test_the_steps_of_a_ring():
    assert [ring_steps("all_reduce", n) for n in (1, 2, 4)] == [0, 2, 6]
