"""Choose an operation, its root and the number of ranks: it is simulated, message by message."""

import re
from collections.abc import Mapping, Sequence
from html import escape

from course.explorers.base import Explorer, Parts
from course.explorers.control import menu, slider
from course.pictures.collectives import flow_steps
from course.pictures.messages import ALPHA_SECONDS, BYTES_PER_SECOND, microseconds, ring_steps, tree_and_ring
from course.pictures.missing_rank import EXIT, draw_missing_rank, state_text, with_exit
from course.pictures.style import bytes_text
from course.sizing.flow import WITH_ROOT, WITHOUT_ROOT, Flow, numbered, row_and_column, simulate_flow
from course.sizing.missing_rank import without_rank

ON_A_RING = {f"{name} on a ring": name for name in ("all-reduce", "reduce-scatter", "all-gather")}
BOTH = "all-reduce on a tree and on a ring"
COUNTED, DIGITS, OWN = "counted", "digits of pi", "yours"
PI = "3141592653589793238462643383279502884197169399375105820974944592"
SIZES = {"10 kB": 1e4, "100 kB": 1e5, "1 MB": 1e6, "10 MB": 1e7, "100 MB": 1e8}
"""How large a tensor may be for the clock of the race; in its picture it has few numbers."""
IN_PIECES = ("scatter", "reduce-scatter", "all-to-all", *ON_A_RING, BOTH)  # cut a tensor into one piece for each rank


class collective_explorer(Explorer):
    """Show one operation message by message; ``numbers`` may be your own, a row for each rank.

    A rank that is pressed, or dragged out of its row, does not come to the operation: the others wait.
    """

    table = (
        ("operation", menu, "operation", (*WITH_ROOT, *WITHOUT_ROOT, *ON_A_RING, BOTH), "broadcast"),
        ("world_size", slider, "ranks", range(2, 9), 4),
        ("root", slider, "root", range(8), 0),
        ("numbers", menu, "numbers", (COUNTED, DIGITS), COUNTED),
        ("size", menu, "a tensor of", [*SIZES], "10 MB"),
    )
    keeps = ("operation", "numbers", "size")
    away: int | None = None  # the rank that does not come

    def _in_table(
        self, operation: str, world_size: int, root: int, numbers: str | Sequence[Sequence[float]], size: str
    ):
        """Keep numbers of the reader's own, and start with as many ranks as they are for."""
        if isinstance(numbers, str):
            self.own = [[int(digit) for digit in PI[8 * rank : 8 * rank + 8]] for rank in range(8)]
            return [operation, world_size, root, numbers, size]
        self.own, lengths = numbers, {*map(len, numbers)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"numbers={numbers} must be rows of one length: use as many numbers for each rank")
        return [operation, len(numbers), root, OWN, size]

    def _fit(self, choice):
        operation, world_size, root, *_ = choice
        if operation in WITH_ROOT and root >= world_size:
            raise ValueError(f"root={root} is not one of {world_size} ranks: use 0 to {world_size - 1}")
        return choice

    def click(self, key: str) -> None:
        """Keep the rank that was pressed away, or call it back."""
        rank = _rank_of(key)
        if rank is not None or key == EXIT:
            self.away = None if rank in (self.away, None) else rank
            self.choose()

    def drop(self, key: str, zone: str) -> None:
        """Keep a rank away that was dragged out, or call it back."""
        rank = _rank_of(key)
        if rank is not None and (zone == EXIT) == (rank != self.away):
            self.click(key)

    @property
    def picked(self) -> dict[str, str]:
        return {"away": "" if self.away is None else str(self.away)}

    def pick(self, words: Mapping[str, str]) -> None:
        word = words["away"]
        if word and not word.isdecimal():
            raise ValueError(f"away = {word} must be the number of a rank: use 0 or more")
        self.away = int(word) if word else None

    def _start(self) -> Sequence[Sequence[float]]:
        """Return each rank's numbers; the reader's own are repeated where there are too few."""
        name, world_size, _, numbers, _ = self.shown
        few = {"gather": 2 - (world_size > 4), "all-gather": 2 - (world_size > 4), "all-gather on a ring": 1}
        columns = few.get(name, world_size)
        if numbers == OWN and (name not in IN_PIECES or len(self.own[0]) % world_size == 0):
            columns = len(self.own[0])
        if numbers != COUNTED:
            rows = (self.own[rank % len(self.own)] for rank in range(world_size))
            return [[row[column % len(row)] for column in range(columns)] for row in rows]
        # The result of all-to-all on 0, 1, 2, ... plus the rank looks as if nothing had moved.
        return (row_and_column if name == "all-to-all" else numbered)(world_size, columns)

    def _parts(self) -> Parts:
        name, _, root, _, size = self.shown
        self.controls["root"].disabled, start = name not in WITH_ROOT, self._start()
        self.controls["size"].disabled = name != BOTH
        if self.away is not None and self.away >= len(start):
            self.away = None
        if self.away is not None and name != BOTH:
            return self._without(self.away, start)
        if name == BOTH:
            clock = f"{microseconds(ALPHA_SECONDS)} (α), and its bytes at {bytes_text(BYTES_PER_SECOND)}/s (B)"
            return Parts(tree_and_ring(start, SIZES[size]), f"Simulated: a message takes {clock}. Press Play to race.")
        if name in ON_A_RING:
            says = "Simulated, message by message. A number has 4 bytes. Press Play."
            return Parts(with_exit(ring_steps(start, ON_A_RING[name])), says)
        flow, who = self._run(name, start, root)
        says = f"{(WITH_ROOT | WITHOUT_ROOT)[name]} {who} Press Play to see the numbers travel."
        return Parts(with_exit(flow_steps(flow, name)[1:]), escape(says))

    def _without(self, away: int, start: Sequence[Sequence[float]]) -> Parts:
        """Show who waits when a rank does not come."""
        name, _, root, _, _ = self.shown
        missing = without_rank(ON_A_RING.get(name) or name, start, away, root)
        waiting = [f"rank {rank} {state_text(missing, rank)}" for rank in sorted(missing.waits)]
        says = f"<b>Rank {away} does not come, and this stands still:</b> {'; '.join(waiting)}."
        how = f"Simulated, by gloo's rules. Press rank {away} to call it back."
        return Parts([draw_missing_rank(missing)], f"{says} {how}", warns=True)

    def _run(self, name: str, start: Sequence[Sequence[float]], root: int) -> tuple[Flow, str]:
        """Return what the operation does to the numbers, and a sentence about who did it."""
        return simulate_flow(name, start, root), f"Simulated for {len(start)} ranks."


def _rank_of(key: str) -> int | None:
    """Return the rank whose box has this key; None if it is a different mark."""
    found = re.fullmatch(r"0\.rank(\d+)", key)
    return int(found[1]) if found else None
