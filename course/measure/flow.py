"""Where every number came from: a function run on real ranks, watched from outside.

For each element of the result it shows the ranks whose data is in it. None of this is known beforehand: the function
runs once per rank with ones on that rank and zeros on the others. Where something arrives, that rank took part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit.launch import launch


@dataclass(frozen=True)
class Flow:
    """Each rank's tensor ``before`` and ``after`` (None where a rank ends with nothing), in rank order.

    ``sources[rank][element]`` are the ranks whose data is in that element of ``after``.
    """

    before: list[list[float]]
    after: list[list[float] | None]
    sources: list[list[tuple[int, ...]] | None]

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


def trace_flow(function: Callable, start: Sequence[Sequence[float]]) -> Flow:
    """Run ``function(x)`` on one rank per row of ``start``, and see what becomes of the numbers.

    ``function`` gets its rank's row as a float32 tensor, and returns the tensor that the rank then has, or None. It
    must be linear, as sums, copies and moves are; otherwise the sources mean nothing.
    """
    rows = launch(_trace_here, function, start, world_size=len(start), backend="gloo")
    return Flow([list(row) for row in start], [after for after, _ in rows], [sources for _, sources in rows])


def _trace_here(function: Callable, start: Sequence[Sequence[float]]):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(start[rank], dtype=torch.float32)
    after = function(x.clone())
    arrived = [function(torch.full_like(x, float(rank == source))) for source in range(world_size)]
    if after is None:
        return None, None
    touched = torch.stack(arrived).flatten(1).ne(0).T.tolist()  # [element][source]
    return after.flatten().tolist(), [tuple(s for s in range(world_size) if row[s]) for row in touched]


def _text(values: Sequence[float] | None) -> str:
    return "nothing" if values is None else f"[{', '.join(f'{value:g}' for value in values)}]"
