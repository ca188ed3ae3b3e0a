"""Traces where every number came from: runs a function on real ranks, and watches it from outside.

For each element of the result it shows the elements, and so the ranks, whose data is in it. None of this is known
beforehand: the function runs once for each element of each rank, with a one there and zeros elsewhere. That
element took part in every result that is not zero.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from course.sizing.flow import Flow
from course.sizing.messages import Held, Move, Step, cut
from labkit.groups import local_device
from labkit.launch import launch


def trace_flow(function: Callable, start: Sequence[Sequence[float]], backend: str = "auto") -> Flow:
    """Run ``function(x)`` on one rank per row of ``start``, and see what becomes of the numbers.

    ``function`` gets its rank's row as a float32 tensor, and returns the tensor that the rank then has, or None. It
    must be linear, as sums, copies and moves are; otherwise the sources mean nothing. ``backend`` is that of `launch`.
    """
    rows = launch(_trace_here, function, start, world_size=len(start), backend=backend)
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
    x = torch.tensor(start[rank], dtype=torch.float32, device=local_device())
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
