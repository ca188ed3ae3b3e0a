"""A trace measures what happens on a rank."""

import time

import pytest

from labkit.timeline.trace import Trace


def test_a_trace_measures_what_happens():
    trace = Trace(rank=3)
    with trace.span("forward", "F0"):
        time.sleep(0.02)
    start = trace.now()
    with pytest.raises(KeyError), trace.span("backward", "B0"):
        raise KeyError
    trace.add("communication", "send F0", start, trace.now())
    forward, backward, send = trace.spans()
    assert (forward.rank, forward.kind, forward.label) == (3, "forward", "F0")
    assert 0.02 <= forward.seconds < 0.5
    assert forward.end <= start <= backward.start <= backward.end <= send.end  # noted although it failed
