"""Checks a schedule: every rank has its ops, and neither ops nor messages can stand still."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from labkit.schedules.lowered import RECV, SEND, Lists, Message, lowered
from labkit.schedules.schedule import Op, Schedule, ScheduleDeadlock
from labkit.sizes import counted

End = tuple[str, tuple[str, int, int]]  # of a message: SEND or RECV, and the message's key


def check(schedule: Schedule, allow_deadlock: bool = False) -> None:
    """Raise a ValueError unless each rank has each op once, after those on this rank that it needs,
    and all can finish.

    Messages are looked at too, by NCCL's rules: as `lowered` places them with ``recv_ahead``, with
    a queue for each channel, and without, with one queue for each pair of ranks. With
    ``allow_deadlock``, ranks may wait for each other.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{schedule!r} is not a Schedule: make one, such as labkit.schedules.one_f_one_b(4, 8)"
        )
    _check(schedule, allow_deadlock)


@lru_cache(maxsize=64)  # a pipeline asks before every step
def _check(schedule: Schedule, allow_deadlock: bool) -> None:
    if len(schedule.ranks) != schedule.pp_size:
        has = (
            f"has lists for {counted(len(schedule.ranks), 'rank')}, but pp_size={schedule.pp_size}"
        )
        raise ValueError(f"{schedule.name!r} {has}: give each rank one list")
    _check_lists(schedule)
    if not allow_deadlock:
        for _ in schedule.in_order():
            pass
        check_messages(schedule.name, lowered(schedule))
        check_messages(schedule.name, lowered(schedule, recv_ahead=False), one_queue_per_pair=True)


def _check_lists(schedule: Schedule) -> None:
    """Raise a ValueError unless each rank has each op once, after those on this rank that it
    needs.
    """
    m = schedule.num_micro_batches
    v = schedule.num_chunks
    wanted = dict.fromkeys(
        Op(kind, i, chunk) for i in range(m) for chunk in range(v) for kind in schedule.kinds
    )
    passes = counted(m, "micro-batch") + (f" and {counted(v, 'chunk')}" if v > 1 else "")
    rule = f"each rank runs {', '.join(schedule.kinds)} once for each of {passes}"
    for rank, ops in enumerate(schedule.ranks):
        position: dict[Op, int] = {}
        for index, op in enumerate(ops):
            if not isinstance(op, Op) or op not in wanted:
                raise ValueError(
                    f"rank {rank} has {op}, which this schedule has no use for: {rule}"
                )
            if op in position:
                raise ValueError(f"rank {rank} has {op} {ops.count(op)} times: {rule}")
            position[op] = index
        if missing := [op for op in wanted if op not in position]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"rank {rank} lacks {missing[0]}{more}: {rule}")
        for op in ops:
            for other, need in schedule.needs(rank, op):
                if other == rank and position[op] < position[need]:
                    raise ValueError(
                        f"rank {rank} has {op} before {need}, whose result it needs: swap them"
                    )


def check_messages(name: str, lists: Lists, one_queue_per_pair: bool = False) -> None:
    """Raise unless all ranks come to the end of their lists, by rules no looser than NCCL's.

    A queue has no tags: its messages arrive in the order in which they are sent. A rank waits at a
    send until it is received; at a receive until the message before it in its queue has come; and
    at an op until the message that it needs has come. Each kind and direction between two ranks has
    its queue, or each pair has one for everything.

    Raises:
        ValueError: the two ends of a queue have different orders.
        ScheduleDeadlock: ranks wait for each other.
    """
    earlier = _earlier_in_queue(name, lists, one_queue_per_pair)
    left = [deque(_with_needs(items, earlier)) for items in lists]
    come_to: set[End] = set()  # what ranks wait at, or have done
    while any(left):
        waits: dict[int, tuple[Op | Message, End]] = {}
        num_before = sum(map(len, left))
        for rank, items in enumerate(left):
            while items and rank not in waits:
                item, need = items[0]
                if isinstance(item, Message) and item.action == SEND:
                    come_to.add((SEND, item.key))  # even if it has to wait here
                if need and need not in come_to:
                    waits[rank] = (item, need)
                    continue
                if isinstance(item, Message):
                    come_to.add((item.action, item.key))
                items.popleft()
        if sum(map(len, left)) == num_before:
            raise _deadlock(name, lists, waits)


def _with_needs(
    items: Sequence[Op | Message], earlier: dict[tuple, tuple]
) -> Iterator[tuple[Op | Message, End | None]]:
    """Yield what a rank does, each with the end of a message that it waits for there, if any."""
    needed_by = {
        item.op: item.key for item in items if isinstance(item, Message) and item.action == RECV
    }
    for item in items:
        if isinstance(item, Message) and item.action == SEND:
            yield item, (RECV, item.key)
            continue
        key = needed_by.get(item) if isinstance(item, Op) else earlier.get(item.key)
        yield item, (SEND, key) if key else None


def _deadlock(
    name: str, lists: Lists, waits: dict[int, tuple[Op | Message, End]]
) -> ScheduleDeadlock:
    ends = {
        (item.action, item.key): (rank, item)
        for rank, items in enumerate(lists)
        for item in items
        if isinstance(item, Message)
    }
    return ScheduleDeadlock(name, {rank: (item, *ends[end]) for rank, (item, end) in waits.items()})


def _earlier_in_queue(name: str, lists: Lists, one_queue_per_pair: bool) -> dict[tuple, tuple]:
    """Return, for each message but the first of a queue, the message before it.

    A message is identified by its `Message.key`; both ends of a queue must have the same order.
    """
    queues: dict[tuple, dict[int, list[tuple]]] = {}  # queue -> rank -> messages in its order
    for rank, items in enumerate(lists):
        for item in items:
            if not isinstance(item, Message):
                continue
            pair = (rank, item.peer) if item.action == SEND else (item.peer, rank)
            queue = tuple(sorted(pair)) if one_queue_per_pair else (item.op.kind, *pair)
            queues.setdefault(queue, {}).setdefault(rank, []).append(item.key)
    earlier: dict[tuple, tuple] = {}
    for queue, orders in queues.items():
        one, other = orders.values()
        if one != other:
            raise ValueError(f"{name!r}: the two ends of queue {queue} have different orders")
        earlier |= {message: before for before, message in pairwise(one)}
    return earlier
