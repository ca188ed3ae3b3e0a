"""Lists the groups of ranks along the axes of an n-dimensional grid.

Integers only: no torch, no process.
"""

from collections.abc import Collection, Mapping

from labkit.sizes import whole_number


class Grid:
    """Ranks on a grid of named axes. The first axis varies fastest as the rank goes up.

    A rank is the sum of coordinate * stride over the axes: here tp + 2 * dp + 4 * pp.

    >>> grid = Grid({"tp": 2, "dp": 2, "pp": 2})
    >>> grid.groups("dp"), grid.coords(6)
    ([[0, 2], [1, 3], [4, 6], [5, 7]], {'tp': 0, 'dp': 1, 'pp': 1})
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        # By how much the rank goes up with each step along an axis: {"tp": 1, "dp": 2, "pp": 4}
        self._strides: dict[str, int] = {}
        self.world_size = 1
        for axis, size in self.sizes.items():
            self._strides[axis] = self.world_size
            self.world_size *= size

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups along one axis, or along several axes together.

        Each group is in ascending order, and the groups are in the order of their first ranks.
        """
        offsets = self._offsets(self.known(axes))  # of a group's members from its first rank
        # A group's first rank has coordinate 0 on these axes, and any coordinates on the others.
        first_ranks = self._offsets(self.sizes.keys() - axes)
        return [[first + offset for offset in offsets] for first in first_ranks]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the one group of ``axes`` that ``rank`` is a member of."""
        coords = self.coords(rank)
        first = rank
        for axis in self.known(axes):
            first -= coords[axis] * self._strides[axis]
        return [first + offset for offset in self._offsets(axes)]

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis."""
        rank = check_index("rank", rank, "world_size", self.world_size)
        coords = {}
        for axis, size in self.sizes.items():
            coords[axis] = rank // self._strides[axis] % size
        return coords

    def rank_at(self, **coords: int) -> int:
        """Return the rank at these coordinates, each 0 unless given: the inverse of `coords`."""
        self.known(coords)
        rank = 0
        for axis, coord in coords.items():
            coord = check_index(axis, coord, f"{axis}_size", self.sizes[axis])
            rank += coord * self._strides[axis]
        return rank

    def _offsets(self, axes: Collection[str]) -> list[int]:
        """Return the ranks, ascending, that rank 0 reaches along these axes."""
        offsets = [0]
        for axis, stride in self._strides.items():  # fastest first
            if axis in axes:
                # One step is longer than all offsets so far, so they stay in order.
                steps = [stride * index for index in range(self.sizes[axis])]
                offsets = [step + offset for step in steps for offset in offsets]
        return offsets

    def known(self, axes: Collection[str]) -> set[str]:
        """Return the axes as a set, or raise a ValueError if this grid lacks one."""
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"axis {axis!r} is unknown: use one of {', '.join(self.sizes)}")
        return set(axes)


def check_index(name: str, value, size_name: str, size: int) -> int:
    """Return an index as an int, or raise a ValueError if it is not a whole number in [0, size)."""
    number = whole_number(value)
    if number is None or not 0 <= number < size:
        rule = f"must be a whole number from 0 to {size - 1}: {size_name} is {size}"
        raise ValueError(f"{name}={value!r} {rule}")
    return number
