"""Where stages live: in turn, or in a V."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.schedules import Op, check, gpipe, interleaved, round_robin, v_shape
from tests.support.schedules import folded


@given(st.integers(1, 8), st.integers(1, 4))
def test_the_placements_are_the_published_rules(p, v):
    assert interleaved(p, 4, v).stages == round_robin(p, v)
    for stage in range(p * v):
        assert stage in round_robin(p, v)[stage % p]
    for stage in range(2 * p):
        assert stage in v_shape(p)[min(stage, 2 * p - 1 - stage)]


@pytest.mark.parametrize(
    "schedule", [*folded(3, 2), gpipe(3, 2), interleaved(3, 2, 3)], ids=lambda schedule: schedule.name
)
def test_a_stage_is_found_where_its_rank_has_it(schedule):
    assert schedule.num_stages == schedule.pp_size * schedule.num_chunks
    for rank in range(schedule.pp_size):
        for chunk in range(schedule.num_chunks):
            stage = schedule.stage_of(rank, chunk)
            assert (schedule.rank_of_stage(stage), schedule.chunk_of_stage(stage)) == (rank, chunk)


def test_in_a_v_the_middle_stages_are_neighbours_on_one_rank_and_both_ends_on_rank_0():
    schedule = folded(3, 1)[0]
    check(schedule)
    assert schedule.neighbor(2, Op("forward", 0), 1) == (2, Op("forward", 0, 1))
    assert schedule.neighbor(2, Op("backward", 0, 1), 1) == (2, Op("backward", 0))
    assert schedule.neighbor(1, Op("forward", 0, 1), 1) == (0, Op("forward", 0, 1))
    assert schedule.neighbor(0, Op("forward", 0, 1), 1) is None
    assert schedule.end_ranks == {0}
    assert gpipe(3, 1).end_ranks == {0, 2}
    assert schedule.forward_only().stages == schedule.stages
