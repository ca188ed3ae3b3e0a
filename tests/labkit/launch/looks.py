"""Looks at worlds, made by hand: what a call would have learnt from its ranks."""

from dataclasses import replace

from labkit.launch.probe import Collective, Snapshot, Thread
from labkit.launch.watchdog import Look

THREAD = Thread(stack=(("train.py", 3, "work"),), state="runs")
RUNNING = Snapshot(
    threads=(THREAD,),
    collectives=(),
    started={},
    ran=(7, 3),
    busy=False,
)
LOCKED = replace(RUNNING, threads=(replace(THREAD, state="locked"),))


GROUPS = {"0": "the world", "1": "tp"}


def in_collective(operation: str = "all_reduce", number: int = 1, group: str = "0") -> Snapshot:
    text = f"{operation} number {number} (float [4]) of {GROUPS[group]} [0, 1]"
    call = Collective(group, (0, 1), number, operation, text)
    waiting = replace(THREAD, state="waits")
    return replace(RUNNING, threads=(waiting,), collectives=(call,), started={group: number})


def in_call(call: str) -> Snapshot:
    """Wait in a send, a receive, or a call that makes groups."""
    return replace(RUNNING, threads=(replace(THREAD, state="waits", call=call),))


def with_thread(snapshot: Snapshot, state: str) -> Snapshot:
    """Add a helper thread of the learner's."""
    return replace(snapshot, threads=(*snapshot.threads, replace(THREAD, state=state)))


def at(snapshot: Snapshot, stack: tuple) -> Snapshot:
    """Put the main thread at a different place."""
    return replace(snapshot, threads=(replace(snapshot.threads[0], stack=stack),))


def world(*snapshots: Snapshot | None, returned=()) -> Look:
    answered = {rank: snapshot for rank, snapshot in enumerate(snapshots) if snapshot}
    return Look(len(snapshots), answered, frozenset(returned))
