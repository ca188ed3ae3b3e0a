"""Timelines: overlap and idle time counted, activations in flight, and what Perfetto reads."""

import json

import pytest

from course.sizing import simulate
from course.timeline import Timeline, measured
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from labkit.timeline.spans import Span


@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 8), (3, 2), (8, 16)])
def test_in_flight_over_time_peaks_where_the_schedule_says(p, m):
    for schedule in (gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, 3), zero_bubble(p, m), zero_bubble(p, m, p - 1)):
        timeline = simulate(schedule)
        for rank in range(p):
            steps = timeline.in_flight(rank)
            assert max(count for _, count in steps) == schedule.peak_in_flight(rank)
            assert [seconds for seconds, _ in steps] == sorted({seconds for seconds, _ in steps})
            assert steps[-1][1] == 0


def test_in_flight_step_by_step():
    assert simulate(gpipe(1, 2)).in_flight(0) == [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert simulate(one_f_one_b(1, 2)).in_flight(0) == [(0, 1), (3, 1), (6, 0)]
    assert simulate(gpipe(2, 2).forward_only()).in_flight(1) == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_no_time_is_not_idle_and_only_waiting_is_all_idle():
    no_time = simulate(gpipe(2, 2), 0, 0)
    assert (no_time.makespan_seconds, no_time.bubble_share, no_time.bubble_over_ideal) == (0, 0, 0)
    assert str(no_time).splitlines()[1].split() == ["0", "0.00", "0.00", "0.00", "100%"]
    only_messages = simulate(gpipe(2, 2), 0, 0, message_seconds=1)
    assert (only_messages.makespan_seconds, only_messages.bubble_share) == (2, 1)
    assert only_messages.bubble_over_ideal == float("inf")
    nobody = Timeline([], "measured")
    assert (nobody.makespan_seconds, nobody.bubble_share, nobody.bubble_over_ideal) == (0, 0, 0)


def overlapped():
    """Rank 0 computes 0 to 4 and 5 to 6, stands still 1 to 2 of that; two messages, which overlap 3 to 4."""
    return Timeline(
        [
            Span(0, "forward", "F0", 0, 4), Span(0, "wait", "recv", 1, 2), Span(0, "wait", "recv", 4, 4.5),
            Span(0, "backward", "B0", 5, 6), Span(0, "communication", "all_reduce", 2, 4),
            Span(0, "communication", "all_reduce", 3, 5.5), Span(2, "optimizer", "step", 0, 8),
        ],
        "measured",
    )  # fmt: skip


def test_lanes_are_summed_without_counting_twice():
    timeline = overlapped()
    assert timeline.ranks == [0, 2]
    assert timeline.makespan_seconds == 8
    assert timeline.computing_seconds(0) == 4
    assert timeline.waiting_seconds(0) == 1.5
    assert timeline.communicating_seconds(0) == 3.5
    assert (timeline.utilisation(0), timeline.utilisation(2)) == (0.5, 1)
    assert timeline.bubble_share == 0.25
    assert timeline.bubble_over_ideal == pytest.approx(1 / 3)
    assert [span.label for span in timeline.of(0, "forward", "backward")] == ["F0", "B0"]
    row = str(timeline).splitlines()[1].split()
    assert row == ["0", "4000.00", "1500.00", "3500.00", "50%"]


def test_a_measured_timeline_starts_at_zero():
    timeline = measured([[Span(1, "forward", "F0", 7, 9)], [Span(0, "forward", "F0", 5, 6)]])
    assert [(span.rank, span.start, span.end) for span in timeline.spans] == [(0, 0, 1), (1, 2, 4)]
    assert timeline.makespan_seconds == 4


def test_chrome_trace_holds_every_span_in_microseconds(tmp_path):
    timeline = overlapped()
    written = json.loads(timeline.save_chrome_trace(tmp_path / "trace.json").read_text())
    events = written["traceEvents"]
    assert written["otherData"] == {"source": "measured"}
    names = [(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (2, "rank 2")]
    slices = sorted((e["pid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X")
    assert slices == sorted(
        (s.rank, s.label, s.kind, s.start * 1e6, s.seconds * 1e6) for s in timeline.spans if s.kind != "communication"
    )
    begins, ends = ({e["id"]: e["ts"] for e in events if e["ph"] == phase} for phase in "be")
    assert begins.keys() == ends.keys()
    assert sorted((begins[key], ends[key]) for key in begins) == [(2e6, 4e6), (3e6, 5.5e6)]
    assert all(e["name"] == "all_reduce" and e["cat"] == "communication" for e in events if e["ph"] in "be")
