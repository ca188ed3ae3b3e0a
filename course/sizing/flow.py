"""Follows every number through a collective: what each rank has afterwards, and whose data it is.

`course.measure.flow` has the same from real ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from course.sizing.messages import Way, cut, ways

Part = tuple[int, int]  # a rank and an element of what it has before
WITH_ROOT = {
    "broadcast": "Give every rank the root's tensor.",
    "scatter": "Cut the root's tensor, and give each rank one piece.",
    "gather": "Give the root every rank's tensor, in rank order; the others end with nothing.",
    "reduce": "Give the root the sum; what the other ranks' tensors then hold is undefined.",
}
WITHOUT_ROOT = {
    "all-gather": "Give every rank all tensors, in rank order.",
    "reduce-scatter": "Give each rank one piece of the sum.",
    "all-reduce": "Give every rank the whole sum.",
    "all-to-all": "Send a different piece from each rank to each rank.",
    "send and receive": "Send to the next rank and receive from the one before, as on a ring.",
}
"""What each operation of torch.distributed does."""


@dataclass(frozen=True)
class Flow:
    """Each rank's tensor ``before`` and ``after`` (None where a rank ends with nothing), in rank order.

    ``origins[rank][element]`` are the elements of ``before`` that are in that element of ``after``, each as its rank
    and its number.
    """

    before: list[list[float]]
    after: Sequence[Sequence[float] | None]
    origins: Sequence[Sequence[Sequence[Part]] | None]

    @property
    def sources(self) -> list[list[tuple[int, ...]] | None]:
        """The ranks whose data is in each element of ``after``."""
        return [row if row is None else [_ranks(each) for each in row] for row in self.origins]

    @cached_property
    def ways(self) -> dict[tuple[int, int], Way]:
        """The messages that could have brought each element of ``after`` there, simulated."""
        return ways(self.origins)

    @property
    def num_messages(self) -> int:
        """How many messages a rank sends or receives until all is there."""
        return max((way.num_messages for way in self.ways.values()), default=0)

    def __str__(self) -> str:
        """One line per rank: what the picture shows, for those who cannot see it."""
        shown = [[_text(values) for values in column] for column in (self.before, self.after)]
        width = max(map(len, shown[0]))
        return "\n".join(f"rank {rank}  {a:<{width}}  ->  {b}" for rank, (a, b) in enumerate(zip(*shown)))


def numbered(world_size: int, num_elements: int = 4) -> list[list[float]]:
    """Return what the ranks start from: 0, 1, 2, ... plus the rank.

    >>> numbered(2, 3)
    [[0, 1, 2], [1, 2, 3]]
    """
    return [[element + rank for element in range(num_elements)] for rank in range(world_size)]


def row_and_column(world_size: int, num_elements: int = 4) -> list[list[float]]:
    """Return a start in which every number is different: the rank, then the element.

    >>> row_and_column(2, 3)
    [[0, 1, 2], [10, 11, 12]]
    """
    return [[element + 10 * rank for element in range(num_elements)] for rank in range(world_size)]


def simulate_flow(operation: str, start: Sequence[Sequence[float]], root: int = 0) -> Flow:
    """Do what an operation does on one rank per row of ``start``; the rows have one length.

    >>> print(simulate_flow("reduce-scatter", [[1, 2], [3, 4]]))
    rank 0  [1, 2]  ->  [4]
    rank 1  [3, 4]  ->  [6]
    """
    rows = [[[(rank, element)] for element in range(len(row))] for rank, row in enumerate(start)]
    origins = _origins(operation, rows, root)
    after = [
        None if row is None else [sum(start[rank][element] for rank, element in parts) for parts in row]
        for row in origins
    ]
    return Flow([list(row) for row in start], after, origins)


def _origins(
    operation: str, rows: Sequence[Sequence[Sequence[Part]]], root: int
) -> Sequence[Sequence[Sequence[Part]] | None]:
    """Return which parts are in each element of each rank's result."""
    n, whole, total = len(rows), [*chain(*rows)], [[*chain(*column)] for column in zip(*rows)]
    only_root = lambda row: [row if rank == root else None for rank in range(n)]  # noqa: E731
    match operation:
        case "broadcast":
            return [rows[root]] * n
        case "scatter":
            return cut(rows[root], n)
        case "gather":
            return only_root(whole)
        case "reduce":
            return only_root(total)
        case "all-gather":
            return [whole] * n
        case "reduce-scatter":
            return cut(total, n)
        case "all-reduce":
            return [total] * n
        case "all-to-all":
            pieces = [cut(row, n) for row in rows]
            return [[*chain(*column)] for column in zip(*pieces)]
        case "send and receive":
            return [rows[rank - 1] for rank in range(n)]
    raise ValueError(f"{operation!r} is not an operation: use one of {', '.join([*WITH_ROOT, *WITHOUT_ROOT])}")


def _ranks(elements: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rank for rank, _ in elements))


def _text(values: Sequence[float] | None) -> str:
    return "nothing" if values is None else f"[{', '.join(f'{value:g}' for value in values)}]"
