"""Puts the messages between stages into a schedule's lists, where sends and receives are ops too.

Where they stand follows from the schedule alone. Let every op take one step, and start as soon as
it can. A message is sent right after the op that makes it. Its receive is posted ahead of need:
before the receiver's first op whose step is that of the op that makes the message, or a later one.

    Every send finds its receive posted, at the latest when the op that makes the message starts.
    When a receive is posted, the message before it in the same channel (one kind, from one rank to
    another) has been sent, because a rank makes one message a step. So nobody waits for ever,
    however long the ops really take: all ranks' ops and messages stand in one common order, by
    step, in which each can be done.

If receives are posted just before they are needed instead, many schedules stand still: two ranks
both wait to send. The order above needs a queue for each channel. With fewer queues a receive that
is posted early holds up the send after it, so without ``recv_ahead`` both ends of a message stand
where it is sent: then one queue for each pair of ranks will do, at the cost of a few percent more
time. (torch places the messages of its schedules in ``_add_send_recv``.)
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
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
    """Return the ops of each rank with its messages between them.

    What one rank's chunk gives to another chunk of the same rank is not a message.

    >>> from labkit.schedules import one_f_one_b
    >>> for rank in lowered(one_f_one_b(2, 2)):
    ...     print(", ".join(map(str, rank)))
    F0, send F0 to 1, F1, send F1 to 1, recv B0 from 1, B0, recv B1 from 1, B1
    recv F0 from 0, recv F1 from 0, F0, B0, send B0 to 0, F1, B1, send B1 to 0
    """
    lists: list[list[Op | Message]] = [[] for _ in schedule.ranks]
    for ops in _steps(schedule):
        messages = [ends for rank, op in ops if (ends := _message(schedule, rank, op))]
        if recv_ahead:
            for send, recv in messages:
                lists[send.peer].append(recv)
        for rank, op in ops:
            lists[rank].append(op)
        for send, recv in messages:
            lists[recv.peer].append(send)
            if not recv_ahead:
                lists[send.peer].append(recv)
    _append_ops_that_never_run(schedule, lists)
    return tuple(map(tuple, lists))


def _message(schedule: Schedule, rank: int, op: Op) -> tuple[Message, Message] | None:
    """Return both ends of the message that ``op`` of ``rank`` makes, if it makes one."""
    peer, need = schedule.neighbor(rank, op, 1) or (rank, op)
    if peer == rank:
        return None
    stage = schedule.stage_of(rank, op.chunk)
    return Message(SEND, op, peer, stage), Message(RECV, need, rank, stage)


def _steps(schedule: Schedule) -> list[list[tuple[int, Op]]]:
    """Return the (rank, op) pairs that run in each step, by rank, without ops that never run."""
    step_of: dict[tuple[int, Op], int] = {}
    num_steps = [0] * schedule.pp_size  # up to each rank's last op
    with suppress(ScheduleDeadlock):
        for rank, op, needs in schedule.in_order():
            step = max([num_steps[rank], *(step_of[need] + 1 for need in needs)])
            step_of[rank, op] = step
            num_steps[rank] = step + 1
    steps: list[list[tuple[int, Op]]] = [[] for _ in range(max(num_steps))]
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if (rank, op) in step_of:
                steps[step_of[rank, op]].append((rank, op))
    return steps


def _append_ops_that_never_run(schedule: Schedule, lists: Sequence[list[Op | Message]]) -> None:
    """Append the ops of ranks that wait for each other, with each receive where it is needed.

    So a rank does all that it can, and then waits at the op that the deadlock is reported with.
    """
    stuck = [
        (rank, op)
        for rank, ops in enumerate(schedule.ranks)
        for op in ops[sum(isinstance(item, Op) for item in lists[rank]) :]
    ]
    sends: dict[tuple[int, Op], Message] = {}
    receives: dict[tuple[int, Op], Message] = {}
    for rank, op in stuck:
        if ends := _message(schedule, rank, op):
            send, recv = ends
            sends[rank, op] = send
            receives[send.peer, recv.op] = recv
    for rank, op in stuck:
        around = (receives.get((rank, op)), op, sends.get((rank, op)))
        lists[rank].extend(item for item in around if item)
