"""Makes well-known schedules (GPipe, 1F1B, interleaved 1F1B, zero bubble): for each of p ranks, the
order of its ops on m micro-batches.

F3 is the forward of micro-batch 3, B3 its backward, and F3.1 the forward through the rank's second
chunk. A *chunk* is one of the v stages of a rank. Micro-batches are *in flight* on a rank while it
holds their activations.
"""

from labkit.schedules.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule
from labkit.sizes import check_size, whole_number


def gpipe(pp_size: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards.

    It is simple, but every rank holds the activations of all m micro-batches.

    Bubble (idle / ideal time): (p-1)/m. Peak in flight: m.
    Source: arXiv 1811.06965, section 2.3; the bubble, arXiv 2104.04473, section 2.2.1.

    >>> print(gpipe(2, 3))
    GPipe: 2 ranks, 3 micro-batches
    rank 0 | F0 F1 F2 B0 B1 B2
    rank 1 | F0 F1 F2 B0 B1 B2
    """
    p, m = _sizes(pp_size, num_micro_batches)
    ops = [Op(kind, i) for kind in (FORWARD, BACKWARD) for i in range(m)]
    return Schedule("GPipe", p, m, [ops] * p)


def one_f_one_b(pp_size: int, num_micro_batches: int) -> Schedule:
    """One forward and one backward in turn, after a warm-up of one forward for each later rank.

    Bubble, idle over ideal: (p-1)/m, as GPipe's. Peak in flight on rank r: only min(p - r, m),
    because a micro-batch's backward starts as soon as it can. Source: arXiv 2104.04473, section
    2.2.1 (there "PipeDream-Flush").

    >>> print(one_f_one_b(2, 3))
    1F1B: 2 ranks, 3 micro-batches
    rank 0 | F0 F1 B0 F2 B1 B2
    rank 1 | F0 B0 F1 B1 F2 B2
    """
    p, m = _sizes(pp_size, num_micro_batches)
    forwards, backwards = ([Op(kind, i) for i in range(m)] for kind in (FORWARD, BACKWARD))
    return Schedule(
        "1F1B", p, m, [_in_turn(forwards, backwards, num_warmup=p - rank - 1) for rank in range(p)]
    )


def interleaved(pp_size: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """1F1B with v chunks of the model per rank: a smaller bubble, for v times the messages and more
    memory.

    Rank r has the stages r, p + r, 2p + r, ... Micro-batches go in rounds of p: all of a round pass
    through chunk 0, then through chunk 1, and so on. Where p does not divide m, rounds are a little
    larger; if m < p, all m make one round.

    - Bubble: (p-1)/(v m) for m >= p; in general (v*max(m, p) + min(m, p) - 1)/(v m) - 1.
    - Peak in flight on rank r, in passes through a chunk: min(v m, 2(p-r-1) + (v-1)g + 1) with g,
      the size of the largest round; for g = p, 1F1B's memory on rank 0 times 1 + (p-1)/(p v).

    Source: arXiv 2104.04473, section 2.2.2; the order is that of Megatron-LM where p divides m.
    There v is the virtual pipeline size, and g the ``microbatch_group_size_per_vp_stage``.

    >>> print(interleaved(2, 2, num_chunks=2))
    interleaved 1F1B: 2 ranks, 2 micro-batches, 2 chunks per rank
    rank 0 | F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
    rank 1 | F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1
    """
    p, m = _sizes(pp_size, num_micro_batches)
    v = check_size("num_chunks", num_chunks)
    if v == 1:  # nothing to interleave
        return one_f_one_b(p, m)
    num_rounds = max(1, m // p)
    rounds = [range(m * i // num_rounds, m * (i + 1) // num_rounds) for i in range(num_rounds)]
    forwards = [Op(FORWARD, i, chunk) for members in rounds for chunk in range(v) for i in members]
    backwards = [
        Op(BACKWARD, i, chunk)
        for members in rounds
        for chunk in reversed(range(v))
        for i in members
    ]
    largest_round = max(map(len, rounds))
    # Forwards in earlier chunks, before the first micro-batch enters the last chunk
    before_last_chunk = (v - 1) * largest_round
    ranks = []
    for rank in range(p):
        # 2: the steps from here to the last rank, and those back with the gradient
        num_warmup = before_last_chunk + 2 * (p - rank - 1)
        ranks.append(_in_turn(forwards, backwards, num_warmup))
    return Schedule("interleaved 1F1B", p, m, ranks, v)


def zero_bubble(pp_size: int, num_micro_batches: int, extra_in_flight: int = 0) -> Schedule:
    """1F1B with the backward split in two. Rank r - 1 waits only for the gradient of the input, so
    weight gradients wait until rank r would otherwise be idle.

    Let t_f, t_b and t_w be the times of F, B (the gradient of the input) and W (of the weights),
    t_w no larger than the others, and e = ``extra_in_flight``. The rank that idles longest does so,
    between its first op and its last, for

        (p-1)(t_f + t_b) - (min(m, p+e) - 1) t_w

    or 0 if that is negative; with 1F1B it would be (p-1)(t_f + t_b + t_w). Peak in flight:
    min(m, p+e). ZB-H1 is e = 0, with the memory of 1F1B's rank 0 on every rank; ZB-H2 is e = p-1,
    for almost twice the memory.

    No schedule saves the (p-1) t_f that the last rank waits for its first input; with t_f = t_b =
    t_w, ZB-H1 has no other idle time in a step. ZB-H2 then saves time only if a rank can go on to
    the next step without the others.
    Source: arXiv 2401.10241, section 2; the case m < p is ours.

    >>> print(zero_bubble(2, 3))
    zero bubble (ZB-H1): 2 ranks, 3 micro-batches
    rank 0 | F0 F1 B0 W0 F2 B1 W1 B2 W2
    rank 1 | F0 B0 F1 B1 W0 F2 B2 W1 W2
    """
    p, m = _sizes(pp_size, num_micro_batches)
    if whole_number(extra_in_flight) not in range(p):
        raise ValueError(
            f"extra_in_flight={extra_in_flight!r} with pp_size={p}: use 0 (ZB-H1) to {p - 1} "
            "(ZB-H2)"
        )
    # In this order: with one rank e is 0 in both, and that is ZB-H1.
    names = {p - 1: "zero bubble (ZB-H2)", 0: "zero bubble (ZB-H1)"}
    name = names.get(extra_in_flight, f"zero bubble, {extra_in_flight} more in flight")
    ranks = [_zero_bubble_ops(p - rank, m, p, extra_in_flight) for rank in range(p)]
    return Schedule(name, p, m, ranks, kinds=(FORWARD, BACKWARD, WEIGHT_GRADIENT))


def _sizes(pp_size: int, num_micro_batches: int) -> tuple[int, int]:
    return check_size("pp_size", pp_size), check_size("num_micro_batches", num_micro_batches)


def _in_turn(forwards: list[Op], backwards: list[Op], num_warmup: int) -> list[Op]:
    """Return ``num_warmup`` forwards; then a forward and a backward in turn; then the backwards
    that are left.
    """
    ops = forwards[:num_warmup]
    later_forwards = iter(forwards[num_warmup:])
    for backward in backwards:
        forward = next(later_forwards, None)
        if forward is not None:
            ops.append(forward)
        ops.append(backward)
    return ops


def _zero_bubble_ops(ranks_left: int, m: int, p: int, extra: int) -> list[Op]:
    """Return the ops of the rank with ``ranks_left`` ranks from it to the pipeline's end, itself
    included.
    """
    # At most 2 * ranks_left - 1 forwards fit in before the first gradient comes back.
    forwards_done = min(m, ranks_left + min(extra, ranks_left - 1))
    weight_grads_done = 0
    ops = [Op(FORWARD, i) for i in range(forwards_done)]
    for i in range(m):
        ops.append(Op(BACKWARD, i))
        no_forward_is_left = forwards_done == m
        memory_is_full = forwards_done - weight_grads_done == p + extra
        if no_forward_is_left or memory_is_full:
            ops.append(Op(WEIGHT_GRADIENT, weight_grads_done))
            weight_grads_done += 1
        if not no_forward_is_left:
            ops.append(Op(FORWARD, forwards_done))
            forwards_done += 1
    return ops + [Op(WEIGHT_GRADIENT, i) for i in range(weight_grads_done, m)]
