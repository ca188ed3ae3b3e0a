"""The schedules of a V: published numbers, torch's own orders as a witness, and the greedy one at every limit."""

import re
from itertools import pairwise

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from course.sizing import simulate
from labkit.schedules import (
    Op,
    Schedule,
    check,
    dualpipe_v,
    greedy,
    v_half,
    v_min,
    v_shape,
    zero_bubble_v,
)
from labkit.schedules.greedy import KINDS

SIZES = [(2, 4), (3, 9), (4, 12), (5, 11), (8, 16)]  # p, m: beside the published p = 4, m = 8
F, B, W = KINDS
IN_TORCH = {"F": [F], "I": [B], "W": [W], "B": [B, W]}


def units(schedule):
    """The makespan in passes through a chunk, all equally long."""
    whole = schedule.num_chunks
    return simulate(schedule, whole, 2 * whole).makespan_seconds


def most_held(schedule):
    return max(schedule.peak_in_flight(rank) for rank in range(schedule.pp_size))


def of_torch(name, p, m):
    """What torch itself would run, an overlapped pair one after the other."""
    ranks = []
    for actions in get_schedule_ops(name, p, m, 2):
        words = [word for action in actions if action for word in re.findall(r"(\d+)([FBIW])(\d+)", str(action))]
        ranks.append([Op(kind, int(i), int(int(s) >= p)) for s, letter, i in words for kind in IN_TORCH[letter]])
    schedule = Schedule(f"torch's {name}", p, m, ranks, 2, KINDS, v_shape(p))
    check(schedule)
    return schedule


def test_makespans_and_chunks_held_are_the_published_ones():
    made = [zero_bubble_v(4, 8), v_half(4, 8), v_min(4, 8)]
    assert [units(schedule) for schedule in made] == [51, 53, 59]
    assert [most_held(schedule) for schedule in made] == [8, 6, 4]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_is_as_fast_as_torchs_and_holds_as_much(p, m):
    schedule, peer = zero_bubble_v(p, m), of_torch("ZBVZeroBubble", p, m)
    assert units(schedule) == units(peer) == 6 * m + p - 1
    assert most_held(schedule) == most_held(peer) == 2 * p


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 8), (1, 2)])
def test_dualpipe_v_is_torchs_order(p, m):
    schedule = dualpipe_v(p, m)
    assert schedule.ranks == of_torch("DualPipeV", p, m).ranks
    assert most_held(schedule) == 2 * p + 1
    assert units(schedule) == 6 * m + p - 1


@pytest.mark.parametrize("p", [2, 5, 8])
def test_zb_v_is_never_slower_than_torchs_and_with_few_micro_batches_faster(p):
    """torch's order starts the first backward late; with m = p ours saves p - 1 units, and none from m = 2p on."""
    for m, saved in ((1, 1), (p, p - 1), (p + 1, 0), (2 * p, 0)):
        schedule, peer = zero_bubble_v(p, m), of_torch("ZBVZeroBubble", p, m)
        assert units(schedule) <= units(peer) - saved
        assert most_held(schedule) <= most_held(peer)
    assert units(zero_bubble_v(p, p)) == 6 * p + p - 1


@pytest.mark.parametrize(
    ("p", "m", "half", "least"),
    [
        (2, 4, 1, 1),
        (3, 9, 5, 5),
        (4, 12, 5, 11),
        (5, 11, 11, 11),
        (8, 16, 17, 27),
        (12, 12, 29, 41),
        (15, 30, 41, 53),
        (16, 32, 41, 59),
    ],
)
def test_half_and_least_memory_cost_the_published_idle_time(p, m, half, least):
    """The papers' limits are half of 1F1B's 6 (p-1) units, and two thirds; ours is below them."""
    assert [units(make(p, m)) - 6 * m for make in (v_half, v_min)] == [half, least]
    assert half <= 3 * (p - 1)
    assert least <= 4 * (p - 1)
    assert most_held(v_half(p, m)) == p + 2 - p % 2
    assert most_held(v_min(p, m)) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 2), (4, 8), (5, 10)])
def test_greedy_holds_no_more_than_its_limit_and_more_memory_is_never_slower(p, m):
    found = {limit: greedy(p, m, limit) for limit in range(2, 2 * p + 3)}
    for limit, schedule in found.items():
        check(schedule)
        assert most_held(schedule) <= limit
    assert all(units(found[more]) <= units(found[fewer]) for fewer, more in pairwise(found))
    assert units(found[2 * p]) <= units(zero_bubble_v(p, m))
    assert units(found[p + 2]) <= units(v_half(p, m))
