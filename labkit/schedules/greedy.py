"""Schedules a V greedily under a memory limit: each rank, whenever it is free, takes the most urgent op that fits.

What is urgent says a *building block*: when each pass of one micro-batch would run, repeated every 6 units for the next
one (a rank has F, B and W of two chunks for each). Where the block leaves a rank idle, as at the start and the end,
other ops fill the hole. The blocks are those of arXiv 2405.15362, section 4; how holes are filled is ours.
"""

from collections import deque
from collections.abc import Callable
from functools import cache, lru_cache

from labkit.schedules.schedule import BACKWARD, FORWARD, KINDS, LETTER, WEIGHT_GRADIENT, Op, Schedule
from labkit.schedules.stages import v_shape
from labkit.sizes import check_size

PASSES = (FORWARD, 1), (BACKWARD, 1), (FORWARD, 0), (BACKWARD, 0)  # kind and chunk; weight gradients have no time
TRIES = (  # the building block, what fills a hole first, and how many chunks its forwards must leave free
    ("half", "BWF", 1), ("none", "BFW", 1), ("least", "BFW", 2), ("half", "WBF", 3), ("half", "WBF", 0),
    ("half", "BFW", 3), ("least", "BWF", 3), ("least", "WBF", 2), ("half", "BFW", 2), ("least", "WBF", 4),
)  # fmt: skip
"""No single way is best for all sizes; each of these is for some p up to 16."""


def greedy(pp_size: int, num_micro_batches: int, max_in_flight: int) -> Schedule:
    """Return the fastest V found in which no rank holds the activations of more than ``max_in_flight`` chunks.

    Fast means: if all passes take the same time. With 2p chunks and m >= 2p, no rank is idle but for the p - 1 passes
    until the last one gets its first input. A higher limit is never slower, as the lower ones are tried too.

    Raises:
        ValueError: the limit is below 2: the last rank has both chunks of a micro-batch before its first backward.

    >>> print(greedy(2, 2, max_in_flight=3))
    greedy, at most 3 chunks held: 2 ranks, 2 micro-batches, 2 chunks per rank
    rank 0 | F0 F1 F0.1 B0.1 W0.1 B0 W0 F1.1 B1.1 W1.1 B1 W1
    rank 1 | F0 F0.1 F1 B0.1 B0 W0.1 F1.1 W0 B1.1 B1 W1.1 W1
    """
    p, m = check_size("pp_size", pp_size), check_size("num_micro_batches", num_micro_batches)
    limit = check_size("max_in_flight", max_in_flight)
    if limit < 2:
        why = "the last rank has both chunks of a micro-batch before its first backward"
        raise ValueError(f"max_in_flight={limit} is too low for a V: {why}: use 2 or more, such as 2p = {2 * p}")
    limits = range(2, 1 + min(limit, 2 * m))  # a rank never has more than 2m chunks to hold
    best = fastest(p, m, limits[-1])
    if best[0] > 6 * m + p - 1:  # which no V can beat
        best = min((fastest(p, m, each) for each in reversed(limits)), key=lambda each: each[0])
    return Schedule(f"greedy, at most {limit} chunks held", p, m, best[1], 2, KINDS, v_shape(p))


@lru_cache(maxsize=256)
def fastest(p: int, m: int, limit: int) -> tuple[int, list[list[Op]]]:
    """Return the number of steps, and the ops of each rank, of the best of all `TRIES`."""
    needs = cache(Schedule("so far", p, m, [()] * p, 2, KINDS, v_shape(p)).needs)
    return min(filter(None, (Greedy(p, m, limit, needs, *how).run() for how in TRIES)), key=lambda each: each[0])


class Greedy:
    """A pipeline while it is scheduled, step by step: every op takes one."""

    def __init__(self, p: int, m: int, limit: int, needs: Callable, block: str, fills: str, reserve: int):
        self.limit, self.needs, self.fills, self.reserve = limit, needs, fills, reserve
        self.times = [block_times(block, p, rank) for rank in range(p)]
        self.left = [{key: deque(Op(key[0], i, key[1]) for i in range(m)) for key in PASSES} for _ in range(p)]
        self.weights: list[deque[Op]] = [deque() for _ in range(p)]  # gradients that can be computed
        self.held, self.done = [0] * p, set[tuple[int, Op]]()

    def run(self) -> tuple[int, list[list[Op]]] | None:
        """Return the number of steps and each rank's ops; None if the ranks come to wait for each other."""
        ranks: list[list[Op]] = [[] for _ in self.left]
        steps = 0
        while chosen := [(rank, op) for rank in range(len(ranks)) if (op := self.choose(rank))]:
            steps += 1
            for rank, op in chosen:
                ranks[rank].append(op)
                self.done.add((rank, op))
                self.held[rank] += (op.kind == FORWARD) - (op.kind == WEIGHT_GRADIENT)
                queue = self.weights[rank] if op.kind == WEIGHT_GRADIENT else self.left[rank][op.kind, op.chunk]
                queue.popleft()
                if op.kind == BACKWARD:
                    self.weights[rank].append(op._replace(kind=WEIGHT_GRADIENT))
        return None if any(any(left.values()) for left in self.left) else (steps, ranks)

    def choose(self, rank: int) -> Op | None:
        """Return the op that the block has next, if it can run; else the first kind of ``fills`` that can."""
        times = self.times[rank]
        heads = [queue[0] for queue in self.left[rank].values() if queue]
        heads.sort(key=lambda op: times[op.kind, op.chunk] + 6 * op.micro_batch if times else 0)
        urgent = heads[0] if heads and times else None

        def fits(op: Op) -> bool:
            free = self.limit - self.held[rank] - (self.reserve if op.chunk == 0 and op is not urgent else 0)
            return op.kind == BACKWARD or free > 0

        can_run = [op for op in heads if fits(op) and self.done.issuperset(self.needs(rank, op))]
        can_run += list(self.weights[rank])[:1]
        return min(can_run, key=lambda op: (op is not urgent, self.fills.index(LETTER[op.kind])), default=None)


def block_times(block: str, p: int, rank: int) -> dict[tuple[str, int], int]:
    """Return when a building block has each pass of micro-batch 0: V-Half's, V-Min's, or none.

    No two passes of a rank have the same time modulo 6, for which some sizes need a few units more.
    """
    half, least = 3 * (p % 2 == 0), 2 * (p % 3 == 0)
    times = {
        "half": (3 * p - 2 - rank, 3 * p + half - 1 + 2 * rank, 2 * rank, 6 * p + half - 2 - rank),
        "least": (2 * p - 1 - rank, 2 * p + least + rank, rank, 4 * p + least - 1 - rank),
        "none": (),
    }[block]
    return dict(zip(PASSES, times))
