"""Places the stages of a pipeline on its ranks: in turn, or along a V."""

from collections.abc import Iterable

from labkit.sizes import check_size, whole_number

Stages = tuple[tuple[int, ...], ...]
"""The stages of each rank, chunk by chunk."""


def round_robin(pp_size: int, num_chunks: int = 1) -> Stages:
    """Return the usual placement: stage s on rank s mod p.

    >>> round_robin(3, num_chunks=2)
    ((0, 3), (1, 4), (2, 5))
    """
    p = check_size("pp_size", pp_size)
    v = check_size("num_chunks", num_chunks)
    return tuple(tuple(range(rank, p * v, p)) for rank in range(p))


def v_shape(pp_size: int) -> Stages:
    """Return the placement in a V: down the ranks and up again, so that stage s of 2p is on rank
    min(s, 2p - 1 - s).

    The two middle stages are neighbours on one rank, and the first and the last, with embedding and
    loss, on rank 0.

    >>> v_shape(3)
    ((0, 5), (1, 4), (2, 3))
    """
    return tuple((rank, 2 * pp_size - 1 - rank) for rank in range(check_size("pp_size", pp_size)))


def check_stages(stages: Iterable, pp_size: int, num_chunks: int) -> Stages:
    """Return them as tuples, or raise a ValueError unless each of p ranks has v stages, and each
    lives on one rank.
    """
    of_ranks = tuple(tuple(chunks) if isinstance(chunks, Iterable) else () for chunks in stages)
    rule = (
        f"give each of {pp_size} ranks {num_chunks} of the stages 0 to "
        f"{pp_size * num_chunks - 1}, each once"
    )
    flat = sum(of_ranks, ())
    for stage in flat:
        if flat.count(stage) > 1 or whole_number(stage) not in range(pp_size * num_chunks):
            fault = "lives twice" if flat.count(stage) > 1 else "does not exist"
            raise ValueError(f"stage {stage!r} of stages={stages} {fault}: {rule}")
    if (sizes := [len(chunks) for chunks in of_ranks]) != [num_chunks] * pp_size:
        raise ValueError(f"stages={stages} has {sizes} stages on its ranks: {rule}")
    return of_ranks
