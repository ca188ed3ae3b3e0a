"""Traces where every number came from: runs a function on real ranks, and watches it from outside.

For each element of the result it shows the elements, and so the ranks, whose data is in it. None of this is known
beforehand: the function runs once for each element of each rank, with a one there and zeros elsewhere. That
element took part in every result that is not zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from course.sizing.messages import Held, Move, Step, Way, cut, ways
from labkit.launch import launch


@dataclass(frozen=True)
class Flow:
    """Each rank's tensor ``before`` and ``after`` (None where a rank ends with nothing), in rank order.

    ``origins[rank][element]`` are the elements of ``before`` that are in that element of ``after``, each as its rank
    and its number.
    """

    before: list[list[float]]
    after: list[list[float] | None]
    origins: Sequence[list[list[tuple[int, int]]] | None]

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


def trace_flow(function: Callable, start: Sequence[Sequence[float]]) -> Flow:
    """Run ``function(x)`` on one rank per row of ``start``, and see what becomes of the numbers.

    ``function`` gets its rank's row as a float32 tensor, and returns the tensor that the rank then has, or None. It
    must be linear, as sums, copies and moves are; otherwise the sources mean nothing.
    """
    rows = launch(_trace_here, function, start, world_size=len(start), backend="gloo")
    return Flow([list(row) for row in start], [after for after, _ in rows], [origins for _, origins in rows])


def ring_trace(flows: Sequence[Flow]) -> list[Step]:
    """Read the messages of a ring off the flows after 0, 1, 2, ... steps: what changed came from the rank before."""
    n, steps = len(flows[0].before), []
    for flow in flows:
        rows = [zip(cut(row or (), n), cut(ranks or (), n)) for row, ranks in zip(flow.after, flow.sources)]
        held = [[Held(values, ranks[0]) for values, ranks in row] for row in rows]
        changed = [(r, p) for r in range(n) for p in range(n) if steps and held[r][p] != steps[-1].held[r][p]]
        moves = [Move(piece, (rank - 1) % n, rank, piece) for rank, piece in changed]
        adds = any(held[move.target][move.piece] != steps[-1].held[move.source][move.piece] for move in moves)
        steps.append(Step(held, moves, adds))
    return steps


def _trace_here(function: Callable, start: Sequence[Sequence[float]]):
    rank = dist.get_rank()
    x = torch.tensor(start[rank], dtype=torch.float32)
    after = function(x.clone())
    elements = [(source, element) for source, row in enumerate(start) for element in range(len(row))]
    arrived = []
    for source, element in elements:
        one = torch.zeros_like(x)
        one[element : element + (source == rank)] = 1.0
        arrived.append(function(one))
    if after is None:
        return None, None
    touched = torch.stack(arrived).flatten(1).ne(0).T.tolist()  # [element of after][element of all ranks]
    return after.flatten().tolist(), [[each for each, here in zip(elements, row) if here] for row in touched]


def _ranks(elements: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rank for rank, _ in elements))


def _text(values: Sequence[float] | None) -> str:
    return "nothing" if values is None else f"[{', '.join(f'{value:g}' for value in values)}]"
