"""What the schedules of a V cost: the idle time of their ranks, and how many chunks' activations a rank holds."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from course.sizing.simulated import simulate
from labkit.schedules import Schedule, dualpipe_v, v_half, v_min, zero_bubble_v

FOLDED: dict[str, Callable[[int, int], Schedule]] = {
    "zero-bubble-v": zero_bubble_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""By the names that `labkit.train` has for them."""
UNITS = 6
"""What a rank does of a micro-batch: forward, backward and weight gradient of two chunks, each taken as one unit."""


class Folded(NamedTuple):
    """The idle units of a rank in a step, and the most chunks that each rank holds."""

    idle: int
    held: tuple[int, ...]


@lru_cache(maxsize=256)
def folded(name: str, pp_size: int, num_micro_batches: int) -> Folded:
    """Make the schedule, and count. From 2p micro-batches on, more of them change neither number.

    >>> folded("v-half", 4, 100)
    Folded(idle=5, held=(6, 6, 6, 6))
    """
    schedule = FOLDED[name](pp_size, m := min(num_micro_batches, 2 * pp_size))
    makespan = round(simulate(schedule, UNITS / 3, 2 * UNITS / 3).makespan_seconds)
    return Folded(makespan - UNITS * m, tuple(map(schedule.peak_in_flight, range(pp_size))))
