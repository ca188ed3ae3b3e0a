"""Is a silent world slow, or will it never go on? It is judged from snapshots alone, and tested without processes.

A deadlock is declared only when all of this holds, because each weaker rule has raised a false alarm: every rank that
has not returned waits in communication; in no group are all members in the same collective; no send has met its
receive; and between consecutive snapshots nothing has run, neither a main thread nor the threads that move data.
Everything else means that a rank is slow, which is not a fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.launch.probe import Collective, Snapshot

_QUIET_SECONDS = 2.0  # nothing printed, returned or reported: start looking
_PROBE_SECONDS = 0.5
_NOTE_SECONDS = 5.0  # tell the learner who waits for whom
_NOTE_AGAIN_SECONDS = 30.0
_IDLE_CPU_SECONDS = 0.02  # what answering a probe may cost
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
        for rank, snapshot in self.snapshots.items():
            for call in snapshot.collectives:
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
        return {rank for rank in self.snapshots if self.is_waiting(rank)}

    def can_go_on(self) -> bool:
        """Does a rank run, or can data still move?"""
        unfinished = set(range(self.num_ranks)) - self.returned
        if self.waiting() != unfinished:
            return True
        if any(set(self.members(group)) <= views.keys() for (group, _, _), views in self.calls().items()):
            return True
        return any(self._is_met(rank) for rank in self.snapshots)

    def _is_met(self, rank: int) -> bool:
        """Has the other side posted the call that this rank's send or receive waits for?

        Messages of a channel arrive in order, so the n-th receive is met by the n-th send.
        """
        mine = self.snapshots[rank]
        call = mine.point_to_point
        if call is None:
            return False
        other = "recv" if call.operation == "send" else "send"
        peers = set(self.snapshots) if call.peer is None else {call.peer} & self.snapshots.keys()
        # A peer that has returned is not among them: had it posted the call, the data would be here.
        posted = sum(self.snapshots[peer].posted.get((other, rank, call.tag, call.group), 0) for peer in peers)
        return posted >= mine.posted[call.channel]


class Watchdog:
    """Decides when to look, and what a series of looks means."""

    def __init__(self, now: float):
        self._noted = float("-inf")
        self.sign_of_life(now)

    def sign_of_life(self, now: float) -> None:
        """Start again: a rank printed, returned or reported progress."""
        self.last_sign, self._next_probe = now, now + _QUIET_SECONDS
        self._previous: Silence | None = None
        self._still_probes = 0

    def is_due(self, now: float) -> bool:
        return now >= self._next_probe

    def judge(self, now: float, silence: Silence) -> str:
        """Return ``"deadlock"``, ``"note"`` (some ranks wait for a slow one: say so), or ``""``."""
        previous, self._previous = self._previous, silence
        self._next_probe = now + _PROBE_SECONDS
        stuck = not silence.can_go_on() and not _all_in_one_set_up(silence)
        self._still_probes = self._still_probes + 1 if stuck and _nothing_ran(previous, silence) else 0
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


def _nothing_ran(previous: Silence | None, silence: Silence) -> bool:
    before, now = previous.snapshots if previous else {}, silence.snapshots
    return before.keys() == now.keys() and all(_still(before[rank], now[rank]) for rank in now)


def _still(before: Snapshot, now: Snapshot) -> bool:
    """Has nothing happened on a rank between two snapshots of it?"""
    return (
        (before.stack, before.instruction, before.recorded) == (now.stack, now.instruction, now.recorded)
        and (before.context_switches == now.context_switches or now.set_up is not None)
        and now.cpu_seconds - before.cpu_seconds < _IDLE_CPU_SECONDS
    )
