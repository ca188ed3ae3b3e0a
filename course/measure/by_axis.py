"""Sorts what all ranks have sent by the axis that each message's group runs along."""

from collections.abc import Iterable

from course.communication import CommunicationLog
from course.sizing.ring import RING_PASSES, bus_factor
from labkit.layout import AXES, ParallelLayout


def sent_by_axis(logs: Iterable[CommunicationLog], layout: ParallelLayout) -> dict[tuple[str, str], float]:
    """Return the bytes that all ranks together sent, by axis and operation; ``logs`` has one log per rank.

    A collective counts what a rank sends in a ring: 2(n-1)/n of an all-reduce's message, (n-1)/n of an all-gather's.
    A message from one rank to another counts where it is sent; any other operation counts its message once. Groups
    along dp and cp, where gradients are averaged, count as "dp"; others along several axes are called "model".

    >>> from course.communication import Communication
    >>> log = CommunicationLog([Communication("all_reduce", (0, 1), 1000), Communication("recv", (0, 4), 100)])
    >>> sent_by_axis([log], ParallelLayout(8, tp_size=2))
    {('tp', 'all_reduce'): 1000.0}
    """
    axis_of = {tuple(group): "dp" for group in layout.groups("dp", "cp")}
    axis_of |= {tuple(group): axis for axis in reversed(AXES) for group in layout.groups(axis)}
    sums: dict[tuple[str, str], float] = {}
    for record in (record for log in logs for record in log.records):
        if record.operation not in ("recv", "barrier"):
            goes_around = record.operation in (*RING_PASSES, "all_to_all")
            factor = bus_factor(record.operation, len(record.group)) if goes_around else 1
            name = axis_of.get(record.group, "model"), record.operation
            sums[name] = sums.get(name, 0.0) + factor * record.message_bytes
    return dict(sorted(sums.items()))
