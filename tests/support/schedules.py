"""Schedules of one's own for tests, read independently of how an Op writes and reads itself."""

import re

from labkit.schedules import Op, Schedule, v_shape

KINDS = {"F": "forward", "B": "backward", "W": "weight_gradient"}


def ops(line):
    """Ops from their short names, as in "F0 F1 B0.1"."""
    parts = [re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word).groups() for word in line.split()]
    return tuple(Op(KINDS[kind], int(i), int(chunk or 0)) for kind, i, chunk in parts)


def schedule_of(*lines, m=2, **sizes):
    """A schedule from one line of ops per rank."""
    return Schedule("own", len(lines), m, [ops(line) for line in lines], **sizes)


def folded(p, m):
    """GPipe's order, and one micro-batch after the other."""
    passes = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    together = [Op(KINDS[kind], i, chunk) for kind, chunk in passes for i in range(m)]
    apart = [Op(KINDS[kind], i, chunk) for i in range(m) for kind, chunk in passes]
    return [Schedule("folded", p, m, [order] * p, num_chunks=2, stages=v_shape(p)) for order in (together, apart)]
