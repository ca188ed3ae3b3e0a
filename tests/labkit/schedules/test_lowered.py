"""Messages as ops: where they stand, and that by NCCL's rules no rank waits for ever.

`check` lets a schedule pass only if its lowered lists come to their end, strictly by NCCL's rules. Here are all named
schedules of some sizes, and schedules at random; a sweep looks at all sizes up to p = 8 and m = 4p. What real ranks do
by these rules is in tests/labkit/pipeline.
"""

from random import Random

import pytest

from labkit.schedules import (
    RECV,
    SEND,
    Message,
    Op,
    Schedule,
    ScheduleDeadlock,
    check,
    check_messages,
    gpipe,
    greedy,
    interleaved,
    lowered,
    one_f_one_b,
    v_shape,
    zero_bubble_v,
)
from tests.support.pipelines import every_schedule, in_a_v
from tests.support.schedules import folded, ops, schedule_of
from tests.support.sweep import IS_SWEEP


def written(schedule, rank, **options):
    return ", ".join(map(str, lowered(schedule, **options)[rank]))


def test_receives_stand_where_the_sender_starts_what_it_will_send():
    schedule = one_f_one_b(2, 3)
    assert written(schedule, 0).startswith("F0, send F0 to 1, F1, send F1 to 1, recv B0 from 1, B0, recv B1 from 1, F2")
    assert written(schedule, 1).startswith("recv F0 from 0, recv F1 from 0, F0, B0, send B0 to 0, F1")


def test_without_recv_ahead_both_ends_stand_where_the_message_is_sent():
    schedule = one_f_one_b(2, 3)
    assert written(schedule, 1, recv_ahead=False).startswith("recv F0 from 0, F0, recv F1 from 0, B0, send B0 to 0, F1")


@pytest.mark.parametrize("recv_ahead", [True, False])
@pytest.mark.parametrize("schedule", [*every_schedule(3, 6), *folded(3, 2)], ids=lambda schedule: schedule.name)
def test_every_op_is_there_and_each_message_has_two_ends(schedule, recv_ahead):
    ends = {SEND: [], RECV: []}
    num_crossing = 0
    for rank, items in enumerate(lowered(schedule, recv_ahead)):
        assert tuple(item for item in items if isinstance(item, Op)) == schedule.ranks[rank]
        for index, item in enumerate(items):
            if isinstance(item, Op):
                num_crossing += sum(other != rank for other, _ in schedule.needs(rank, item))
                continue
            is_send = item.action == SEND
            assert item.op in (items[:index] if is_send else items[index:])  # sent after it, or received before it
            sender = (rank, item.op) if is_send else schedule.neighbor(rank, item.op, -1)
            assert schedule.stage_of(sender[0], sender[1].chunk) == item.stage
            pair = (rank, item.peer) if is_send else (item.peer, rank)
            ends[item.action].append((*pair, item.key))
    assert sorted(ends[SEND]) == sorted(ends[RECV])
    assert len(set(ends[SEND])) == len(ends[SEND]) == num_crossing


def test_a_fold_is_not_a_message():
    lists = lowered(zero_bubble_v(2, 4))
    assert {item.peer for item in lists[1] if isinstance(item, Message)} == {0}
    turns = {(item.op.kind, item.op.chunk) for item in lists[1] if isinstance(item, Message) and item.action == RECV}
    assert turns == {("forward", 0), ("backward", 1)}  # not forward 1 nor backward 0, which rank 1 gives itself


# -- nobody waits for ever ------------------------------------------------------------------------------------------


def posted_late(lists):
    """The same lists with each receive just before the op that needs it."""
    late = []
    for items in lists:
        receives = {item.op: item for item in items if isinstance(item, Message) and item.action == RECV}
        rest = [item for item in items if item not in receives.values()]
        late.append([entry for item in rest for entry in (receives.get(item), item) if entry])
    return late


@pytest.mark.parametrize(
    "schedule", [interleaved(4, 11, 2), zero_bubble_v(8, 24), greedy(4, 12, 12)], ids=lambda schedule: schedule.name
)
def test_receives_that_are_posted_when_needed_would_deadlock(schedule):
    with pytest.raises(ScheduleDeadlock, match=r"rank \d waits at send \S+ to \d for recv \S+ from \d of rank \d"):
        check_messages(schedule.name, posted_late(lowered(schedule)))


def test_one_queue_for_each_pair_deadlocks_where_receives_are_ahead():
    for schedule in (one_f_one_b(2, 4), interleaved(2, 4, 2), zero_bubble_v(4, 8)):
        check_messages(schedule.name, lowered(schedule, recv_ahead=False), one_queue_per_pair=True)
        with pytest.raises(ValueError, match=r"the two ends of queue .* have different orders"):
            check_messages(schedule.name, lowered(schedule), one_queue_per_pair=True)


def test_a_queue_whose_ends_disagree_is_refused():
    """Its messages would be taken for each other."""
    first, second = lowered(gpipe(2, 2))
    receives = [item for item in second if isinstance(item, Message) and item.action == RECV]
    swapped = [*reversed(receives), *(item for item in second if item not in receives)]
    with pytest.raises(ValueError, match=r"'GPipe': the two ends of queue \('forward', 0, 1\) have different orders"):
        check_messages("GPipe", [first, swapped])


def test_a_message_that_is_never_sent_holds_up_the_op_that_needs_it_and_none_before():
    schedule = schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1")
    check(schedule, allow_deadlock=True)
    assert written(schedule, 0) == "F0, send F0 to 1, recv B0 from 1, B0, F1, send F1 to 1, recv B1 from 1, B1"
    with pytest.raises(ScheduleDeadlock) as told:
        check_messages("own", lowered(schedule))
    assert [str(told.value.waits[rank][0]) for rank in (0, 1)] == ["B0", "F1"]
    assert ops("F0 F1 B0 B1") == tuple(item for item in lowered(schedule)[1] if isinstance(item, Op))


SIZES = [(p, m) for p in range(2, 9) for m in range(1, 4 * p + 1)] if IS_SWEEP else [(2, 5), (3, 3), (4, 11), (5, 8)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_all_named_schedules_come_to_their_end(p, m):
    limited = [greedy(p, m, limit) for limit in range(2, 2 * p + 3)] if IS_SWEEP else []
    for schedule in [*every_schedule(p, m), *in_a_v(p, m), *folded(p, m), *limited]:
        check(schedule)
        check(schedule.forward_only())


@pytest.mark.parametrize("p", range(2, 9))
def test_interleaving_comes_to_its_end_with_any_number_of_micro_batches(p):
    for m in [*range(1, 2 * p + 4, 3), 4 * p - 1]:
        check(interleaved(p, m, 2))


def at_random(p, m, v, stages, seed):
    """Any order in which each op comes after what it needs."""
    dice, ranks, done = Random(seed), [[] for _ in range(p)], set()
    empty = Schedule("at random", p, m, ranks, v, stages=stages)
    left = [(rank, Op(kind, i, c)) for rank in range(p) for kind in empty.kinds for i in range(m) for c in range(v)]
    while left:
        rank, op = dice.choice([pair for pair in left if done.issuperset(empty.needs(*pair))])
        left.remove((rank, op))
        done.add((rank, op))
        ranks[rank].append(op)
    return Schedule(f"at random, {seed}", p, m, ranks, v, stages=stages)


@pytest.mark.parametrize("seed", range(150 if IS_SWEEP else 12))
def test_any_sound_schedule_comes_to_its_end(seed):
    """Most receive in a different order than the sender sends, and need what a rank has to keep for later."""
    p, m = 2 + seed % 4, 1 + seed % 5
    for v, stages in ((1, ()), (2, ()), (3, ()), (2, v_shape(p))):
        check(at_random(p, m, v, stages, seed))
