"""A schedule as data: places, needs, whose deadlock `check` reports, and how it prints."""

import pytest

from labkit.schedules import Op, Schedule, check, gpipe, interleaved, zero_bubble
from tests.support.schedules import KINDS, ops, schedule_of

F, B, W = KINDS.values()


def test_a_forward_crosses_from_the_last_rank_to_the_first_chunk_after():
    schedule = interleaved(3, 3, 2)
    assert schedule.needs(0, Op(F, 1, 1)) == [(2, Op(F, 1, 0))]
    assert schedule.needs(2, Op(B, 1, 0)) == [(0, Op(B, 1, 1)), (2, Op(F, 1, 0))]
    assert schedule.needs(2, Op(B, 1, 1)) == [(2, Op(F, 1, 1))]
    assert schedule.needs(0, Op(F, 1, 0)) == []
    assert zero_bubble(2, 2).needs(1, Op(W, 1)) == [(1, Op(B, 1))]


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
