"""Spans: impossible ones are refused, and lanes are added up without counting twice."""

import pytest

from labkit.timeline.spans import COMMUNICATION, WAIT, Span, computing_seconds, covered_seconds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, "foward", "F0", 0, 1), "kind='foward' is unknown: use forward, "), ((0, "wait", "recv", 2, 1), "ends at 1")],
)
def test_impossible_spans_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        Span(*arguments)


def test_lanes_are_added_up_without_counting_twice():
    """A rank computes 0 to 4 and 5 to 6, stands still 1 to 2 of that; two messages overlap 3 to 4."""
    spans = [
        Span(0, "backward", "B0", 5, 6), Span(0, WAIT, "recv", 1, 2), Span(0, WAIT, "recv", 4, 4.5),
        Span(0, "forward", "F0", 0, 4), Span(0, COMMUNICATION, "all_reduce", 3, 5.5),
        Span(0, COMMUNICATION, "all_reduce", 2, 4),
    ]  # fmt: skip
    assert computing_seconds(iter(spans)) == 4
    assert (covered_seconds(spans, WAIT), covered_seconds(spans, COMMUNICATION)) == (1.5, 3.5)
    assert computing_seconds([]) == 0
