"""Places the stages of a pipeline on its ranks: in turn, or along a V."""

from collections import Counter
from collections.abc import Sequence

Stages = tuple[tuple[int, ...], ...]
"""The stages of each rank, chunk by chunk."""


def in_turn(pp_size: int, num_chunks: int = 1) -> Stages:
    """Return the usual placement: stage s on rank s mod p.

    >>> in_turn(3, num_chunks=2)
    ((0, 3), (1, 4), (2, 5))
    """
    return tuple(tuple(range(rank, pp_size * num_chunks, pp_size)) for rank in range(pp_size))


def v_shape(pp_size: int) -> Stages:
    """Return the placement in a V: down the ranks and up again, so that stage s of 2p is on rank min(s, 2p - 1 - s).

    The two middle stages are neighbours on one rank, and the first and the last, with embedding and loss, on rank 0.

    >>> v_shape(3)
    ((0, 5), (1, 4), (2, 3))
    """
    return tuple((rank, 2 * pp_size - 1 - rank) for rank in range(pp_size))


def check_stages(stages: Sequence[Sequence[int]], pp_size: int, num_chunks: int) -> None:
    """Raise a ValueError unless each of p ranks has v stages, and each stage lives on one rank."""
    rule = f"give each of {pp_size} ranks {num_chunks} of the stages 0 to {pp_size * num_chunks - 1}, each once"
    for stage, count in Counter(stage for mine in stages for stage in mine).items():
        if count > 1 or stage not in range(pp_size * num_chunks):
            fault = "lives twice" if count > 1 else "does not exist"
            raise ValueError(f"stage {stage} of stages={stages} {fault}: {rule}")
    sizes = [len(mine) for mine in stages]
    if sizes != [num_chunks] * pp_size:
        raise ValueError(f"stages={stages} has {sizes} stages on its ranks: {rule}")
