"""The known orders: the published ones, their formulas, and for every small size each op once and in time."""

from itertools import product

import pytest

from labkit.schedules import (
    check,
    dualpipe_v,
    gpipe,
    greedy,
    interleaved,
    one_f_one_b,
    v_half,
    v_min,
    zero_bubble,
    zero_bubble_v,
)
from tests.support.schedules import KINDS, ops
from tests.support.sweep import IS_SWEEP

F, B, W = KINDS.values()
EVERY_SIZE = list(product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 6, 8, 9, 16)))  # p, m
SIZES = EVERY_SIZE if IS_SWEEP else EVERY_SIZE[::5]  # has each p, and each m


def every_schedule(p, m):
    yield from (gpipe(p, m), one_f_one_b(p, m))
    yield from (interleaved(p, m, v) for v in range(1, 5))
    yield from (zero_bubble(p, m, extra) for extra in range(p))
    yield from (zero_bubble_v(p, m), v_half(p, m), v_min(p, m), greedy(p, m, 2), greedy(p, m, 3))
    yield from [dualpipe_v(p, m)] if m >= 2 * p else []


# Figure 4 of arXiv 2104.04473 (p=4, m=8, v=2; its micro-batches count from 1). The split backward: by the rule of
# arXiv 2401.10241, section 2, worked out by hand.
GOLDEN = [
    (one_f_one_b(4, 8), 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
    (one_f_one_b(4, 8), 3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    (one_f_one_b(4, 2), 0, "F0 F1 B0 B1"),
    (gpipe(4, 3), 2, "F0 F1 F2 B0 B1 B2"),
    (
        interleaved(4, 8, 2), 3,
        "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 "
        "F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4 B5 B6 B7",
    ),
    (
        interleaved(4, 8, 2), 0,
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 B2 B3 "
        "B4.1 B5.1 B6.1 B7.1 B4 B5 B6 B7",
    ),
    (zero_bubble(4, 5), 0, "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 W2 B3 W3 B4 W4"),
    (zero_bubble(4, 5), 3, "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4"),
    (zero_bubble(2, 4, extra_in_flight=1), 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "rank", "expected"), GOLDEN)
def test_orders_are_the_published_ones(schedule, rank, expected):
    assert schedule.ranks[rank] == ops(expected)


def stage_by_hand(schedule, rank, op):
    """In a V, which alone splits backward and has both ends on rank 0, odd chunks go up."""
    p = schedule.pp_size
    goes_up = schedule.end_ranks == {0} and schedule.kinds[-1] == W and op.chunk % 2
    return op.chunk * p + (p - 1 - rank if goes_up else rank)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_each_op_runs_once_and_after_what_it_needs(p, m):
    for schedule in every_schedule(p, m):
        check(schedule)
        done = set()
        for rank, op, _ in schedule.in_order():
            stage = stage_by_hand(schedule, rank, op)
            if op.kind == F and stage > 0:
                assert (F, op.micro_batch, stage - 1) in done
            if op.kind == B:
                assert (F, op.micro_batch, stage) in done
                assert stage == p * schedule.num_chunks - 1 or (B, op.micro_batch, stage + 1) in done
            if op.kind == W:
                assert (B, op.micro_batch, stage) in done
            done.add((op.kind, op.micro_batch, stage))
        assert len(done) == sum(map(len, schedule.ranks)) == len(schedule.kinds) * m * p * schedule.num_chunks
        forward = schedule.forward_only()
        check(forward)
        assert forward.ranks == tuple(tuple(op for op in ops if op.kind == F) for ops in schedule.ranks)


@pytest.mark.parametrize(("p", "m"), EVERY_SIZE)
def test_peaks_in_flight(p, m):
    for rank in range(p):
        assert gpipe(p, m).peak_in_flight(rank) == m
        assert one_f_one_b(p, m).peak_in_flight(rank) == min(p - rank, m)
        assert zero_bubble(p, m).peak_in_flight(rank) == min(m, p)
    for extra in range(p):
        schedule = zero_bubble(p, m, extra)
        assert max(schedule.peak_in_flight(rank) for rank in range(p)) == min(m, p + extra)
    round_size = -(-m // max(1, m // p))
    for rank, v in product(range(p), (2, 3, 4)):
        expected = min(v * m, 2 * (p - rank - 1) + (v - 1) * round_size + 1)
        assert interleaved(p, m, v).peak_in_flight(rank) == expected


def test_interleaving_costs_the_published_memory():
    for p, v in product(range(1, 9), range(2, 5)):
        peak = interleaved(p, 2 * p, v).peak_in_flight(0) / v  # in whole micro-batches
        assert peak == pytest.approx(one_f_one_b(p, 2 * p).peak_in_flight(0) * (1 + (p - 1) / (p * v)))
