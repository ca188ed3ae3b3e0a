"""Shows what a run of the museum looks like from outside, as tables in a terminal and in a notebook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from string import ascii_uppercase

from course.museum.expert_run import BALANCE, NUM_CHOICES
from course.museum.harness import Run, Seen
from course.parity import Parity
from course.table import Cell, Table
from labkit.layout import AXES, EXPERT_AXES, ParallelLayout
from labkit.sizes import counted

EQUAL = 1e-10
"""Relative errors below this are rounding: everything is in float64."""
ROUNDED = 1e-8
"""A loss or a norm that differs by less is the same, also where its last decimal is rounded the other way."""


def ep_rank(layout: ParallelLayout, rank: int) -> int:
    """Return which of the experts a rank has: those on the same of ep have the same."""
    return layout.group_of(rank, "ep").index(rank)


SAME_FOR = {
    "copies": lambda layout, rank: layout.coords(rank).pp,
    "hidden": lambda layout, rank: (layout.coords(rank).dp, layout.coords(rank).pp),
    "heads": lambda layout, rank: layout.coords(rank),
    "experts": ep_rank,
}
"""What decides with which other ranks a rank's fingerprint must be the same, by its name."""


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
class Sections(Tables):
    """Several runs, each below its title."""

    shown: Mapping[str, Tables]

    def tables(self) -> list[Table]:
        return [table for each in self.shown.values() for table in each.tables()]

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n\n{each!r}" for title, each in self.shown.items())

    def _repr_html_(self) -> str:
        return "".join(f"<p><b>{title}</b></p>{each._repr_html_()}" for title, each in self.shown.items())


@dataclass(frozen=True, repr=False)
class StandsStill(Tables):
    """A run that never ends: the launcher's report."""

    report: str

    def tables(self) -> list[Table]:
        return []

    def __repr__(self) -> str:
        return self.report

    def _repr_html_(self) -> str:
        return f"<p>✗ It stands still.</p><pre>{escape(self.report)}</pre>"


@dataclass(frozen=True, repr=False)
class Symptoms(Tables):
    """What a run shows from outside: by step, by rank, the gradients of step 1, what shards cost, and the routing."""

    expected: Run
    ranks: Sequence[Seen]
    layout: ParallelLayout

    @property
    def parity(self) -> Parity:
        """How the gradients of step 1 differ, before clipping and optimizer."""
        return Parity([seen.gradients for seen in self.ranks])

    def letters(self, name: str) -> list[str]:
        """Return a letter per rank, the same for equal fingerprints ``name``."""
        found = [seen.fingerprints[name] for seen in self.ranks]
        order = list(dict.fromkeys(found))
        return [ascii_uppercase[order.index(each)] for each in found]

    @property
    def title(self) -> str:
        """The sizes of both grids."""
        dense, experts = (
            ", ".join(f"{axis} {self.layout.size(axis)}" for axis in axes) for axes in (AXES[:-1], EXPERT_AXES)
        )
        return f"{dense}; experts: {experts}"

    def tables(self) -> list[Table]:
        """Return the tables: three, and one more if the run has shards, or experts."""
        tables = [self._by_step(), self._by_rank(), self._gradients()]
        if self.ranks[0].sharding:
            tables.append(self._sharding())
        if self.expected.routing:
            tables.append(self._routing())
        return tables

    def place(self, rank: int) -> str:
        """Return where a rank stands on the axes that have more than one place."""
        at = self.layout.coords(rank)
        places = [f"{axis[0]}{getattr(at, axis)}" for axis in self.layout.axes if self.layout.size(axis) > 1]
        if self.layout.ep_size > 1:
            places.append(f"e{ep_rank(self.layout, rank)}")
        return " ".join(places)

    def _by_step(self) -> Table:
        """Return, for each series, what one process and rank 0 have in each step."""
        one, here = self.expected, self.ranks[0]
        series, widths = {"loss": (one.losses, here.losses), "gradient norm": (one.norms, here.norms)}, [12, 14, 11, 14]
        if one.routing and here.routing:
            series["auxiliary loss"] = one.routing.auxiliary, here.routing.auxiliary
            widths = [5, 13, 9, 13, 9, 13]
        rows = []
        for step in range(len(one.losses)):
            pairs = [(right[step], found[step]) for right, found in series.values()]
            cells = [(_number(right), _number(value, right)) for right, value in pairs]
            rows.append([Cell(str(step + 1)), *(cell for pair in cells for cell in pair)])
        above = {0: "", **{1 + 2 * place: name for place, name in enumerate(series)}}
        heads = ["step", *["one process", "rank 0"] * len(series)]
        return Table(heads, rows, above=above, widths=[*widths, 0])

    def _by_rank(self) -> Table:
        rows, names = [], self.ranks[0].fingerprints
        for rank, seen in enumerate(self.ranks):
            row = [Cell(f"{rank}  {self.place(rank)}"), _error(max(each.error for each in seen.weights))]
            row += [_number(seen.losses[0], self.expected.losses[0]), _number(seen.norms[0], self.expected.norms[0])]
            for name in names:
                letters, whose = self.letters(name), partial(SAME_FOR[name], self.layout)
                right = [whose(other) == whose(rank) for other in range(len(self.ranks))]
                row.append(Cell(letters[rank], right != [letter == letters[rank] for letter in letters]))
            rows.append(row)
        heads = ["rank", "before it", "loss", "norm", *names]
        above = {0: "step 1", 1: "weights", 2: "", 4: "same letter: the same"}
        return Table(heads, rows, above=above, widths=[12, 12, 11, 10, *(8 for _ in names)])

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

    def _routing(self) -> Table:
        rows, one, here = [], self.expected.routing, self.ranks[0].routing
        assert one and here
        for step, (choices, right, biases) in enumerate(zip(here.counted, one.biases, here.biases), 1):
            wrong = [sum(map(went_elsewhere, *pair)) for pair in zip(biases, right)]
            row = [Cell(str(step)), Cell(str(NUM_CHOICES)), *(Cell(str(each), each != NUM_CHOICES) for each in choices)]
            rows.append([*row, *(Cell(f"{each} of {len(right[0])}", each > 0) for each in wrong)])
        layers = [f"layer {layer}" for layer in range(len(one.biases[0]))]
        above = {0: "", 1: "choices", 2: "counted", 2 + len(layers): "wrong biases after it"}
        return Table(["step", "made", *layers, *layers], rows, above=above, widths=[12, 10, *[10] * 4])


def went_elsewhere(bias: float, right: float) -> bool:
    """Whether a bias is a step away from the right one."""
    return abs(bias - right) > BALANCE.expert_bias_update_rate / 2


def _error(error: float) -> Cell:
    return Cell("equal") if error < EQUAL else Cell(f"{error:.1e}", is_wrong=True)


def _number(value: float, right: float | None = None) -> Cell:
    """Return a loss or a norm with five decimals; it is wrong if they show that it is not the ``right`` one."""
    text = f"{value:.5f}"
    return Cell(text, right is not None and text != f"{right:.5f}" and abs(value - right) > ROUNDED)
