"""Shows the runs of the experts' wing, in two layouts: by step, by rank, the gradients of step 1, and the routing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from course.museum.cases import Symptoms, Tables, Wing, steps_table
from course.museum.expert_faults import EXPERT_FAULTS
from course.museum.expert_run import (
    BALANCE,
    LAYOUTS,
    NUM_CHOICES,
    WORLD_SIZE,
    ExpertRun,
    ExpertSeen,
    in_one_process,
    on_rank,
)
from course.museum.tiny_run import CONFIG
from course.table import Cell, Table
from labkit.launch import launch
from labkit.layout import AXES, EXPERT_AXES


def went_elsewhere(bias: float, right: float) -> bool:
    """Whether a bias is a step away from the right one."""
    return abs(bias - right) > BALANCE.expert_bias_update_rate / 2


class InOneLayout(Symptoms):
    """The tables of one layout."""

    expected: ExpertRun
    ranks: list[ExpertSeen]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def title(self) -> str:
        """The sizes of both grids."""
        dense, experts = (
            ", ".join(f"{axis} {self.layout.size(axis)}" for axis in axes) for axes in (AXES[:-1], EXPERT_AXES)
        )
        return f"{dense}; experts: {experts}"

    def ep_rank(self, rank: int) -> int:
        """Return which of the experts a rank has: those on the same of ep have the same."""
        return self.layout.group_of(rank, "ep").index(rank)

    def same_for(self) -> dict[str, Callable[[int], object]]:
        return {"experts": self.ep_rank}

    def place(self, rank: int) -> str:
        return super().place(rank) + (f" e{self.ep_rank(rank)}" if self.layout.ep_size > 1 else "")

    def tables(self) -> list[Table]:
        return [self._by_step(), self._by_rank(), self._gradients(), self._routing()]

    def _by_step(self) -> Table:
        one, here = self.expected, self.ranks[0]
        names = {"loss": "losses", "gradient norm": "norms", "auxiliary loss": "auxiliary"}
        series = {name: (getattr(one, each), getattr(here, each)) for name, each in names.items()}
        return steps_table(series, widths=[5, 13, 9, 13, 9, 13, 0])

    def _routing(self) -> Table:
        rows, one, here = [], self.expected, self.ranks[0]
        for step, (counted, right, biases) in enumerate(zip(here.counted, one.biases, here.biases), 1):
            wrong = [sum(map(went_elsewhere, *pair)) for pair in zip(biases, right)]
            row = [Cell(str(step)), Cell(str(NUM_CHOICES)), *(Cell(str(each), each != NUM_CHOICES) for each in counted)]
            rows.append([*row, *(Cell(f"{each} of {len(right[0])}", each > 0) for each in wrong)])
        layers = [f"layer {layer}" for layer in range(len(one.biases[0]))]
        above = {0: "", 1: "choices", 2: "counted", 2 + len(layers): "wrong biases after it"}
        return Table(["step", "made", *layers, *layers], rows, above=above, widths=[12, 10, *[10] * 4])


@dataclass(frozen=True, repr=False)
class InTwoLayouts(Tables):
    """The tables of both layouts, each below the sizes of its grids."""

    layouts: list[InOneLayout]

    def tables(self) -> list[Table]:
        return [table for each in self.layouts for table in each.tables()]

    def __repr__(self) -> str:
        return "\n\n".join(f"{each.title}\n\n{each!r}" for each in self.layouts)

    def _repr_html_(self) -> str:
        return "".join(f"<p><b>{each.title}</b></p>{each._repr_html_()}" for each in self.layouts)


class ExpertWing(Wing):
    """The wing whose faults are put into a run of its own."""

    def symptoms(self, apply: Callable[[], None]) -> InTwoLayouts:
        expected = one_process_with_experts()
        ranks = launch(on_rank, apply, expected, world_size=self.world_size, backend="gloo")
        return in_two_layouts(expected, ranks)


def in_two_layouts(expected: ExpertRun, ranks: list[list[ExpertSeen]]) -> InTwoLayouts:
    """Return what is seen on all ranks, by layout."""
    return InTwoLayouts([InOneLayout(expected, seen, layout) for seen, layout in zip(zip(*ranks), LAYOUTS)])


@cache
def one_process_with_experts() -> ExpertRun:
    """Return the run that all cases are compared with."""
    return launch(in_one_process, world_size=1, backend="gloo")[0]


EXPERTS = ExpertWing("experts_museum", EXPERT_FAULTS, CONFIG, WORLD_SIZE)
