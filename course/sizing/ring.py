"""Counts what a collective costs on a ring: how many messages each rank sends, and how much of the data."""

RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often the message goes around the ring: an all-reduce is a reduce-scatter, then an all-gather."""


def ring_steps(operation: str, world_size: int) -> int:
    """Return how many messages each rank sends, one after the other.

    >>> ring_steps("all_reduce", 4)
    6
    """
    return RING_PASSES[operation] * (world_size - 1)


def bus_factor(operation: str, world_size: int) -> float:
    """Return the bytes that each rank's link carries, as a share of the message: 2(n-1)/n or (n-1)/n.

    An all-to-all does not go around: each piece goes straight to its rank, all but the own one.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4)
    (1.5, 0.75)

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if operation == "all_to_all":
        return (world_size - 1) / world_size
    return ring_steps(operation, world_size) / world_size
