"""Puts the messages between stages into a schedule's lists, where sends and receives are ops too.

Where they stand follows from the schedule alone. Let every op take one step, and start as soon as
it can. A message that is made in step s is sent when step s ends. Its receive is posted ahead,
before the receiver starts its own op of step s. Of what falls between two ops, sends come first,
then receives in the order in which they are sent.

    Every send finds its receive posted one step before. When a receive is posted, the message
    before it in the same channel (one kind, from one rank to another) has been sent, because a rank
    makes one message a step. So nobody waits for ever, however long the ops really take: all ranks'
    ops and messages stand in one common order, by time, in which each can be done.

If receives are posted just before they are needed instead, many schedules stand still: two ranks
both wait to send. The order above needs a queue for each channel. With fewer queues a receive that
is posted early holds up the send behind it, so without ``recv_ahead`` both ends of a message stand
where it is sent: then one queue for each pair of ranks will do, for a few percent of time.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from labkit.schedules.schedule import Op, Schedule, ScheduleDeadlock

SEND = "send"
RECV = "recv"


class Message(NamedTuple):
    """One end of a message: a rank sends what its ``op`` gave, or receives what its ``op`` needs.

    >>> str(Message("send", Op("forward", 3), peer=1, stage=0))
    'send F3 to 1'
    """

    action: str
    op: Op  # of this rank
    peer: int  # the rank at the other end
    stage: int  # which gives it

    @property
    def key(self) -> tuple[str, int, int]:
        """What both ends know the message by."""
        return self.op.kind, self.op.micro_batch, self.stage

    def __str__(self) -> str:
        return f"{self.action} {self.op} {'to' if self.action == SEND else 'from'} {self.peer}"


Lists = tuple[tuple[Op | Message, ...], ...]
"""The ops and messages of each rank, in its order."""


@lru_cache(maxsize=64)  # a pipeline asks in every step
def lowered(schedule: Schedule, recv_ahead: bool = True) -> Lists:
    """Return the ops of each rank, of a schedule that `check` has passed, with its messages between
    them.

    What one rank's chunk gives to another chunk of the same rank is not a message.

    >>> from labkit.schedules import one_f_one_b
    >>> for rank in lowered(one_f_one_b(2, 2)):
    ...     print(", ".join(map(str, rank)))
    F0, send F0 to 1, F1, send F1 to 1, recv B0 from 1, B0, recv B1 from 1, B1
    recv F0 from 0, recv F1 from 0, F0, B0, send B0 to 0, F1, B1, send B1 to 0
    """
    steps, num_steps = _steps(schedule)
    timed: list[list[tuple[tuple, Op | Message]]] = [[] for _ in schedule.ranks]
    for (rank, op), step in steps.items():
        timed[rank].append(((step, 2), op))
        peer, need = schedule.neighbor(rank, op, 1) or (rank, op)
        if peer == rank:
            continue
        sent = (step + 1, 0, step, rank)
        received = (step, 1, step, rank) if recv_ahead else sent
        if step > num_steps:  # it is never sent: so the rank that needs it waits at that op
            received = (steps[peer, need], 1, step, rank)
        stage = schedule.stage_of(rank, op.chunk)
        timed[rank].append((sent, Message(SEND, op, peer, stage)))
        timed[peer].append((received, Message(RECV, need, rank, stage)))
    return tuple(tuple(item for _, item in sorted(items)) for items in timed)


@lru_cache(maxsize=8)  # for `lowered` with and without `recv_ahead`
def _steps(schedule: Schedule) -> tuple[dict[tuple[int, Op], int], int]:
    """Return in which step each rank runs each op, and how many steps that takes.

    Ops that never run, as their ranks wait for each other, come after all others.
    """
    steps: dict[tuple[int, Op], int] = {}
    last = [0] * schedule.pp_size  # the step of each rank's last op
    with suppress(ScheduleDeadlock):
        for rank, op, needs in schedule.in_order():
            last[rank] = 1 + max([last[rank], *(steps[need] for need in needs)])
            steps[rank, op] = last[rank]
    num_steps = max(last)
    for rank, ops in enumerate(schedule.ranks):
        for number, op in enumerate(ops):
            steps.setdefault((rank, op), num_steps + 1 + number)
    return steps, num_steps


def check_messages(
    name: str, ranks: Sequence[Sequence[Op | Message]], one_queue_per_pair: bool = False
) -> None:
    """Raise unless all ranks come to the end of their lists by NCCL's rules.

    A queue has no tags: its messages arrive in the order in which they are sent. A rank waits at a
    send until it is received; at a receive until the message before it in its queue has come; and
    at an op until the message that it needs has come. Each kind and direction between two ranks has
    its queue, or each pair has one for everything.

    Raises:
        ValueError: the two ends of a queue have different orders.
        ScheduleDeadlock: ranks wait for each other.
    """
    ends = {
        (item.action, item.key): (rank, item)
        for rank, items in enumerate(ranks)
        for item in items
        if isinstance(item, Message)
    }
    needs: dict[tuple[int, Op | Message], tuple] = {
        (rank, item.op): (SEND, key)
        for (action, key), (rank, item) in ends.items()
        if action == RECV
    }
    for order in _queues(name, ends.values(), one_queue_per_pair):
        needs |= {ends[RECV, key]: (SEND, before) for before, key in pairwise(order)}
    position = [0] * len(ranks)
    posted: set[tuple[str, tuple]] = set()
    while True:
        num_before = sum(position)
        waits = {}
        for rank, items in enumerate(ranks):
            while position[rank] < len(items):
                item = items[position[rank]]
                missing = needs.get((rank, item))
                if isinstance(item, Message) and item.action == SEND:
                    posted.add((SEND, item.key))
                    missing = (RECV, item.key)
                if missing and missing not in posted:
                    waits[rank] = (item, *ends[missing])
                    break
                if isinstance(item, Message):
                    posted.add((item.action, item.key))
                position[rank] += 1
        if not waits:
            return
        if sum(position) == num_before:
            raise ScheduleDeadlock(name, waits)


def _queues(
    name: str, ends: Iterable[tuple[int, Message]], one_queue_per_pair: bool
) -> Iterator[list[tuple]]:
    """Yield the messages of each queue, in the order that both its ends have."""
    queues: dict[tuple, dict[int, list[tuple]]] = {}  # queue -> rank -> messages in its order
    for rank, message in ends:
        if one_queue_per_pair:
            queue = tuple(sorted([rank, message.peer]))
        elif message.action == SEND:
            queue = (message.op.kind, rank, message.peer)
        else:
            queue = (message.op.kind, message.peer, rank)
        queues.setdefault(queue, {}).setdefault(rank, []).append(message.key)
    for queue, orders in queues.items():
        one, other = orders.values()
        if one != other:
            raise ValueError(f"{name!r}: the two ends of queue {queue} have different orders")
        yield one
