"""A schedule as data: places, needs, what `check` finds wrong, and how it prints."""

import re

import pytest

from labkit.schedules import Op, Schedule, check, gpipe, interleaved, zero_bubble
from tests.support.schedules import KINDS, ops, schedule_of

F, B, W = KINDS.values()


def test_places_of_chunks():
    schedule = interleaved(3, 3, 2)
    stages = range(schedule.num_stages)
    homes = [(schedule.rank_of_stage(stage), schedule.chunk_of_stage(stage)) for stage in stages]
    assert homes == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [schedule.stage_of(*home) for home in homes] == list(stages)


def test_a_forward_crosses_from_the_last_rank_to_the_first_chunk_after():
    schedule = interleaved(3, 3, 2)
    assert schedule.needs(0, Op(F, 1, 1)) == [(2, Op(F, 1, 0))]
    assert schedule.needs(2, Op(B, 1, 0)) == [(0, Op(B, 1, 1)), (2, Op(F, 1, 0))]
    assert schedule.needs(2, Op(B, 1, 1)) == [(2, Op(F, 1, 1))]
    assert schedule.needs(0, Op(F, 1, 0)) == []
    assert zero_bubble(2, 2).needs(1, Op(W, 1)) == [(1, Op(B, 1))]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (schedule_of("F0 B0 F1 B1", "F0 B0 F1"), "rank 1 lacks B1: each rank runs forward, backward once for each of"),
        (schedule_of("F0 F1", "F0 F1 B0 B1"), "rank 0 lacks B0 and 1 more"),
        (schedule_of("F0 F0 B0 F1 B1"), "rank 0 has F0 2 times"),
        (schedule_of("F0 B0 F1 B1 F2"), "rank 0 has F2, which this schedule has no use for"),
        (schedule_of("F0 W0 B0 F1 B1 W1"), "rank 0 has W0, which this schedule has no use for"),
        (schedule_of("F0 B0 F1 B1", num_chunks=2), "rank 0 lacks F0.1 and 3 more: each rank runs forward, backward "
         "once for each of 2 micro-batches and 2 chunks"),
        (Schedule("own", 1, 1, [[(F, 0, 0), (B, 0, 0)]]), "rank 0 has ('forward', 0, 0), which this schedule has no"),
        ([["F0"]], "[['F0']] is not a Schedule: make one, such as"),
        ("1f1b", "'1f1b' is not a Schedule: make one, such as labkit.schedules.one_f_one_b(4, 8)"),
        (Schedule("own", 2, 1, [ops("F0 B0")]), "'own' has lists for 1 rank, but pp_size=2: give each rank one"),
        (schedule_of("B0 F0", m=1), "rank 0 has B0 before F0, whose result it needs: swap them"),
        (
            schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"),
            "deadlock in 'own': rank 0 waits at B0 for B0 of rank 1; rank 1 waits at F1 for F1 of rank 0: move an op",
        ),
    ],
)  # fmt: skip
def test_check_names_what_is_wrong(schedule, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(schedule)


@pytest.mark.parametrize("kinds", [("F", "B"), (B, F), ()])
def test_kinds_of_one_s_own_are_refused(kinds):
    with pytest.raises(ValueError, match=r"must be the first one, the first two or all of forward, backward, weight_"):
        schedule_of("F0 B0", m=1, kinds=kinds)


def test_a_finished_rank_is_not_in_the_report_of_a_deadlock():
    with pytest.raises(ValueError) as told:
        check(schedule_of("F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B1 B0"))
    assert "rank 2" in str(told.value).split(": ", 1)[1]  # it holds B0 back, which rank 1 waits for before it gives F1
    schedule = Schedule("forward", 3, 1, [[Op(F, 0)], [], [Op(F, 0)]], kinds=(F,))
    with pytest.raises(ValueError, match=r"'forward': rank 2 waits at F0 for F0 of rank 1: "):
        list(schedule.in_order())


def test_a_long_schedule_is_wrapped_under_its_rank():
    lines = str(gpipe(11, 40)).splitlines()
    assert lines[0] == "GPipe: 11 ranks, 40 micro-batches"
    assert lines[1].startswith("rank 0  | F0 F1")
    assert lines[2].startswith("        | ")
    assert max(map(len, lines)) <= 100
    words = " ".join(line.split("| ")[1] for line in lines[1:] if line.startswith(("rank 0", "     ")))
    assert ops(words)[: 2 * 40] == gpipe(11, 40).ranks[0]
