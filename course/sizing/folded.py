"""What the schedules of a V cost: the idle time of their ranks, and how many chunks' activations a rank holds."""

from functools import lru_cache
from typing import NamedTuple

from course.sizing.simulated import simulate
from labkit.parallel_config import SCHEDULES, ScheduleName

UNITS = 6
"""What a rank does of a micro-batch: forward, backward and weight gradient of two chunks, each taken as one unit."""


IDLE = {  # of p = 2, 3, ... ranks
    "v-half": (
        1, 5, 5, 11, 11, 17, 17, 23, 23, 29, 29, 35, 35, 41, 41,
        47, 47, 53, 53, 59, 59, 65, 65, 71, 71, 77, 77, 83, 83, 89, 89,
    ),
    "v-min": (
        1, 5, 11, 11, 17, 23, 27, 29, 35, 39, 41, 47, 51, 53, 59,
        63, 65, 71, 75, 77, 83, 87, 89, 95, 99, 101, 107, 111, 113, 119, 123,
    ),
}  # fmt: skip
"""What the two greedy schedules' ranks are idle for from 2p micro-batches on, in units: counted by `count_folded`."""


class Folded(NamedTuple):
    """The idle units of a rank in a step, and the most chunks that a rank holds."""

    idle: int
    held: int


def is_known(name: str, pp_size: int, num_micro_batches: int) -> bool:
    """Return whether `folded` knows the counts without making the schedule: from 2p micro-batches on, up to 32 ranks.

    More micro-batches change neither count.
    """
    return num_micro_batches >= 2 * pp_size and pp_size < 2 + len(IDLE["v-min"])


def folded(name: ScheduleName, pp_size: int, num_micro_batches: int) -> Folded:
    """Return the counts of a schedule.

    >>> folded("v-half", 4, 100)
    Folded(idle=5, held=6)
    """
    p = pp_size
    if not is_known(name, p, num_micro_batches):
        return count_folded(name, p, num_micro_batches)
    held = {"zero-bubble-v": 2 * p, "dualpipe-v": 2 * p + 1, "v-half": p + 2 - p % 2, "v-min": 2 * ((p + 4) // 3)}
    return Folded(IDLE[name][p - 2] if name in IDLE else p - 1, held[name])


@lru_cache(maxsize=256)
def count_folded(name: ScheduleName, pp_size: int, num_micro_batches: int) -> Folded:
    """Make the schedule, and count."""
    m = min(num_micro_batches, 2 * pp_size)
    schedule = SCHEDULES[name](pp_size, m, 2)
    makespan = round(simulate(schedule, UNITS / 3, 2 * UNITS / 3).makespan_seconds)
    return Folded(makespan - UNITS * m, max(map(schedule.peak_in_flight, range(pp_size))))
