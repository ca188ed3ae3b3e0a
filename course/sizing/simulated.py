"""Simulates a schedule: when each op would run, from how long ops and messages take. Reads ops that are typed."""

import re
from collections.abc import Iterable, Sequence

from course.timeline import Timeline
from labkit.schedules import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule, check
from labkit.schedules.schedule import LETTER
from labkit.timeline.spans import COMMUNICATION, Span


def read_ops(text: str) -> list[Op]:
    """Read ops as they are printed, separated by spaces, for a schedule of your own; a ValueError names a bad one.

    >>> [op == Op("forward", 3) for op in read_ops("F3 B0.1")]
    [True, False]
    """
    kinds = {letter: kind for kind, letter in LETTER.items()}
    ops = []
    for word in str(text).split():
        parts = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word)
        if not parts:
            advice = "write F, B or W, the micro-batch, and .chunk above chunk 0, as in F3.1"
            raise ValueError(f"{word!r} is not an op: {advice}")
        ops.append(Op(kinds[parts[1]], int(parts[2]), int(parts[3] or 0)))
    return ops


def simulate(
    schedule: Schedule,
    forward_seconds: float | Sequence[float] = 1.0,
    backward_seconds: float | Sequence[float] = 2.0,
    *,
    message_seconds: float = 0.0,
    weight_gradient_share: float = 0.5,
) -> Timeline:
    """Start each op, in its rank's order, as soon as the rank is free and what the op needs has arrived.

    ``forward_seconds`` and ``backward_seconds`` are the time that any rank takes for one micro-batch; with v chunks per
    rank, each chunk takes 1/v of it. Or they are lists, with one time for each of the p*v stages.
    ``backward_seconds`` is the whole backward; where the schedule splits it, ``weight_gradient_share`` of it is for the
    weights. A message to a different rank arrives ``message_seconds`` after the op that made it; its sender goes on.

    Raises:
        ValueError: an invalid time, a list of the wrong length, or what `labkit.schedules.check` finds wrong.

    >>> from labkit.schedules import one_f_one_b
    >>> timeline = simulate(one_f_one_b(4, 8))
    >>> timeline.makespan_seconds, round(timeline.bubble_over_ideal, 3), round(timeline.bubble_share, 4)
    (33.0, 0.375, 0.2727)
    """
    check(schedule, allow_deadlock=True)  # the ops alone; `in_order` below raises if ranks wait for each other
    if not 0 <= weight_gradient_share <= 1:
        raise ValueError(f"weight_gradient_share={weight_gradient_share} must be in [0, 1]")
    forwards = _per_stage(schedule, "forward_seconds", forward_seconds)
    backwards = _per_stage(schedule, "backward_seconds", backward_seconds)
    _check_time("message_seconds", message_seconds)
    share = weight_gradient_share if WEIGHT_GRADIENT in schedule.kinds else 0.0
    weights = [share * whole for whole in backwards]
    inputs = [whole - part for whole, part in zip(backwards, weights)]
    seconds = {FORWARD: forwards, BACKWARD: inputs, WEIGHT_GRADIENT: weights}
    ended: dict[tuple[int, Op], float] = {}
    free_at, spans = [0.0] * schedule.pp_size, []
    for rank, op, needs in schedule.in_order():
        start = free_at[rank]
        for sender, needed in needs:
            arrived = ended[sender, needed]
            if sender != rank and message_seconds:
                sent, arrived = arrived, arrived + message_seconds
                spans.append(Span(sender, COMMUNICATION, f"send {needed}", sent, arrived, needed))
            start = max(start, arrived)
        free_at[rank] = ended[rank, op] = start + seconds[op.kind][schedule.stage_of(rank, op.chunk)]
        spans.append(Span(rank, op.kind, str(op), start, free_at[rank], op))
    return Timeline(spans, "simulated")


def _per_stage(schedule: Schedule, name: str, value: float | Sequence[float]) -> list[float]:
    count = schedule.num_stages
    if not isinstance(value, Iterable):
        _check_time(name, value)
        return [float(value) / schedule.num_chunks] * count
    times = list(value)
    if len(times) != count:
        fault = f"{name} has {len(times)} times for {count} stages"
        raise ValueError(f"{fault}: give one for each, or one number for all")
    for index, seconds in enumerate(times):
        _check_time(f"{name}[{index}]", seconds)
    return times


def _check_time(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):  # also false for nan
        raise ValueError(f"{name}={value} must be finite and at least 0")
