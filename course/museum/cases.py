"""A case of the museum: run an unknown fault, read what it shows, name it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from string import ascii_uppercase

from course.exercises.base import Folded, Verdict, indent, report, source_of
from course.museum.faults import FAULTS, Fault
from course.museum.tiny_run import LAYOUT, Run, Seen, in_one_process, on_rank
from labkit.launch import launch
from labkit.parity import Difference, Parity

EQUAL = 1e-10
"""Relative errors below this are rounding: everything is in float64."""


@dataclass(frozen=True, repr=False)
class Symptoms:
    """What a run shows from outside, as three tables: by step, by rank, and the gradients of step 1."""

    expected: Run
    ranks: Sequence[Seen]

    @property
    def parity(self) -> Parity:
        """How the gradients of step 1 differ, before clipping and optimizer."""
        return Parity([seen.gradients for seen in self.ranks])

    def letters(self, name: str) -> list[str]:
        """Return a letter per rank, the same for equal fingerprints ``name``: "copies", "hidden" or "heads"."""
        found = [getattr(seen, name) for seen in self.ranks]
        order = list(dict.fromkeys(found))
        return [ascii_uppercase[order.index(each)] for each in found]

    def __repr__(self) -> str:
        return "\n".join([*self._by_step(), "", *self._by_rank(), "", *self._gradients()])

    def _by_step(self) -> list[str]:
        lines = ["            loss                     gradient norm"]
        lines += ["step        one process   rank 0     one process   rank 0"]
        columns = zip(self.expected.losses, self.ranks[0].losses, self.expected.norms, self.ranks[0].norms, strict=True)
        for step, (loss, here, norm, norm_here) in enumerate(columns, 1):
            lines.append(f"{step:<12}{loss:<14.5f}{here:<11.5f}{norm:<14.5f}{norm_here:.5f}")
        return lines

    def _by_rank(self) -> list[str]:
        lines = ["step 1      weights                         same letter: the same"]
        lines += ["rank        before it   loss       norm      copies  hidden  heads"]
        letters = [self.letters(name) for name in ("copies", "hidden", "heads")]
        for rank, seen in enumerate(self.ranks):
            start = _error_text(max(each.error for each in seen.weights))
            same = "".join(f"{each[rank]:<8}" for each in letters).rstrip()
            coords = LAYOUT.coords(rank)
            where = f"{rank}  t{coords.tp} d{coords.dp} p{coords.pp}"
            lines.append(f"{where:<12}{start:<12}{seen.losses[0]:<11.5f}{seen.norms[0]:<10.5f}{same}")
        return lines

    def _gradients(self) -> list[str]:
        lines = ["step 1      gradients", "rank        wrong     error     ratio    worst at"]
        for rank, seen in enumerate(self.ranks):
            wrong = sum(each.error >= EQUAL for each in seen.gradients)
            count = f"{wrong} of {len(seen.gradients)}"
            lines.append(f"{rank:<12}{count:<10}{_worst_text(self.parity.worst(rank))}")
        if self.parity.common_ratio is not None and abs(self.parity.common_ratio - 1) > 1e-4:
            lines.append(f"everything is {self.parity.common_ratio:.4g} times what one process has")
        return lines


@dataclass
class Case:
    """One unknown fault: `run` it, read, `check` its name."""

    number: int
    _fault: Fault = field(repr=False)
    _has_run: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        return f"case {self.number}"

    def run(self) -> Symptoms:
        """Train with the fault on eight ranks, and return what can be seen of it."""
        self._has_run = True
        return symptoms(self._fault.apply)

    def check(self, guess: str | None = None) -> None:
        """Say whether ``guess`` names the fault; if not, say what the fault of that name would have shown."""
        report(self.name, self.verdict(guess))

    def verdict(self, guess: str | None = None) -> Verdict:
        """Return what `check` prints, as data."""
        if guess is None or guess is ...:
            return Verdict("not attempted", f"{self.name}: not attempted yet. Choose a name from `names()`.")
        if not self._has_run:
            return Verdict("wrong", f"{self.name}: look at it first: `museum.case({self.number}).run()`.")
        guessed = next((fault for fault in FAULTS if fault.name == str(guess).strip().lower()), None)
        if guessed is None:
            near = get_close_matches(str(guess), NAMES, n=1, cutoff=0.4)
            meant = f" Did you mean {near[0]!r}?" if near else " `names()` lists them."
            return Verdict("wrong", f"{self.name}: no fault is called {guess!r}.{meant}")
        if guessed is not self._fault:
            shows = indent(f"With it, you would see this: {guessed.shows}")
            text = f"it is not {guessed.name!r}.\n{shows}\n  Compare that with the symptoms."
            return Verdict("wrong", f"{self.name}: {text}")
        known = "\n".join(map(indent, (guessed.what, f"Seen: {guessed.seen_at}.")))
        text = f"yes, {guessed.name!r}.\n{known}\n  `solution()` shows how it was put in."
        return Verdict("passed", f"{self.name}: {text}")

    def hint(self) -> Folded:
        """Show which symptoms to read first."""
        return Folded("Hint", HINT)

    def solution(self) -> Folded:
        """Show the name of the fault, and the lines that put it into labkit on a rank."""
        source = source_of(self._fault.apply)
        about = f"{self._fault.name}. {self._fault.what} Seen: {self._fault.seen_at}."
        return Folded("Solution", f"{about}\n\n```python\n{source}\n```", plain_text=f"# {about}\n{source}")


HINT = """Go down this list, and stop at the first answer that is not what it should be.

1. Are the weights those of one process before the first step? If not, look at how they are made.
2. Is the loss of step 1 right, and the same on all ranks? If not, look at the forward pass, or the data.
3. Are the gradients of step 1 right? If not, read how many are wrong, the ratio, which ranks, and which ranks agree.
4. Is the norm of step 1 right, and the same on all ranks? If not, look at how the norm is counted.
5. Do the masks differ where they should? Ranks 0 and 1 share every layer; ranks 0 and 2 are replicas.
6. Do the later steps drift, although everything in step 1 is right? What is zero in step 1, and not in step 2?"""


def symptoms(apply: Callable[[], None]) -> Symptoms:
    """Return what the run shows if ``apply`` is called on each rank before it."""
    expected = one_process()  # on the CPU even if there are GPUs: the same numbers everywhere
    return Symptoms(expected, launch(on_rank, apply, expected, world_size=LAYOUT.world_size, backend="gloo"))


@cache
def one_process() -> Run:
    """Return the run that all cases are compared with."""
    return launch(in_one_process, world_size=1, backend="gloo")[0]


def nothing() -> None:
    """Put in no fault."""


NAMES = sorted(fault.name for fault in FAULTS)
_IN_NO_ORDER = sorted(FAULTS, key=lambda fault: hashlib.blake2b(fault.name.encode()).digest())
CASES = [Case(number, fault) for number, fault in enumerate(_IN_NO_ORDER, 1)]


def _error_text(error: float) -> str:
    return "equal" if error < EQUAL else f"{error:.1e}"


def _worst_text(worst: Difference) -> str:
    if worst.error < EQUAL:
        return "equal"
    return f"{_error_text(worst.error):<10}{worst.ratio:<9.4f}{worst.name}"
