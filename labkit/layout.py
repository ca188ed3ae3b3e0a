"""Places ranks on their axes and lists the groups along them, in two grids: one for experts, a dense one for the rest.

Integers only: no torch, no process.

Source: the order of groups and of their members, and the experts' grid, are Megatron-LM's (arXiv 2104.04473, section 3;
``RankGenerator`` in its ``parallel_state.py``).
"""

import gc
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.partition import multiples_near
from labkit.sizes import check_size, divisors, either, ranks_text, whole_number

AXES = ("tp", "cp", "dp", "pp")  # of the dense grid, in Megatron-LM's default order, the fastest first
OPTIONAL = {"cp"}  # an axis that an order may leave out, and no text mentions, while its size is 1
EXPERT_AXES = ("expert_tp", "ep", "expert_dp")  # the experts' grid has these, and pp in common with the dense one


class Coords(NamedTuple):
    """A rank's place on each dense axis, counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


class Grid:
    """Ranks in a box of named axes, which they fill like the digits of an odometer: the first axis moves fastest.

    ``order`` lists the axes with their sizes. An axis that stands in it twice has two digits, the lower one first.

    >>> grid = Grid([("tp", 2), ("dp", 2), ("pp", 2)])
    >>> grid.groups("dp"), grid.coords(6)
    ([[0, 2], [1, 3], [4, 6], [5, 7]], {'tp': 0, 'dp': 1, 'pp': 1})
    """

    def __init__(self, order: Sequence[tuple[str, int]]):
        self.sizes: dict[str, int] = {}
        self._digits, stride = [], 1  # axis, size, from one rank to the next along it, what it counts in a coordinate
        for axis, size in order:
            counts = self.sizes.get(axis, 1)
            self._digits.append((axis, size, stride, counts))
            stride, self.sizes[axis] = stride * size, counts * size
        self.world_size = stride

    def size(self, axis: str) -> int:
        """Return the number of ranks in one group of ``axis``."""
        return self.sizes[self._known(axis)[0]]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of one axis, or of several taken together: by first member, the members ascending."""
        members = math.prod(self.size(axis) for axis in set(self._known(*axes)))
        collects = gc.isenabled()
        gc.disable()  # it would walk through all the new lists again and again: two thirds of the time
        try:
            if members**2 >= self.world_size:
                return self._lines(axes)
            return [*map(list, zip(*self._lines(self.sizes.keys() - axes)))]  # across the lines of the other axes
        finally:
            if collects:
                gc.enable()

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        rank = _check_index("rank", rank, "world_size", self.world_size)
        within = self._known(*axes)
        first = rank - sum(rank // stride % size * stride for axis, size, stride, _ in self._digits if axis in within)
        return [first + offset for offset in _sums(self._runs(axes))]

    def coords(self, rank: int) -> dict[str, int]:
        """Return where ``rank`` stands on each axis."""
        rank = _check_index("rank", rank, "world_size", self.world_size)
        place = dict.fromkeys(self.sizes, 0)
        for axis, size, stride, counts in self._digits:
            place[axis] += rank // stride % size * counts
        return place

    def rank_at(self, **place: int) -> int:
        """Return the rank at these coordinates, 0 where none is given: the inverse of `coords`."""
        place = dict.fromkeys(self.sizes, 0) | place
        for axis, at in place.items():
            place[axis] = _check_index(axis, at, f"{axis}_size", self.size(axis))
        return sum(place[axis] // counts % size * stride for axis, size, stride, counts in self._digits)

    @cached_property
    def _ranks(self) -> list[int]:
        return list(range(self.world_size))  # one object for each rank in all groups, which are slices of this

    def _lines(self, axes: Collection[str]) -> list[list[int]]:
        (run, *slower), starts = self._runs(axes), _sums(self._runs(self.sizes.keys() - axes))
        lines = [self._ranks[start : start + run.stop : run.step] for start in starts]
        for offset in _sums(slower)[1:]:
            for start, line in zip(starts, lines):
                line += self._ranks[start + offset : start + offset + run.stop : run.step]
        return lines

    def _runs(self, axes: Collection[str]) -> list[range]:
        """Return the steps along these axes, the fastest first; digits next to each other make one range."""
        runs: list[range] = []
        for axis, size, stride, _ in self._digits:
            if axis in axes and size > 1:
                step = runs.pop().step if runs and runs[-1].stop == stride else stride
                runs.append(range(0, stride * size, step))
        return runs or [range(1)]

    def _known(self, *axes: str) -> tuple[str, ...]:
        if not axes:
            raise ValueError(f"a group needs at least one axis: use {either([*map(repr, self.sizes)])}")
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"axis {axis!r} is unknown: use one of {', '.join(self.sizes)}")
        return axes


@dataclass(frozen=True)
class ParallelLayout:
    """``world_size`` ranks in two grids, ``dense`` (tp, cp, dp, pp) and ``expert`` (expert_tp, ep, expert_dp, pp).

    ``order`` lists the dense axes fastest first, in any permutation; ``cp`` may be left out while ``cp_size`` is 1. For
    the experts expert_tp takes the place of tp, and ep, then expert_dp, that of dp. Unless their sizes are given, they
    lie as dense layers do: expert_tp is tp, and expert_dp is cp and dp together.

    Raises:
        ValueError: a size does not fit, or the pipelines of the two grids differ; the message says what would do.
            Nothing is ever clamped.

    >>> layout = ParallelLayout(8, pp_size=2, tp_size=2, order="tp-dp-pp", ep_size=4, expert_tp_size=1)
    >>> layout.dp_size, layout.groups("dp"), layout.groups("ep")
    (2, [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]])
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    order: str = "tp-cp-dp-pp"
    _: KW_ONLY
    ep_size: int = 1
    expert_tp_size: int = None  # pyright: ignore[reportAssignmentType]  (tp_size unless given)

    def __post_init__(self):
        if self.expert_tp_size is None:
            object.__setattr__(self, "expert_tp_size", self.tp_size)
        for name in ("world_size", "tp_size", "pp_size", "cp_size", "ep_size", "expert_tp_size"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        self._check_order()
        n, sizes = self.world_size, {"tp": self.tp_size, "cp": self.cp_size, "pp": self.pp_size}
        if n % (product := math.prod(sizes.values())):
            raise ValueError(f"{_misfit(sizes, 'world_size', n)}, or world_size {either(multiples_near(n, product))}")
        if not self._has_dense_experts:
            self._check_experts()

    @property
    def dp_size(self) -> int:
        """Data-parallel replicas, what remains of the world: d = n / (t * c * p)."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def expert_dp_size(self) -> int:
        """How many ranks have copies of the same experts, what remains of the world in their grid."""
        return self.world_size // (self.expert_tp_size * self.ep_size * self.pp_size)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The dense axes, fastest first; one that ``order`` leaves out is of size 1, so its place does not matter."""
        return tuple(dict.fromkeys([*self.order.split("-"), *AXES]))

    @cached_property
    def dense(self) -> Grid:
        """The grid of everything but experts."""
        return Grid([(axis, getattr(self, f"{axis}_size")) for axis in self.axes])

    @cached_property
    def expert(self) -> Grid:
        """The grid of the experts, over the same ranks and with the same pipelines."""
        cp_size = self.cp_size if self._has_dense_experts else 1  # Megatron-LM's has no cp: dp takes its ranks
        digits = {
            "tp": [("expert_tp", self.expert_tp_size)],
            "cp": [("expert_dp", cp_size)],
            "dp": [("ep", self.ep_size), ("expert_dp", self.expert_dp_size // cp_size)],
            "pp": [("pp", self.pp_size)],
        }
        return Grid([digit for axis in self.axes for digit in digits[axis]])

    def size(self, axis: str) -> int:
        """Return the number of ranks in one group of ``axis``."""
        return self._grid_of(axis).size(axis)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of one axis, or of several of one grid taken together, as lists of global ranks.

        ``groups("tp", "pp")`` are the model replicas. Groups and members come in Megatron-LM's order, which depends on
        the layout's ``order`` and never on that of the arguments.

        >>> ParallelLayout(8, tp_size=2, pp_size=2).groups("tp", "pp")
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        return self._grid_of(*axes).groups(*axes)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        return self._grid_of(*axes).group_of(rank, *axes)

    def coords(self, rank: int) -> Coords:
        """Return where ``rank`` stands on each dense axis.

        >>> ParallelLayout(16, tp_size=2, pp_size=4).coords(6)
        Coords(tp=0, cp=0, dp=1, pp=1)
        """
        return Coords(**self.dense.coords(rank))

    def rank_at(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates: the inverse of `coords`."""
        return self.dense.rank_at(tp=tp, cp=cp, dp=dp, pp=pp)

    def crossings(self, axis: str, gpus_per_node: int) -> list[list[int]]:
        """Return the groups of a dense axis with members in more than one node of ``gpus_per_node`` ranks."""
        groups, size = self.dense.groups(axis), check_size("gpus_per_node", gpus_per_node)
        return [group for group in groups if group[0] // size != group[-1] // size]

    def shard_groups(self, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups along data and context divided into neighbours, ``shard_size`` each, and those across.

        With hybrid sharding, neighbours share one copy of the weights, and those across have the same shard.

        >>> ParallelLayout(8).shard_groups(4)
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
        """
        size, groups = self.dp_size * self.cp_size, self.groups("dp", "cp")
        if size % check_size("shard_size", shard_size):
            raise ValueError(
                f"shard_size={shard_size} does not divide dp_size * cp_size = {size}: use {either(divisors(size))}"
            )
        neighbours = [group[start : start + shard_size] for group in groups for start in range(0, size, shard_size)]
        return neighbours, [group[place::shard_size] for group in groups for place in range(shard_size)]

    def __str__(self) -> str:
        """Return a table: pipeline stages down, data (and context) replicas across, a tensor group in each cell."""
        sizes, stages, shown = _mentioned(self.dense.sizes), min(self.pp_size, 16), 0
        head = len(f"pp {stages - 1}")
        rows = [" " * head, *(f"pp {pp}".ljust(head) for pp in range(stages))]
        for dp, cp in itertools.product(range(self.dp_size), range(self.cp_size)):
            groups = [self.group_of(self.rank_at(dp=dp, cp=cp, pp=pp), "tp") for pp in range(stages)]
            title = " ".join(f"{axis} {at}" for axis, at in (("dp", dp), ("cp", cp)) if axis in sizes)
            column = [title, *map(_cell, groups)]
            width = max(map(len, column))
            if shown and len(rows[0]) + 3 + width > 120:
                break
            rows, shown = [f"{row} | {cell.ljust(width)}" for row, cell in zip(rows, column)], shown + 1
        factors = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        lines = [f"{self.world_size} ranks = {factors}, fastest axis first", *map(str.rstrip, rows)]
        if shown < (replicas := self.dp_size * self.cp_size) or stages < self.pp_size:
            lines.append(f"(only {stages} of {self.pp_size} stages, {shown} of {replicas} replicas shown)")
        return "\n".join(lines)

    @property
    def _has_dense_experts(self) -> bool:
        return (self.ep_size, self.expert_tp_size) == (1, self.tp_size)

    def _grid_of(self, *axes: str) -> Grid:
        return self.expert if set(axes).intersection(EXPERT_AXES) else self.dense

    def _check_order(self) -> None:
        named = self.order.split("-") if isinstance(self.order, str) else []
        if len(set(named)) != len(named) or OPTIONAL.union(named) != set(AXES):
            rule = "use each of tp, dp, pp (and cp) once, as in 'tp-cp-dp-pp'"
            raise ValueError(f"order={self.order!r} is not an order of the axes: {rule}")
        for axis in OPTIONAL.difference(named):
            if (size := getattr(self, f"{axis}_size")) > 1:
                left_out = f"order={self.order!r} leaves out {axis} while {axis}_size={size}"
                raise ValueError(f"{left_out}: name {axis} in it, as in 'tp-cp-dp-pp'")

    def _check_experts(self) -> None:
        ranks, sizes = self.world_size // self.pp_size, {"expert_tp": self.expert_tp_size, "ep": self.ep_size}
        if ranks % math.prod(sizes.values()):
            raise ValueError(_misfit(sizes, "the expert grid's world_size/pp_size", ranks))
        dense, expert = (grid.group_of(0, "pp") for grid in (self.dense, self.expert))
        if dense != expert:  # the other pipelines have the same steps
            raise ValueError(
                f"order={self.order!r} makes pipelines such as {ranks_text(dense)} in the dense grid, but "
                f"{ranks_text(expert)} in the expert grid: name pp last, as in 'tp-cp-dp-pp'"
            )


def _mentioned(sizes: dict[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1 or axis not in OPTIONAL}


def _misfit(sizes: dict[str, int], whole: str, ranks: int) -> str:
    sizes, product = _mentioned(sizes), math.prod(sizes.values())
    rests = {axis: product // size for axis, size in sizes.items()}
    ways = [f"{axis}_size {either(divisors(ranks // rest))}" for axis, rest in rests.items() if ranks % rest == 0]
    if not ways:  # no single size can be blamed: say what their product may be
        ways.append(f"sizes whose product is {either(divisors(ranks))}")
    named = " * ".join(f"{axis}_size={size}" for axis, size in sizes.items())
    return f"{named} = {product} does not divide {whole}={ranks}: use " + ", or ".join(ways)


def _check_index(name: str, value, size_name: str, size: int) -> int:
    number = whole_number(value)
    if number is None or not 0 <= number < size:
        raise ValueError(f"{name}={value!r} must be a whole number from 0 to {size - 1}: {size_name} is {size}")
    return number


def _sums(runs: list[range]) -> Sequence[int]:
    """Return every sum of one step along each run, ascending."""
    sums: Sequence[int] = runs[0] if runs else range(1)
    for run in runs[1:]:
        sums = [slow + fast for slow in run for fast in sums]
    return sums


def _cell(ranks: list[int]) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
