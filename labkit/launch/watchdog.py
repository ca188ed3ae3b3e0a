"""Is a silent world slow, or will it never go on? It is judged from snapshots alone, and tested without processes.

| state of a rank | what was seen | verdict |
|---|---|---|
| silent | it did not answer: it holds the GIL, or waits for a core | can go on |
| busy | a thread could run, or bytes were on their way to or from it | can go on |
| elsewhere | it computes, sleeps, joins, or waits for a file, a process or a thread | can go on |
| waits | in communication, or in set-up, with nothing to run and nothing on its way | stuck, if all are |
| returned | and nothing of it runs | stuck, if all are |

A deadlock is declared when every rank is stuck and none has run between two looks: then no rank can wake another, since
one that could would have been seen to run. What each rank waits *for* does not matter here; the report says it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.launch.probe import Collective, Snapshot

_QUIET_SECONDS = 2.0  # nothing printed, returned or reported: start looking
_PROBE_SECONDS = 0.5
_NOTE_SECONDS = 5.0  # tell the learner who waits for whom
_NOTE_AGAIN_SECONDS = 30.0
_STILL_PROBES = 2
_STILL_PROBES_IN_SET_UP = 4  # set-up polls a file, so its stillness is harder to see


@dataclass(frozen=True)
class Silence:
    """One look at a world: the snapshot of each rank that answered, and who has returned already."""

    num_ranks: int
    snapshots: Mapping[int, Snapshot]
    returned: frozenset[int]
    busy_stacks: Mapping[int, str] = field(default_factory=dict)  # of ranks that could not answer

    @property
    def groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return every process group that any rank knows: name -> description and ranks."""
        return {name: group for snapshot in self.snapshots.values() for name, group in snapshot.groups.items()}

    def calls(self) -> dict[tuple[str, int, str], dict[int, Collective]]:
        """Return the unfinished collectives: (group, number, operation) -> rank -> its view of the call."""
        calls: dict[tuple[str, int, str], dict[int, Collective]] = {}
        for rank in sorted(self.snapshots.keys() - self.returned):
            for call in self.snapshots[rank].collectives:
                calls.setdefault((call.group, call.number, call.operation), {})[rank] = call
        return calls

    def members(self, group: str) -> tuple[int, ...]:
        return self.groups.get(group, ("", tuple(range(self.num_ranks))))[1]

    def is_waiting(self, rank: int) -> bool:
        """Is this rank in a communication call that it cannot leave by itself?"""
        snapshot = self.snapshots.get(rank)
        if snapshot is None:
            return False
        in_call = snapshot.point_to_point or snapshot.in_torch_distributed or snapshot.collectives
        return bool(snapshot.set_up or (in_call and not snapshot.elsewhere))

    def waiting(self) -> set[int]:
        return {rank for rank in self.snapshots.keys() - self.returned if self.is_waiting(rank)}

    def can_go_on(self) -> bool:
        """Return whether a rank can go on by itself."""
        unfinished = set(range(self.num_ranks)) - self.returned
        return self.waiting() != unfinished or any(snapshot.busy for snapshot in self.snapshots.values())


class Watchdog:
    """Decides when to look, and what a series of looks means."""

    def __init__(self, now: float):
        self._noted = float("-inf")
        self.sign_of_life(now)

    def sign_of_life(self, now: float) -> None:
        """Start again: a rank printed, returned or reported progress."""
        self.last_sign, self._next_probe = now, now + _QUIET_SECONDS
        self._evidence: dict = {}
        self._still_probes = 0

    def is_due(self, now: float) -> bool:
        return now >= self._next_probe

    def judge(self, now: float, silence: Silence) -> str:
        """Return ``"deadlock"``, ``"note"`` (some ranks wait for a slow one: say so), or ``""``."""
        evidence = {rank: (snapshot.stack, snapshot.ran) for rank, snapshot in silence.snapshots.items()}
        has_run, self._evidence = evidence != self._evidence, evidence
        self._next_probe = now + _PROBE_SECONDS
        stuck = not silence.can_go_on() and not _all_in_one_set_up(silence)
        self._still_probes = self._still_probes + 1 if stuck and not has_run else 0
        in_set_up = any(snapshot.set_up for snapshot in silence.snapshots.values())
        if self._still_probes + 1 >= (_STILL_PROBES_IN_SET_UP if in_set_up else _STILL_PROBES):
            return "deadlock"
        slow = silence.waiting() and len(silence.waiting() | silence.returned) < silence.num_ranks
        if slow and now - self.last_sign > _NOTE_SECONDS and now - self._noted >= _NOTE_AGAIN_SECONDS:
            self._noted = now
            return "note"
        return ""


def _all_in_one_set_up(silence: Silence) -> bool:
    """Is every rank joining, or making the same group? That may be slow, and is fine while no rank has returned."""
    calls = {snapshot.set_up for snapshot in silence.snapshots.values()}
    return len(calls) == 1 and None not in calls and not silence.returned
