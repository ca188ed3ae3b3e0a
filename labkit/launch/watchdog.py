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
    # Of ranks that did not answer: what faulthandler wrote
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
        return [
            rank
            for rank in call.ranks
            if rank in self.snapshots and self.snapshots[rank].has_left(call)
        ]

    def threads(self, rank: int) -> tuple[Thread, ...]:
        """Return a rank's threads, without the main thread of one that has returned."""
        return self.snapshots[rank].threads[int(rank in self.returned) :]

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank's main thread is in a communication call that it cannot leave by
        itself.
        """
        return rank in self.snapshots and any(
            thread.state == "waits" for thread in self.threads(rank)[:1]
        )

    def standing(self) -> list[tuple[int, Standing]]:
        """Return the calls of NCCL's that ranks are inside."""
        return [
            (rank, thread.standing)
            for rank in sorted(self.snapshots)
            for thread in self.threads(rank)
            if thread.standing
        ]

    def is_at_rest(self) -> bool:
        """Return whether all ranks have answered, and nothing is on its way between them."""
        snapshots = self.snapshots.values()
        is_quiet = not any(
            each.collectives or each.threads[1:] or each.unsettled for each in snapshots
        )
        last = {(group, number) for each in snapshots for group, number in each.started.items()}
        # All members have started equally many
        is_even = len(last) == len({group for group, _ in last})
        return len(snapshots) == self.num_ranks and is_quiet and is_even

    def can_go_on(self) -> bool:
        """Return whether a rank can go on by itself."""
        if len(self.snapshots) < self.num_ranks or any(
            snapshot.busy for snapshot in self.snapshots.values()
        ):
            return True
        return any(
            thread.state == "runs" for rank in self.snapshots for thread in self.threads(rank)
        )


class Watchdog:
    """Decides when to look, and what a series of looks means."""

    def __init__(self, now: float):
        self._noted = float("-inf")
        self._standing: dict[tuple, float] = {}  # calls of NCCL's -> when they were first seen
        self.sign_of_life(now)

    def sign_of_life(self, now: float) -> None:
        """Start again: a rank printed, returned or reported progress."""
        self.last_sign, self._next_look = now, now + _QUIET_SECONDS
        self._evidence: dict = {}
        self._still_looks = 0

    def overdue(self, now: float) -> list[tuple[int, Standing]]:
        """Return the ranks that have stood in a call for longer than its limit, each
        with the call.
        """
        return [
            (rank, call)
            for (rank, call), since in self._standing.items()
            if now - since > call.limit_seconds + _GRACE_SECONDS
        ]

    def is_due(self, now: float) -> bool:
        return now >= self._next_look

    def judge(self, now: float, look: Look) -> str:
        """Return ``"deadlock"``, ``"overdue"``, ``"note"`` (say where the ranks are), or ``""``."""
        self._standing = {call: self._standing.get(call, now) for call in look.standing()}
        evidence = {
            rank: (snapshot.threads, snapshot.ran) for rank, snapshot in look.snapshots.items()
        }
        has_run, self._evidence = evidence != self._evidence, evidence
        self._next_look = now + _LOOK_SECONDS
        stuck = not look.can_go_on()
        self._still_looks = 0 if not stuck else 1 if has_run else self._still_looks + 1
        if self._still_looks >= _STILL_LOOKS:
            return "deadlock"
        if self.overdue(now):
            return "overdue"
        patience = (
            _NOTE_SECONDS
            if any(map(look.is_waiting, range(look.num_ranks)))
            else _NOTE_RUNNING_SECONDS
        )
        if (
            not stuck
            and now - self.last_sign > patience
            and now - self._noted >= _NOTE_AGAIN_SECONDS
        ):
            self._noted = now
            return "note"
        return ""
