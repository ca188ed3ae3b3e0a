"""Tells slow ranks from deadlocked ones, by snapshots alone.

A rank is stuck when each of its threads waits in communication or for a thread of its own, or has
returned. It can go on when a thread computes, sleeps, or waits for what may come by itself, such as
a time-out; when a thread could run, in Python or C++; and when it does not answer: it holds the GIL
or needs a core.

A deadlock is declared when every rank is stuck, and between looks none has run and no byte has
moved: then no rank can wake another, since one that could would have been seen to run. What each
rank waits *for* is the report's business.

A rank is overdue when it has stood in one call of NCCL's for longer than its group's time-out:
while NCCL makes a communicator, it waits for a missing member without one. The calls of gloo end by
themselves.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.launch.probe import Collective, Snapshot, Standing, Thread

_QUIET_SECONDS = 2.0  # nothing printed, returned or reported: start looking
_LOOK_SECONDS = 0.5
_STILL_LOOKS = 3
_GRACE_SECONDS = 5.0  # for NCCL to give up by itself, where it does: its report knows more
_NOTE_SECONDS = 5.0  # tell the learner who waits for whom,
_NOTE_RUNNING_SECONDS = 9.0  # or, if nobody waits, where the ranks are
_NOTE_AGAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Look:
    """One look at a world: the snapshot of each rank that answered, and who has
    returned already.
    """

    num_ranks: int
    snapshots: Mapping[int, Snapshot]
    returned: frozenset[int]
    # What faulthandler wrote of ranks that did not answer
    stacks: Mapping[int, str] = field(default_factory=dict)

    def calls(self) -> dict[tuple[str, int, str], dict[int, Collective]]:
        """Return the unfinished collectives: (group, number, operation) -> rank -> its view of the
        call.
        """
        calls: dict[tuple[str, int, str], dict[int, Collective]] = {}
        for rank in sorted(self.snapshots):
            for call in self.snapshots[rank].collectives:
                calls.setdefault((call.group, call.number, call.operation), {})[rank] = call
        return calls

    def left(self, call: Collective) -> list[int]:
        """Return the members that have finished a collective, or given up on it, while others are
        in it.
        """
        known = [rank for rank in call.ranks if rank in self.snapshots]
        return [rank for rank in known if self.snapshots[rank].has_left(call)]

    def threads(self, rank: int) -> tuple[Thread, ...]:
        """Return a rank's threads, without the main thread of one that has returned."""
        return self.snapshots[rank].threads[int(rank in self.returned) :]

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank's main thread is in a communication call that it cannot leave by
        itself.
        """
        if rank not in self.snapshots:
            return False
        first_thread = self.threads(rank)[:1]  # none, if the rank has returned and left no other
        return any(thread.state == "waits" for thread in first_thread)

    def standing(self) -> list[tuple[int, Standing]]:
        """Return the calls of NCCL's that ranks are inside."""
        calls = []
        for rank in sorted(self.snapshots):
            for thread in self.threads(rank):
                if thread.standing:
                    calls.append((rank, thread.standing))
        return calls

    def is_at_rest(self) -> bool:
        """Return whether all ranks have answered, and nothing is on its way between them."""
        if len(self.snapshots) < self.num_ranks:
            return False
        last = set()  # of each group, the number of the last collective that a rank has started
        for snapshot in self.snapshots.values():
            if snapshot.collectives or snapshot.threads[1:] or snapshot.unsettled:
                return False
            last |= set(snapshot.started.items())
        groups = {group for group, _ in last}
        return len(last) == len(groups)  # all members have started equally many

    def can_go_on(self) -> bool:
        """Return whether a rank can go on by itself."""
        if len(self.snapshots) < self.num_ranks:
            return True
        for rank, snapshot in self.snapshots.items():
            if snapshot.busy or any(thread.state == "runs" for thread in self.threads(rank)):
                return True
        return False


class Watchdog:
    """Decides when to look, and what a series of looks means."""

    def __init__(self, now: float):
        self._noted = float("-inf")
        self._standing: dict[tuple, float] = {}  # calls of NCCL's -> when they were first seen
        self.sign_of_life(now)

    def sign_of_life(self, now: float) -> None:
        """Start again: a rank printed, returned or reported progress."""
        self.last_sign = now
        self._next_look = now + _QUIET_SECONDS
        self._evidence: dict = {}
        self._still_looks = 0

    def overdue(self, now: float) -> list[tuple[int, Standing]]:
        """Return the ranks that have stood in a call for longer than its limit, each
        with the call.
        """
        calls = []
        for (rank, call), since in self._standing.items():
            if now - since > call.limit_seconds + _GRACE_SECONDS:
                calls.append((rank, call))
        return calls

    def is_due(self, now: float) -> bool:
        return now >= self._next_look

    def judge(self, now: float, look: Look) -> str:
        """Return ``"deadlock"``, ``"overdue"``, ``"note"`` (say where the ranks are), or ``""``."""
        self._standing = {call: self._standing.get(call, now) for call in look.standing()}
        self._next_look = now + _LOOK_SECONDS
        is_stuck = not look.can_go_on()
        self._count_still_looks(look, is_stuck)
        if self._still_looks >= _STILL_LOOKS:
            return "deadlock"
        if self.overdue(now):
            return "overdue"
        if not is_stuck and self._should_note(now, look):
            self._noted = now
            return "note"
        return ""

    def _count_still_looks(self, look: Look, is_stuck: bool) -> None:
        """Count the looks in a row in which all ranks were stuck and none had run since the one
        before.
        """
        evidence = {}
        for rank, snapshot in look.snapshots.items():
            evidence[rank] = (snapshot.threads, snapshot.ran)
        has_run = evidence != self._evidence
        self._evidence = evidence
        if not is_stuck:
            self._still_looks = 0
        elif has_run:
            self._still_looks = 1  # this look is the first of a new row
        else:
            self._still_looks += 1

    def _should_note(self, now: float, look: Look) -> bool:
        if "LABKIT_NO_NOTES" in os.environ:  # outputs are compared: a slow machine adds no line
            return False
        any_waits = any(map(look.is_waiting, range(look.num_ranks)))
        patience = _NOTE_SECONDS if any_waits else _NOTE_RUNNING_SECONDS
        return now - self.last_sign > patience and now - self._noted >= _NOTE_AGAIN_SECONDS
