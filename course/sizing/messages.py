"""The messages of a collective on a ring and on a tree, simulated on numbers: what each rank holds after each step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple

from labkit.partition import check_divides

ELEMENT_BYTES = 4  # float32


class Held(NamedTuple):
    """A piece as a rank holds it, and the ranks whose data is in it."""

    values: Sequence[float]
    ranks: tuple[int, ...]


class Move(NamedTuple):
    """A message; the next one that passes on what arrived has the same ``token``."""

    token: int
    source: int
    target: int
    piece: int


class Step(NamedTuple):
    """What each rank holds of each piece after these messages, which travel at the same time."""

    held: Sequence[Sequence[Held | None]]  # [rank][piece]
    moves: Sequence[Move] = ()
    adds: bool = False  # what arrived; else it is kept


class Way(NamedTuple):
    """How an element of a result comes about: where it is after 0, 1, 2, ... messages, and which one a part joins.

    A place is a rank and an element of its result. None, or before it joins: where the part was at the start.
    """

    stops: Sequence[tuple[int, int] | None]
    joins: Mapping[tuple[int, int], int]
    is_first: bool  # of its copies, the one from which the others are passed on

    @property
    def num_messages(self) -> int:
        return len(self.stops) - 1


def ways(origins: Sequence[Sequence[Sequence[tuple[int, int]]] | None]) -> dict[tuple[int, int], Way]:
    """Simulate the messages of any collective, given which parts (rank, element) are in each element of its result.

    A sum goes around the ring, and each rank adds its part. What several ranks get is passed on from rank to rank. What
    one rank gets goes there directly, as message k if that is k ranks on.

    >>> reduce = [[[(0, 0), (1, 0), (2, 0)]], None, None]
    >>> ways(reduce)[0, 0].stops
    [None, (2, 0), (0, 0)]
    """
    n, found, wanted = len(origins), {}, defaultdict(list)
    for rank, row in enumerate(origins):
        for element, parts in enumerate(row or ()):
            wanted[tuple(parts)].append((rank, element))
    for parts, places in wanted.items():
        slots, sources, route = dict(reversed(places)), sorted({rank for rank, _ in parts}), []
        first, ranks = sources[0] if sources else places[0][0], sorted(slots)
        if len(sources) > 1:  # each rank completes some of the sums
            rank, element = places[0]
            first = ranks[element * len(ranks) // len(origins[rank] or ())]
            route = sorted({*sources, first}, key=lambda rank: (rank - first - 1) % n)
        joins = {part: max(1, route.index(part[0])) if route else 1 for part in parts}
        order = sorted({*ranks} - {first}, key=lambda rank: (rank - first) % n)
        for rank, element in places:
            before = [None, *((each, slots.get(each, element)) for each in route[1:-1])]
            if len(ranks) == 1 and not route:
                before *= max(1, (rank - first) % n)
            elif rank != first:
                on = [first] * bool(route) + order[: order.index(rank)]
                before += [(each, slots[each]) for each in on]
            found[rank, element] = Way([*before, (rank, element)], joins, rank == first)
    return found


def on_a_ring(start: Sequence[Sequence[float]], operation: str) -> list[Step]:
    """Simulate an "all-reduce", a "reduce-scatter" or an "all-gather" of each rank's numbers on a ring.

    Raises:
        ValueError: the numbers cannot be cut into one piece per rank.
    """
    ranks, gathers, scatters = range(n := len(start)), operation == "all-gather", operation == "reduce-scatter"
    if gathers:
        held = [[Held(start[rank], (rank,)) if piece == rank else None for piece in ranks] for rank in ranks]
    else:
        check_divides(n, "numbers_per_rank", len(start[0]), parts_name="ranks")
        held = [[Held(piece, (rank,)) for piece in cut(row, n)] for rank, row in enumerate(start)]
    sources = [[(piece + step + scatters) % n for piece in ranks] for step in range((n - 1) * (2 - gathers - scatters))]
    moves = [[Move(piece, rank, (rank + 1) % n, piece) for piece, rank in enumerate(each)] for each in sources]
    *steps, last = _run(held, moves, 0 if gathers else n - 1)
    if scatters:  # the rest are parts of sums, which nobody needs
        last = last._replace(
            held=[[last.held[rank][rank] if piece == rank else None for piece in ranks] for rank in ranks]
        )
    return [*steps, last]


def on_a_tree(start: Sequence[Sequence[float]]) -> list[Step]:
    """Simulate an all-reduce on a binomial tree: whole tensors go down to rank 0, which adds, and back the same way."""
    num_ranks = len(start)
    distances = [2**level for level in range((num_ranks - 1).bit_length())]
    to_root = [[Move(rank, rank, rank - far, 0) for rank in range(far, num_ranks, 2 * far)] for far in distances]
    back = [[Move(token, target, source, 0) for token, source, target, _ in moves] for moves in reversed(to_root)]
    return _run([[Held(row, (rank,))] for rank, row in enumerate(start)], to_root + back, len(to_root))


def _run(held: Sequence[Sequence[Held | None]], messages: Sequence[Sequence[Move]], num_adding: int) -> list[Step]:
    """Send the messages of each step; in the first steps what arrives is added, later it is kept."""
    steps = [Step(held)]
    for number, moves in enumerate(messages):
        before, held, adds = steps[-1].held, [list(row) for row in steps[-1].held], number < num_adding
        for _, source, target, piece in moves:
            sent, own = before[source][piece], before[target][piece]
            if sent and own and adds:
                sent = Held([*map(add, sent.values, own.values)], tuple(sorted(sent.ranks + own.ranks)))
            held[target][piece] = sent
        steps.append(Step(held, moves, adds))
    return steps


def cut(row: Sequence, number: int) -> list[Sequence]:
    """Cut a row into this many equal pieces."""
    size = len(row) // number
    return [row[start : start + size] for start in range(0, size * number, size)]


def sent_bytes(steps: Sequence[Step], rank: int) -> int:
    """Return how much a rank has sent by the last of these steps.

    >>> sent_bytes(on_a_ring([[1, 2], [3, 4]], "all-reduce"), rank=0)
    8
    """
    moves = [(move, before.held[rank][move.piece]) for before, step in pairwise(steps) for move in step.moves]
    return sum(ELEMENT_BYTES * len(has.values) for move, has in moves if has and move.source == rank)
