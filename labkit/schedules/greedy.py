"""Schedules a V greedily under a memory limit: each rank, whenever it is free, takes the most
urgent op that fits.

A *building block* says what is urgent: when each pass of one micro-batch would run, repeated every
6 units for the next one (a rank has F, B and W of two chunks for each). Where the block leaves a
rank idle, as at the start and the end, other ops fill the hole. The blocks are those of arXiv
2405.15362, section 4; how holes are filled is ours.
"""

from collections import deque
from collections.abc import Callable
from functools import cache, lru_cache

from labkit.schedules.schedule import (
    BACKWARD,
    FORWARD,
    KINDS,
    LETTER,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
)
from labkit.schedules.stages import v_shape
from labkit.sizes import check_size

# Kind and chunk; weight gradients have no time
PASSES = ((FORWARD, 1), (BACKWARD, 1), (FORWARD, 0), (BACKWARD, 0))
# The building block, what fills a hole first, and how many chunks its forwards must leave free
TRIES = (
    ("half", "BWF", 1), ("none", "BFW", 1), ("least", "BFW", 2), ("half", "WBF", 3),
    ("half", "WBF", 0), ("half", "BFW", 3), ("least", "BWF", 3), ("least", "WBF", 2),
    ("half", "BFW", 2),
)  # fmt: skip
"""No single way is best for all sizes; each of these is for some p up to 10."""


def tries(p: int) -> list[tuple[str, str, int]]:
    """Return `TRIES`, and two more that leave the more chunks free the more ranks there are.

    A forward that fills a hole takes memory from one that the block has planned, which then waits
    until some is free again: with many ranks, long. With these, V-Half and V-Min are idle for no
    longer than by the papers' own scheduler, for each p from 2 to 24 (m = 2p).
    Source: ``zbv_greedy.py`` in sail-sg's zero-bubble-pipeline-parallelism at commit 39f2c186a275.
    """
    left_free = p // 4 + 2
    return [*TRIES, ("half", "WBF", left_free), ("least", "WBF", left_free)]


def greedy(pp_size: int, num_micro_batches: int, max_in_flight: int) -> Schedule:
    """Return the fastest V found in which no rank holds the activations of more than
    ``max_in_flight`` chunks.

    Fast means: if all passes take the same time. With 2p chunks and m >= 2p, no rank is idle but
    for the p - 1 passes until the last one gets its first input. A higher limit is never slower, as
    the lower ones are tried too.

    Raises:
        ValueError: the limit is below 2: the last rank has both chunks of a micro-batch before its
            first backward.

    >>> print(greedy(2, 2, max_in_flight=3))
    greedy, at most 3 chunks held: 2 ranks, 2 micro-batches, 2 chunks per rank
    rank 0 | F0 F1 F0.1 B0.1 W0.1 B0 W0 F1.1 B1.1 W1.1 B1 W1
    rank 1 | F0 F0.1 F1 B0.1 B0 W0.1 F1.1 W0 B1.1 B1 W1.1 W1
    """
    p = check_size("pp_size", pp_size)
    m = check_size("num_micro_batches", num_micro_batches)
    limit = check_size("max_in_flight", max_in_flight)
    if limit < 2:
        why = "the last rank has both chunks of a micro-batch before its first backward"
        raise ValueError(
            f"max_in_flight={limit} is too low for a V: {why}: use 2 or more, such as 2p = {2 * p}"
        )
    highest = min(limit, 2 * m)  # a rank never has more than 2m chunks to hold
    num_steps, ops = fastest(p, m, highest)
    if num_steps > 6 * m + p - 1:  # which no V can beat: try all limits, the highest first
        found = [fastest(p, m, lower) for lower in range(highest, 1, -1)]
        num_steps, ops = min(found, key=lambda steps_and_ops: steps_and_ops[0])
    return Schedule(f"greedy, at most {limit} chunks held", p, m, ops, 2, KINDS, v_shape(p))


@lru_cache(maxsize=256)
def fastest(p: int, m: int, limit: int) -> tuple[int, list[list[Op]]]:
    """Return the number of steps, and the ops of each rank, of the best of all `tries`."""
    no_ops = [()] * p
    needs = cache(Schedule("so far", p, m, no_ops, 2, KINDS, v_shape(p)).needs)
    tried = [Greedy(p, m, limit, needs, *how).run() for how in tries(p)]
    found = [steps_and_ops for steps_and_ops in tried if steps_and_ops is not None]
    return min(found, key=lambda steps_and_ops: steps_and_ops[0])


class Greedy:
    """A pipeline while it is scheduled, step by step: every op takes one."""

    def __init__(
        self, p: int, m: int, limit: int, needs: Callable, block: str, fills: str, reserve: int
    ):
        self.limit = limit
        self.needs = needs
        self.fills = fills
        self.reserve = reserve
        self.times = [block_times(block, p, rank) for rank in range(p)]
        self.left = [_all_passes(m) for _ in range(p)]  # what each rank has not done
        # Of each rank, the gradients that it can compute
        self.weights: list[deque[Op]] = [deque() for _ in range(p)]
        self.held = [0] * p  # chunks whose activations each rank has
        self.done: set[tuple[int, Op]] = set()

    def run(self) -> tuple[int, list[list[Op]]] | None:
        """Return the number of steps and each rank's ops; None if the ranks come to wait for each
        other.
        """
        ranks: list[list[Op]] = [[] for _ in self.left]
        steps = 0
        while True:
            # All ranks choose before one of them goes on: within a step nobody sees what others do.
            chosen = [self.choose(rank) for rank in range(len(ranks))]
            if not any(chosen):
                break
            steps += 1
            for rank, op in enumerate(chosen):
                if op is not None:
                    ranks[rank].append(op)
                    self.finish(rank, op)
        is_stuck = any(any(left.values()) for left in self.left)
        return None if is_stuck else (steps, ranks)

    def finish(self, rank: int, op: Op) -> None:
        """Note that a rank has done an op, and what it can do next."""
        self.done.add((rank, op))
        if op.kind == WEIGHT_GRADIENT:
            self.weights[rank].popleft()
            self.held[rank] -= 1
            return
        self.left[rank][op.kind, op.chunk].popleft()
        if op.kind == FORWARD:
            self.held[rank] += 1
        else:
            self.weights[rank].append(op._replace(kind=WEIGHT_GRADIENT))

    def choose(self, rank: int) -> Op | None:
        """Return the op that the block has next, if it can run; else the first kind of ``fills``
        that can.
        """
        times = self.times[rank]
        heads = [queue[0] for queue in self.left[rank].values() if queue]
        urgent = None
        if times:
            heads.sort(key=lambda op: times[op.kind, op.chunk] + 6 * op.micro_batch)
            urgent = heads[0] if heads else None

        def fits(op: Op) -> bool:
            if op.kind == BACKWARD:
                return True
            reserve = self.reserve if op.chunk == 0 and op is not urgent else 0
            return self.limit - self.held[rank] - reserve > 0

        can_run = [op for op in heads if fits(op) and self.done.issuperset(self.needs(rank, op))]
        if self.weights[rank]:
            can_run.append(self.weights[rank][0])
        return min(
            can_run,
            key=lambda op: (op is not urgent, self.fills.index(LETTER[op.kind])),
            default=None,
        )


def _all_passes(m: int) -> dict[tuple[str, int], deque[Op]]:
    return {(kind, chunk): deque(Op(kind, i, chunk) for i in range(m)) for kind, chunk in PASSES}


def block_times(block: str, p: int, rank: int) -> dict[tuple[str, int], int]:
    """Return when a building block has each pass of micro-batch 0: V-Half's, V-Min's, or none.

    No two passes of a rank have the same time modulo 6, for which some sizes need a few units more.
    """
    if block == "none":
        return {}
    if block == "half":
        more = 3 if p % 2 == 0 else 0
        up = (3 * p - 2 - rank, 3 * p - 1 + more + 2 * rank)  # forward and backward of chunk 1
        down = (2 * rank, 6 * p - 2 + more - rank)  # of chunk 0
    else:
        more = 2 if p % 3 == 0 else 0
        up = (2 * p - 1 - rank, 2 * p + more + rank)
        down = (rank, 4 * p - 1 + more - rank)
    return dict(zip(PASSES, (*up, *down)))
