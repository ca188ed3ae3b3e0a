"""By NCCL's rules no schedule that `check` lets pass stands still, and no op gets a message meant for another.

Simulated, so that all sizes can be looked at; `test_messages` has the same on real ranks, for a few.
"""

from random import Random

import pytest

from labkit.schedules import Op, Schedule, check, interleaved, v_shape
from tests.support.nccl_simulated import Stuck, run_simulated
from tests.support.pipelines import every_schedule, in_a_v
from tests.support.schedules import folded, own


@pytest.mark.parametrize("p", range(2, 9))
def test_interleaving_runs_with_any_number_of_micro_batches(p):
    """Up to two rounds of p and the rest: with p = 4, the first that stood still was m = 11."""
    for m in [*range(1, 3 * p), 4 * p - 1]:
        num_posted = run_simulated(interleaved(p, m, 2), is_known=m % 2 == 1)
        largest_round = max(p, -(-m // max(1, m // p)))
        assert max(num_posted) <= largest_round - p + 4  # what waits for its turn, and one or two of each kind


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 3), (4, 11), (5, 13)])
def test_every_schedule_runs(p, m, is_known):
    for schedule in [*every_schedule(p, m), *in_a_v(p, m), *folded(p, m)]:
        run_simulated(schedule, is_known)
        run_simulated(schedule.forward_only(), is_known)


def at_random(p, m, v, stages, seed):
    """Any order in which each op comes after what it needs."""
    dice, ranks, done = Random(seed), [[] for _ in range(p)], set()
    empty = Schedule("at random", p, m, ranks, v, stages=stages)
    left = [(rank, Op(kind, i, c)) for rank in range(p) for kind in empty.kinds for i in range(m) for c in range(v)]
    while left:
        rank, op = dice.choice([each for each in left if done.issuperset(empty.needs(*each))])
        left.remove((rank, op))
        done.add((rank, op))
        ranks[rank].append(op)
    return Schedule(f"at random, {seed}", p, m, ranks, v, stages=stages)


@pytest.mark.parametrize("seed", range(12))
def test_any_sound_schedule_runs(seed):
    """Most receive in a different order than the sender sends: without tags, one micro-batch for another, unseen."""
    p, m = 2 + seed % 4, 1 + seed % 5
    for v, stages in ((1, ()), (2, ()), (3, ()), (2, v_shape(p))):
        schedule = at_random(p, m, v, stages, seed)
        check(schedule)
        for is_known in (True, False):
            run_simulated(schedule, is_known)


def test_what_cannot_run_is_stuck_here_too():
    with pytest.raises(Stuck):
        run_simulated(own("F0 B0 F1 B1", "F0 F1 B0 B1"), is_known=True)
