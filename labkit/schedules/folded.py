"""Makes the schedules of a V, with the backward split: ZB-V, V-Half, V-Min and DualPipeV.

Stage s of 2p is on rank min(s, 2p - 1 - s) (`v_shape`). So a rank that has an early stage, whose
activations wait long, also has a late one, whose activations are soon free: every rank holds about
as much. Units are passes through a chunk.
"""

from collections import deque
from collections.abc import Callable
from itertools import count

from labkit.schedules.greedy import fastest
from labkit.schedules.schedule import BACKWARD, FORWARD, KINDS, WEIGHT_GRADIENT, Op, Schedule
from labkit.schedules.stages import v_shape
from labkit.sizes import check_size


def zero_bubble_v(pp_size: int, num_micro_batches: int) -> Schedule:
    """ZB-V: with 1F1B's memory, at most min(2m, 2p) chunks on a rank, almost no idle time.

    If all passes take the same time and m >= 2p, it takes 6m + p - 1 units: the last rank gets its
    first input after p - 1, and then no rank waits. 1F1B takes 6(m + p - 1). torch's
    ``ScheduleZBVZeroBubble`` takes as long from m = 2p on, and p - 1 more for m = p. Source: arXiv
    2401.10241, section 6.
    """
    return _filled("zero bubble V (ZB-V)", pp_size, num_micro_batches, lambda p: 2 * p)


def v_half(pp_size: int, num_micro_batches: int) -> Schedule:
    """V-Half: p + 2 chunks on a rank (p + 1 for an odd p); for many ranks, half of 1F1B's memory
    and of its idle time.

    Half of 1F1B's is p chunks and 3(p - 1) units. With p = 4 it holds 6 chunks instead, and is idle
    for 5 units, not 9; with p = 16 it holds 18, not 16, and is idle for 41 units, not 45 (m = 2p).
    Source: arXiv 2405.15362, section 4.
    """
    return _filled("V-Half", pp_size, num_micro_batches, lambda p: p + 2 - p % 2)


def v_min(pp_size: int, num_micro_batches: int) -> Schedule:
    """V-Min: 2 floor((p + 4) / 3) chunks on a rank, about a third of 1F1B's memory, for two thirds
    of its idle time.

    Two thirds are 4(p - 1) units: with p = 4, 12. Here it is idle for 11, and with p = 16 for 59 of
    60. If F, B and W take different times, its idle time grows with m. Source: arXiv 2405.15362,
    section 4.
    """
    return _filled("V-Min", pp_size, num_micro_batches, lambda p: 2 * ((p + 4) // 3))


def dualpipe_v(pp_size: int, num_micro_batches: int) -> Schedule:
    """DualPipeV: in its middle, a forward of one chunk stands beside a backward of the other, to
    run overlapped.

    A rank holds at most 2p + 1 chunks. Here the two run one after the other: a rank of ours
    computes one op at a time. So it takes as long as `zero_bubble_v`, 6m + p - 1 units, and holds
    one chunk more.
    Source: ``dualpipev.py`` in DeepSeek's repository DualPipe.

    Raises:
        ValueError: m < 2p, for which it has no order.
    """
    p = check_size("pp_size", pp_size)
    m = check_size("num_micro_batches", num_micro_batches)
    if m < 2 * p:
        raise ValueError(
            f"num_micro_batches={m} is below 2 * pp_size={2 * p}: use {2 * p} or more, or "
            "zero_bubble_v"
        )
    ranks = [_dualpipe_v_ops(rank, p, m) for rank in range(p)]
    return Schedule("DualPipeV", p, m, ranks, 2, KINDS, v_shape(p))


def _filled(
    name: str, pp_size: int, num_micro_batches: int, limit_of: Callable[[int], int]
) -> Schedule:
    p = check_size("pp_size", pp_size)
    m = check_size("num_micro_batches", num_micro_batches)
    _, ranks = fastest(p, m, limit_of(p))
    return Schedule(name, p, m, ranks, 2, KINDS, v_shape(p))


def _dualpipe_v_ops(rank: int, p: int, m: int) -> list[Op]:
    """Return a rank's ops.

    The order is first written in letters, of which each stands for the next micro-batch's pass, a
    small one for chunk 1's: F is a forward, B a backward with its weight gradient, I a backward
    without, W the oldest weight gradient left.
    """
    later = p - 1 - rank  # ranks after this one
    warm_up = "F" * 2 * later + "Ff" * (rank + 1) + "bf" * later
    steady = "FbfB" * (m - 2 * p + rank + 1) + "bfB" * later  # a forward beside each backward
    last = "bB" * (rank + 1)
    last_with_weights = last[: rank + 1]
    last_without = last[rank + 1 :].replace("b", "i").replace("B", "I")
    cool_down = last_without + "WI" * later + "W" * (rank + 1)  # weight gradients fill the holes
    letters = warm_up + steady + last_with_weights + cool_down

    next_micro_batch = {letter: count() for letter in "FfIi"}
    weights: deque[Op] = deque()  # gradients that can be computed
    ops: list[Op] = []
    # X: the W of the backward just before
    for letter in letters.replace("B", "IX").replace("b", "iX"):
        if letter == "W":
            ops.append(weights.popleft())
        elif letter == "X":
            ops.append(weights.pop())
        else:
            kind = FORWARD if letter in "Ff" else BACKWARD
            op = Op(kind, next(next_micro_batch[letter]), int(letter.islower()))
            ops.append(op)
            if kind == BACKWARD:
                weights.append(op._replace(kind=WEIGHT_GRADIENT))
    return ops
