"""Simulates a collective to which one rank does not come: who then waits for whom, and what `launch` reports.

It follows the messages of gloo, which CPU ranks use: a rank that has sent and received all of its own messages leaves
the collective, though others still wait in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course.sizing.flow import WITH_ROOT
from labkit.waiting import NO_RANK_CAN_GO_ON, SOME_HAVE_LEFT, who_is_where, with_states

FROM_ROOT_TO_EACH = ("scatter", "gather")  # messages of the root alone
MESSAGES = "send and receive"


@dataclass(frozen=True)
class MissingRank:
    """An operation that the rank ``away`` did not come to.

    ``waits[rank]`` is the rank that it waits for, and whether to "send" or to "recv".
    """

    operation: str
    world_size: int
    away: int
    waits: Mapping[int, tuple[int, str]]
    num_elements: int

    @property
    def left(self) -> list[int]:
        """The ranks that have done their part."""
        return [rank for rank in range(self.world_size) if rank != self.away and rank not in self.waits]

    @property
    def _tensor(self) -> str:
        """What the recorder notes of a rank's tensor: of a scatter the root's pieces, and nothing on the others."""
        if self.operation != "scatter":
            return f" (float [{self.num_elements}])"
        if self.left or (self.world_size == 2 and self.waits[1 - self.away][1] == "send"):
            return f" (float [{self.world_size}, {self.num_elements // self.world_size}])"
        return ""

    @property
    def report(self) -> str:
        """What labkit's launch reports, without the lines of code."""
        states = ["has returned"] * self.world_size
        if self.operation == MESSAGES:
            for rank, (peer, does) in self.waits.items():
                way = "to" if does == "send" else "from"
                states[rank] = f"waits in {does} {way} rank {peer} (float32 [{self.num_elements}])"
            return with_states(NO_RANK_CAN_GO_ON, states)
        name, world = self.operation.replace("-", "_"), [*range(self.world_size)]
        call = f"{name} number 1{self._tensor} of the world {world}"
        for rank in self.waits:
            states[rank] = f"waits in {call}"
        why = who_is_where(call, sorted(self.waits), left=self.left, returned=[self.away])
        lines = [with_states(f"{NO_RANK_CAN_GO_ON}\n{why}", states), *[SOME_HAVE_LEFT] * bool(self.left)]
        return "\n".join(lines)


def without_rank(operation: str, start: Sequence[Sequence[float]], away: int, root: int = 0) -> MissingRank:
    """Run an operation on one rank per row of ``start``, but for the rank that stays ``away``.

    >>> print(without_rank("broadcast", [[1, 2]] * 4, away=2).report)
    no rank can go on.
      broadcast number 1 (float [2]) of the world [0, 1, 2, 3]: rank 0 waits; ranks 1, 3 have left it; rank 2 has returned without it
      rank 0: waits in broadcast number 1 (float [2]) of the world [0, 1, 2, 3]
      rank 1, 2, 3: has returned
    Some ranks have left a collective: do its tensors differ in size? strict=True names both sizes.
    """  # noqa: E501
    n = len(start)
    waits = _waits(operation, n, away, root if operation in WITH_ROOT else 0)
    return MissingRank(operation, n, away, waits, len(start[0]))


def _waits(operation: str, n: int, away: int, root: int) -> dict[int, tuple[int, str]]:
    """Return who waits for whom."""
    others = [rank for rank in range(n) if rank != away]
    if operation == MESSAGES:
        after, before = (away + 1) % n, (away - 1) % n
        return {after: (away, "recv")} | {before: (away, "send")}
    if operation == "broadcast":
        return _on_a_tree(n, away, root)
    if operation in FROM_ROOT_TO_EACH:
        to_root, to_each = ("send", "recv") if operation == "gather" else ("recv", "send")
        return dict.fromkeys(others, (away, to_root)) if away == root else {root: (away, to_each)}
    if operation == "all-to-all":
        return dict.fromkeys(others, (away, "recv"))
    return {rank: ((rank - 1) % n, "recv") for rank in others}  # around a ring, nobody has what comes after the gap


def _on_a_tree(n: int, away: int, root: int) -> dict[int, tuple[int, str]]:
    """Return who waits in a broadcast: rank 2^i + r, counted from the root, receives from r < 2^i and sends on."""
    parent = {place: place - (1 << place.bit_length() - 1) for place in range(1, n)}
    missing, waits = (away - root) % n, {}
    if missing:
        waits[parent[missing]] = (missing, "send")
    stuck = {missing}
    for place in range(1, n):
        if parent[place] in stuck and place != missing:
            stuck.add(place)
            waits[place] = (parent[place], "recv")
    return {(place + root) % n: ((peer + root) % n, does) for place, (peer, does) in sorted(waits.items())}
