"""A case of the museum: run an unknown fault, read what it shows, name it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from string import ascii_uppercase

from course.exercises.base import Folded, Verdict, indent, kept_in_handouts, report
from course.exercises.source import source_of
from course.museum.context_faults import CONTEXT_FAULTS
from course.museum.expert_faults import EXPERT_FAULTS
from course.museum.faults import FAULTS, Fault
from course.museum.gpu_faults import GPU_FAULTS
from course.museum.sharding_faults import SHARDING_FAULTS
from course.museum.tiny_run import CONFIG, CONTEXT_CONFIG, SHARDING_CONFIG, Run, Seen, in_one_process, on_rank
from course.parity import Parity
from course.table import Cell, Table
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.sizes import counted
from labtrain import TrainConfig

EQUAL = 1e-10
"""Relative errors below this are rounding: everything is in float64."""
ROUNDED = 1e-8
"""A loss or a norm that differs by less is the same, also where its last decimal is rounded the other way."""
SAME_FOR = {"copies": lambda at: at.pp, "hidden": lambda at: (at.dp, at.pp), "heads": lambda at: at}
"""What must be the same on ranks for which this is the same, and on no others: see `Seen`."""


class Tables:
    """What is shown as tables, in a terminal and in a notebook."""

    def tables(self) -> list[Table]:
        """Return the tables."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def _repr_html_(self) -> str:
        wrong = sum(table.num_wrong for table in self.tables())
        says = f"✗ {counted(wrong, 'cell')} wrong: not what a right run shows." if wrong else "✓ Nothing is wrong here."
        return f"<p>{says}</p>" + "".join(table.html for table in self.tables())


@dataclass(frozen=True, repr=False)
class Symptoms(Tables):
    """What a run shows from outside, as tables: by step, by rank, the gradients of step 1, and what shards cost."""

    expected: Run
    ranks: Sequence[Seen]
    layout: ParallelLayout

    @property
    def parity(self) -> Parity:
        """How the gradients of step 1 differ, before clipping and optimizer."""
        return Parity([seen.gradients for seen in self.ranks])

    def letters(self, name: str) -> list[str]:
        """Return a letter per rank, the same for equal fingerprints ``name``."""
        found = [getattr(seen, name) for seen in self.ranks]
        order = list(dict.fromkeys(found))
        return [ascii_uppercase[order.index(each)] for each in found]

    def tables(self) -> list[Table]:
        """Return the tables: three, and a fourth if the run has shards."""
        tables = [self._by_step(), self._by_rank(), self._gradients()]
        return tables if self.ranks[0].sharding is None else [*tables, self._sharding()]

    def same_for(self) -> dict[str, Callable[[int], object]]:
        """Return, for each fingerprint, what of a rank decides with which others it must be the same."""
        names = [name for name in SAME_FOR if getattr(self.ranks[0], name)]
        return {name: lambda rank, whose=SAME_FOR[name]: whose(self.layout.coords(rank)) for name in names}

    def place(self, rank: int) -> str:
        """Return where a rank stands on the axes that have more than one place."""
        at = self.layout.coords(rank)
        return " ".join(f"{axis[0]}{getattr(at, axis)}" for axis in self.layout.axes if self.layout.size(axis) > 1)

    def _by_step(self) -> Table:
        one, here = self.expected, self.ranks[0]
        series = {"loss": (one.losses, here.losses), "gradient norm": (one.norms, here.norms)}
        return steps_table(series, widths=[12, 14, 11, 14, 0])

    def _by_rank(self) -> Table:
        rows, same_for = [], self.same_for()
        for rank, seen in enumerate(self.ranks):
            row = [Cell(f"{rank}  {self.place(rank)}"), _error(max(each.error for each in seen.weights))]
            row += [_number(seen.losses[0], self.expected.losses[0]), _number(seen.norms[0], self.expected.norms[0])]
            for name, whose in same_for.items():
                letters, right = self.letters(name), [whose(other) == whose(rank) for other in range(len(self.ranks))]
                row.append(Cell(letters[rank], right != [letter == letters[rank] for letter in letters]))
            rows.append(row)
        heads = ["rank", "before it", "loss", "norm", *same_for]
        above = {0: "step 1", 1: "weights", 2: "", 4: "same letter: the same"}
        return Table(heads, rows, above=above, widths=[12, 12, 11, 10, *(8 for _ in same_for)])

    def _gradients(self) -> Table:
        rows = []
        for rank, seen in enumerate(self.ranks):
            wrong, worst = sum(each.error >= EQUAL for each in seen.gradients), self.parity.worst(rank)
            row = [Cell(str(rank)), Cell(f"{wrong} of {len(seen.gradients)}", wrong > 0), _error(worst.error)]
            rows.append([*row, Cell(f"{worst.ratio:.4f}" if wrong else ""), Cell(worst.name if wrong else "")])
        ratio, below = self.parity.common_ratio, ""
        if ratio is not None and abs(ratio - 1) > 1e-4:
            below = f"everything is {ratio:.4g} times what one process has"
        heads = ["rank", "wrong", "error", "ratio", "worst at"]
        return Table(heads, rows, below, above={0: "step 1", 1: "gradients"}, widths=[12, 10, 10, 9, 0])

    def _sharding(self) -> Table:
        rows = []
        for rank, seen in enumerate(self.ranks):
            assert seen.sharding is not None
            sent, enough, kilobytes, held, here = seen.sharding
            counted = [Cell(str(sent), sent != enough), Cell(str(enough)), Cell(str(kilobytes), sent != enough)]
            rows.append([Cell(str(rank)), *counted, Cell(f"{held:,}", held != here), Cell(f"{here:,}")])
        heads = ["rank", "sent", "enough", "KB", "optimizer", "shards"]
        above = {0: "all steps", 1: "reduce-scatters", 4: "numbers in"}
        return Table(heads, rows, above=above, widths=[12, 10, 10, 10, 12, 0])


@dataclass(frozen=True)
class Wing:
    """A part of the museum: its name in a notebook, its faults, and the run that each is put into."""

    name: str
    faults: Sequence[Fault]
    config: TrainConfig
    world_size: int

    @property
    def layout(self) -> ParallelLayout:
        return self.config.layout(self.world_size)

    def symptoms(self, apply: Callable[[], None]) -> Tables:
        """Return what the run shows if ``apply`` is called on each rank before it."""
        expected = one_process()  # on the CPU even if there are GPUs: the same numbers everywhere
        ranks = launch(on_rank, apply, expected, self.config, world_size=self.world_size, backend="gloo")
        return Symptoms(expected, ranks, self.layout)


@dataclass
class Case:
    """One unknown fault: `run` it, read, `check` its name."""

    number: int
    _fault: Fault = field(repr=False)
    _wing: Wing = field(repr=False)
    _has_run: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        return f"case {self.number}" if self._wing is MAIN else f"{self._wing.name} case {self.number}"

    def run(self) -> Tables:
        """Train with the fault on ranks, and return what can be seen of it."""
        self._has_run = True
        return self._wing.symptoms(self._fault.apply)

    def check(self, guess: str | None = None) -> None:
        """Say whether ``guess`` names the fault; if not, say what the fault of that name would have shown."""
        report(self.name, self.verdict(guess))

    def verdict(self, guess: str | None = None) -> Verdict:
        """Return what `check` prints, as data."""
        if guess is None or guess is ...:
            return Verdict("not attempted", f"{self.name}: not attempted yet. Choose a name from `names()`.")
        if not self._has_run:
            return Verdict("wrong", f"{self.name}: look at it first: `{self._wing.name}.case({self.number}).run()`.")
        guessed = next((fault for fault in ALL_FAULTS if fault.name == str(guess).strip().lower()), None)
        if guessed is None:
            near = get_close_matches(str(guess), [fault.name for fault in ALL_FAULTS], n=1, cutoff=0.4)
            meant = indent(f"Did you mean {near[0]!r}?" if near else "`names()` lists them.")
            return Verdict("wrong", f"{self.name}: no fault is called {guess!r}.\n{meant}")
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

    @kept_in_handouts
    def solution(self) -> Folded:
        """Show the name of the fault, and the lines that put it into labkit on a rank."""
        source = source_of(self._fault.apply)
        about = f"{self._fault.name}. {self._fault.what} Seen: {self._fault.seen_at}."
        return Folded("Solution", f"{about}\n\n```python\n{source}\n```", plain_text=f"# {about}\n{source}")


HINT = """Go down this list, and stop at the first answer that is not what it should be.

1. Are the weights those of one process before the first step? If not, look at how they are made.
2. Is the loss of step 1 right, and the same on all ranks? If not, look at the forward pass, or the data.
3. Are the gradients of step 1 right? If not, read how many are wrong, which is worst, the ratio, and which ranks agree.
4. Is the norm of step 1 right, and the same on all ranks? If not, look at how the norm is counted.
5. Do the masks differ where they should? Ranks 0 and 1 share every layer; ranks 0 and 2 are replicas. (With t only.)
6. Do the later steps drift, although everything in step 1 is right? What is zero in step 1, and not in step 2?
7. With shards: does a rank send more than it must, or does the optimizer hold more than the rank's shards?
8. With experts: in which layout is it wrong? Is the auxiliary loss right, and is every choice counted once?
9. By NCCL's rules: who waits for which message, and what stands before it in the queue of that pair of ranks?"""


@cache
def one_process() -> Run:
    """Return the run that all cases are compared with."""
    return launch(in_one_process, world_size=1, backend="gloo")[0]


def nothing() -> None:
    """Put in no fault."""


def cases_of(wing: Wing) -> list[Case]:
    """Return the cases of a wing, in an order that says nothing about them."""
    in_no_order = sorted(wing.faults, key=lambda fault: hashlib.blake2b(fault.name.encode()).digest())
    return [Case(number, fault, wing) for number, fault in enumerate(in_no_order, 1)]


MAIN = Wing("museum", FAULTS, CONFIG, world_size=8)
CONTEXT = Wing("context_museum", CONTEXT_FAULTS, CONTEXT_CONFIG, world_size=4)
SHARDING = Wing("sharding_museum", SHARDING_FAULTS, SHARDING_CONFIG, world_size=4)
ALL_FAULTS = [*FAULTS, *CONTEXT_FAULTS, *SHARDING_FAULTS, *EXPERT_FAULTS, *GPU_FAULTS]


def steps_table(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], widths: Sequence[int]) -> Table:
    """Return, for each of the series, what one process and rank 0 have in each step."""
    rows = []
    for step in range(len(next(iter(series.values()))[0])):
        pairs = [(one[step], here[step]) for one, here in series.values()]
        cells = [(_number(right), _number(value, right)) for right, value in pairs]
        rows.append([Cell(str(step + 1)), *(cell for pair in cells for cell in pair)])
    above = {0: "", **{1 + 2 * place: name for place, name in enumerate(series)}}
    return Table(["step", *["one process", "rank 0"] * len(series)], rows, above=above, widths=widths)


def _error(error: float) -> Cell:
    return Cell("equal") if error < EQUAL else Cell(f"{error:.1e}", is_wrong=True)


def _number(value: float, right: float | None = None) -> Cell:
    """Return a loss or a norm with five decimals; it is wrong if they show that it is not the ``right`` one."""
    text = f"{value:.5f}"
    return Cell(text, right is not None and text != f"{right:.5f}" and abs(value - right) > ROUNDED)
