"""Schedules of one's own for tests, read independently of how an Op writes and reads itself."""

import re

from labkit.schedules import Op, Schedule

KINDS = {"F": "forward", "B": "backward", "W": "weight_gradient"}


def ops(line):
    """Ops from their short names, as in "F0 F1 B0.1"."""
    parts = [re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word).groups() for word in line.split()]
    return tuple(Op(KINDS[kind], int(i), int(chunk or 0)) for kind, i, chunk in parts)


def own(*lines, m=2, **sizes):
    """A schedule from one line of ops per rank."""
    return Schedule("own", len(lines), m, [ops(line) for line in lines], **sizes)
