"""Where stages live: in turn, in a V, or as somebody writes down; what cannot be is refused."""

import re

import pytest

from labkit.schedules import Op, check, gpipe, interleaved, round_robin, v_shape
from tests.support.schedules import folded, schedule_of


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_placements_are_the_published_rules(p):
    for v in (1, 2, 3, 4):
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


def test_a_rank_that_uses_its_second_leg_before_the_first_is_told():
    with pytest.raises(ValueError, match=re.escape("rank 1 has F0.1 before F0, whose result it needs: swap them")):
        check(schedule_of("F0 F0.1 B0.1 B0", "F0.1 F0 B0.1 B0", m=1, num_chunks=2, stages=v_shape(2)))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            [[0, 3], [0, 2]],
            "stage 0 of stages=[[0, 3], [0, 2]] lives twice: give each of 2 ranks 2 of the stages 0 to 3",
        ),
        ([[0, 3], [1, 4]], "stage 4 of stages=[[0, 3], [1, 4]] does not exist: give each"),
        ([[0, 3], [1]], "stages=[[0, 3], [1]] has [2, 1] stages on its ranks: give each of 2 ranks 2 of"),
        ([[0, 3, 1], [2]], "has [3, 1] stages on its ranks"),
        ([0, 1], "stages=[0, 1] has [0, 0] stages on its ranks: give each of 2 ranks 2"),
        ([[0.0, 3], [1, 2]], "stage 0.0 of stages=[[0.0, 3], [1, 2]] does not exist"),
        ([[0, [3]], [1, 2]], "stage [3] of stages=[[0, [3]], [1, 2]] does not exist"),
    ],
)
def test_a_stage_that_lives_twice_or_nowhere_is_refused(stages, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        schedule_of("F0 B0", "F0 B0", num_chunks=2, stages=stages)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: v_shape(0), "pp_size=0 must be at least 1"),
        (lambda: v_shape("2"), "pp_size='2' must be a whole number"),
        (lambda: round_robin(-1), "pp_size=-1 must be at least 1"),
        (lambda: round_robin(2, 0), "num_chunks=0 must be at least 1"),
    ],
)
def test_a_placement_of_no_ranks_is_refused(make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()
