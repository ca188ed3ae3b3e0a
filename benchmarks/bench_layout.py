"""All groups of a large layout, against the plain nested loops over coordinates."""

import time
from collections.abc import Iterator

from labkit.layout import AXES, ParallelLayout

SIZES = {16_384: (8, 16), 100_000: (8, 25)}
"""tp_size and pp_size by world size."""


def rows() -> Iterator[tuple[str, float, float]]:
    """The goals are 16,384 ranks in 40 ms, and 100,000 in a second."""
    for world_size, (tp_size, pp_size) in SIZES.items():
        expected, peer_seconds = best_of(3, nested_loops, world_size, tp_size, pp_size)
        groups, ours_seconds = best_of(5, all_groups, world_size, tp_size, pp_size)
        assert groups == expected
        yield f"all groups of {world_size:,} ranks, against nested loops", ours_seconds, peer_seconds


def all_groups(world_size: int, tp_size: int, pp_size: int) -> list[list[list[int]]]:
    """Return the groups of each axis, and the model replicas."""
    layout = ParallelLayout(world_size, tp_size, pp_size)  # a new one each time: nothing is kept from the last
    return [*(layout.groups(axis) for axis in AXES), layout.groups("tp", "pp")]


def nested_loops(world_size: int, tp_size: int, pp_size: int) -> list[list[list[int]]]:
    """Return the same lists, as one would write them down."""
    dp_size = world_size // (tp_size * pp_size)
    tps, dps, pps = range(tp_size), range(dp_size), range(pp_size)

    def rank(tp, dp, pp):
        return tp + tp_size * (dp + dp_size * pp)

    return [
        [[rank(tp, dp, pp) for tp in tps] for pp in pps for dp in dps],
        [[rank(tp, dp, pp)] for pp in pps for dp in dps for tp in tps],
        [[rank(tp, dp, pp) for dp in dps] for pp in pps for tp in tps],
        [[rank(tp, dp, pp) for pp in pps] for dp in dps for tp in tps],
        [[rank(tp, dp, pp) for pp in pps for tp in tps] for dp in dps],
    ]


def best_of(times: int, call, *args):
    """Return what the call returns, and the seconds of its fastest run."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        result = call(*args)
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)
