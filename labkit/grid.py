"""Lists the groups of ranks along the axes of an n-dimensional grid. Integers only: no torch, no process."""

import gc
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

from labkit.sizes import whole_number


class Grid:
    """Ranks on a grid of named axes. The first axis varies fastest as the rank goes up.

    >>> grid = Grid({"tp": 2, "dp": 2, "pp": 2})
    >>> grid.groups("dp"), grid.coords(6)
    ([[0, 2], [1, 3], [4, 6], [5, 7]], {'tp': 0, 'dp': 1, 'pp': 1})
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        *strides, self.world_size = accumulate(self.sizes.values(), mul, initial=1)
        self._strides = dict(zip(self.sizes, strides))  # axis -> difference of neighbouring ranks

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups along one axis, or along several together, sorted; so are their members."""
        members, others = prod(self.sizes[axis] for axis in self.known(axes)), self.sizes.keys() - axes
        collects = gc.isenabled()
        gc.disable()  # it would scan all the new lists repeatedly, for two thirds of the time
        try:
            if members**2 >= self.world_size:
                return self._lines(axes, others)
            return [*map(list, zip(*self._lines(others, axes)))]  # many short groups: transpose a few long ones
        finally:
            if collects:
                gc.enable()

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        coords = self.coords(rank)
        first = rank - sum(coords[axis] * self._strides[axis] for axis in self.known(axes))
        return [first + offset for offset in _sums(self._runs(axes))]

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis."""
        rank = check_index("rank", rank, "world_size", self.world_size)
        return {axis: rank // self._strides[axis] % size for axis, size in self.sizes.items()}

    def rank_at(self, **coords: int) -> int:
        """Return the rank at these coordinates, each 0 unless given: the inverse of `coords`."""
        self.known(coords)
        found = {axis: check_index(axis, at, f"{axis}_size", self.sizes[axis]) for axis, at in coords.items()}
        return sum(at * self._strides[axis] for axis, at in found.items())

    @cached_property
    def _ranks(self) -> list[int]:
        return list(range(self.world_size))  # groups are slices of this, so they share its int objects

    def _lines(self, along: Collection[str], across: Collection[str]) -> list[list[int]]:
        (run, *slower), starts = self._runs(along), _sums(self._runs(across))
        lines = [self._ranks[start : start + run.stop : run.step] for start in starts]
        for offset in _sums(slower)[1:]:
            for start, line in zip(starts, lines):
                line += self._ranks[start + offset : start + offset + run.stop : run.step]
        return lines

    def _runs(self, axes: Collection[str]) -> list[range]:
        """Return the rank offsets along each of these axes, fastest first; adjacent axes are merged into one range."""
        runs: list[range] = []
        for axis, size in self.sizes.items():
            if axis in axes and size > 1:
                stride = self._strides[axis]
                step = runs.pop().step if runs and runs[-1].stop == stride else stride
                runs.append(range(0, stride * size, step))
        return runs or [range(1)]

    def known(self, axes: Collection[str]) -> Collection[str]:
        """Return the axes, each once, or raise a ValueError if this grid lacks one."""
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"axis {axis!r} is unknown: use one of {', '.join(self.sizes)}")
        return set(axes)


def check_index(name: str, value, size_name: str, size: int) -> int:
    """Return an index as an int, or raise a ValueError if it is not a whole number in [0, size)."""
    number = whole_number(value)
    if number is None or not 0 <= number < size:
        raise ValueError(f"{name}={value!r} must be a whole number from 0 to {size - 1}: {size_name} is {size}")
    return number


def _sums(runs: list[range]) -> Sequence[int]:
    """Return every sum of one offset from each run, ascending."""
    sums: Sequence[int] = runs[0] if runs else range(1)
    for run in runs[1:]:
        sums = [slow + fast for slow in run for fast in sums]
    return sums
