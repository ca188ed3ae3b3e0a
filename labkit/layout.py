"""Where each rank stands: its tensor, context, data and pipeline coordinates, and who is in its groups.

The ranks of a job fill a four-dimensional grid like the digits of an odometer: the axis that ``order`` names first
moves fastest. A group of an axis is a line of the grid along it. Integers only: no torch, no process.

Source: the order of groups and of their members is Megatron-LM's (arXiv 2104.04473, section 3;
``RankGenerator`` in its ``parallel_state.py``).
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from labkit.partition import multiples_near
from labkit.sizes import check_size, divisors, either, whole_number

AXES = ("tp", "cp", "dp", "pp")  # in Megatron-LM's default order, the fastest first


class Coords(NamedTuple):
    """A rank's place on each axis, counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """``world_size`` ranks, divided into tensor, context, data and pipeline groups: n = t * c * d * p.

    ``order`` lists the axes fastest first, in any permutation; ``cp`` may be left out while ``cp_size`` is 1.

    Raises:
        ValueError: a size does not fit; the message says which sizes would. Nothing is ever clamped.

    >>> layout = ParallelLayout(8, tp_size=2, pp_size=2, order="tp-dp-pp")
    >>> layout.dp_size, layout.groups("dp")
    (2, [[0, 2], [1, 3], [4, 6], [5, 7]])
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    order: str = "tp-cp-dp-pp"

    def __post_init__(self):
        for name in ("world_size", "tp_size", "pp_size", "cp_size"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        _check_order(self.order, self.cp_size)
        if self.world_size % (self.tp_size * self.pp_size * self.cp_size):
            raise ValueError(self._misfit())

    @property
    def dp_size(self) -> int:
        """Data-parallel replicas, what remains of the world: d = n / (t * c * p)."""
        return self.world_size // (self.tp_size * self.pp_size * self.cp_size)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All four axes, fastest first; one that ``order`` leaves out is of size 1, so its place does not matter."""
        named = tuple(self.order.split("-"))
        return named if "cp" in named else (*named, "cp")

    def size(self, axis: str) -> int:
        """Return the number of ranks in one group of ``axis``."""
        return getattr(self, f"{_check_axis(axis)}_size")

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of one axis, or of several taken together, as lists of global ranks.

        ``groups("tp", "pp")`` are the model replicas. Groups and members come in Megatron-LM's order, which depends on
        the layout's ``order`` and never on that of the arguments.

        >>> ParallelLayout(8, tp_size=2, pp_size=2).groups("tp", "pp")
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        within = self._within(axes)
        dims = sorted(range(4), key=lambda dim: self.axes[::-1][dim] in within)  # across the groups, then along them
        members = math.prod(self.size(axis) for axis in within)
        return self._grid.transpose(dims).reshape(-1, members).tolist()

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        place, within = self.coords(rank), self._within(axes)
        line = tuple(slice(None) if axis in within else getattr(place, axis) for axis in self.axes[::-1])
        return self._grid[line].ravel().tolist()

    def coords(self, rank: int) -> Coords:
        """Return where ``rank`` stands on each axis.

        >>> ParallelLayout(16, tp_size=2, pp_size=4).coords(6)
        Coords(tp=0, cp=0, dp=1, pp=1)
        """
        place, left = {}, _check_index("rank", rank, "world_size", self.world_size)
        for axis in self.axes:
            left, place[axis] = divmod(left, self.size(axis))
        return Coords(**place)

    def rank_at(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates: the inverse of `coords`."""
        place, rank = Coords(tp, cp, dp, pp), 0
        for axis in self.axes[::-1]:  # the slowest first
            size = self.size(axis)
            rank = rank * size + _check_index(axis, getattr(place, axis), f"{axis}_size", size)
        return rank

    def embedding_groups(self) -> list[list[int]]:
        """Return the first and the last rank of each pipeline, which share the tied word embedding."""
        return [group if len(group) == 1 else [group[0], group[-1]] for group in self.groups("pp")]

    def shard_groups(self, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups along data and context cut into parts of ``shard_size`` neighbours, and across the parts.

        With hybrid sharding, the ranks of a part share one copy of the weights, and those across have the same shard.

        >>> ParallelLayout(8).shard_groups(4)
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
        """
        size, groups = self.dp_size * self.cp_size, self.groups("dp", "cp")
        if size % check_size("shard_size", shard_size):
            raise ValueError(
                f"shard_size={shard_size} does not divide dp_size * cp_size = {size}: use {either(divisors(size))}"
            )
        parts = [group[start : start + shard_size] for group in groups for start in range(0, size, shard_size)]
        return parts, [group[place::shard_size] for group in groups for place in range(shard_size)]

    def crossings(self, axis: str, gpus_per_node: int) -> list[list[int]]:
        """Return the groups of ``axis`` with members in more than one node of ``gpus_per_node`` ranks."""
        groups = np.asarray(self.groups(axis))
        nodes = groups // check_size("gpus_per_node", gpus_per_node)
        return groups[(nodes != nodes[:, :1]).any(axis=1)].tolist()

    def __str__(self) -> str:
        """Return a table: pipeline stages down, data (and context) replicas across, a tensor group in each cell."""
        axes, stages, shown = self.axes[::-1], min(self.pp_size, 16), 0
        ranks = self._grid.transpose([axes.index(axis) for axis in ("pp", "dp", "cp", "tp")])[:stages]
        head = len(f"pp {stages - 1}")
        rows = [" " * head, *(f"pp {pp}".ljust(head) for pp in range(stages))]
        for dp, cp in itertools.product(range(self.dp_size), range(self.cp_size)):
            column = [f"dp {dp}" + (f" cp {cp}" if self.cp_size > 1 else ""), *map(_cell, ranks[:, dp, cp])]
            width = max(map(len, column))
            if shown and len(rows[0]) + 3 + width > 120:
                break
            rows, shown = [f"{row} | {cell.ljust(width)}" for row, cell in zip(rows, column)], shown + 1
        factors = " x ".join(f"{axis} {self.size(axis)}" for axis in self.axes if axis != "cp" or self.cp_size > 1)
        lines = [f"{self.world_size} ranks = {factors}, fastest axis first", *map(str.rstrip, rows)]
        if shown < (replicas := self.dp_size * self.cp_size) or stages < self.pp_size:
            lines.append(f"(only {stages} of {self.pp_size} stages, {shown} of {replicas} replicas shown)")
        return "\n".join(lines)

    @cached_property
    def _grid(self) -> np.ndarray:
        shape = [self.size(axis) for axis in self.axes]
        return np.arange(self.world_size).reshape(shape[::-1])  # slowest axis first, as numpy counts

    def _within(self, axes: tuple[str, ...]) -> set[str]:
        if not axes:
            raise ValueError("a group needs at least one axis: use 'tp', 'cp', 'dp' or 'pp'")
        return {_check_axis(axis) for axis in axes}

    def _misfit(self) -> str:
        sizes = {axis: self.size(axis) for axis in ("tp", "cp", "pp") if axis != "cp" or self.cp_size > 1}
        product = math.prod(sizes.values())
        rests = {axis: product // size for axis, size in sizes.items()}
        fitting = {axis: self.world_size // rest for axis, rest in rests.items() if self.world_size % rest == 0}
        ways = [f"{axis}_size {either(divisors(most))}" for axis, most in fitting.items()]
        if not ways:  # no single size can be blamed: say what their product may be
            ways.append(f"sizes whose product is {either(divisors(self.world_size))}")
        ways.append(f"world_size {either(multiples_near(self.world_size, product))}")
        named = " * ".join(f"{axis}_size={size}" for axis, size in sizes.items())
        return f"{named} = {product} does not divide world_size={self.world_size}: use " + ", or ".join(ways)


def _check_axis(axis: str) -> str:
    if axis not in AXES:
        raise ValueError(f"axis {axis!r} is unknown: use one of {', '.join(AXES)}")
    return axis


def _check_index(name: str, value, size_name: str, size: int) -> int:
    number = whole_number(value)
    if number is None or not 0 <= number < size:
        raise ValueError(f"{name}={value!r} must be a whole number from 0 to {size - 1}: {size_name} is {size}")
    return number


def _check_order(order: str, cp_size: int) -> None:
    named = order.split("-") if isinstance(order, str) else []
    if len(set(named)) != len(named) or set(named) | {"cp"} != set(AXES):
        rule = "use each of tp, dp, pp (and cp) once, as in 'tp-cp-dp-pp'"
        raise ValueError(f"order={order!r} is not an order of the axes: {rule}")
    if "cp" not in named and cp_size > 1:
        raise ValueError(f"order={order!r} leaves out cp while cp_size={cp_size}: name cp in it, as in 'tp-cp-dp-pp'")


def _cell(ranks: np.ndarray) -> str:
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
