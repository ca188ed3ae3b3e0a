"""Simulations: the published makespans and bubbles of every small schedule, and times or schedules that are refused."""

from itertools import product

import pytest

from course.sizing import simulate
from labkit.schedules import gpipe, interleaved, one_f_one_b, zero_bubble

SIZES = list(product((1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 6, 8, 9, 16)))  # p, m


@pytest.mark.parametrize(
    ("p", "m", "makespan", "over_ideal", "share"),
    [(4, 8, 33, 0.375, 3 / 11), (4, 4, 21, 3 / 4, 3 / 7), (2, 4, 15, 1 / 4, 1 / 5)],
)
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_known_examples(make, p, m, makespan, over_ideal, share):
    timeline = simulate(make(p, m), forward_seconds=1, backward_seconds=2)
    assert timeline.makespan_seconds == makespan
    assert timeline.bubble_over_ideal == pytest.approx(over_ideal)
    assert timeline.bubble_share == pytest.approx(share)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_makespan_of_gpipe_1f1b_and_interleaved(p, m):
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        assert simulate(schedule).makespan_seconds == (m + p - 1) * 3
    for v in range(1, 5):
        timeline = simulate(interleaved(p, m, v), forward_seconds=v, backward_seconds=2 * v)  # a chunk takes 1 and 2
        assert timeline.makespan_seconds == (v * max(m, p) + min(m, p) - 1) * 3
        if m >= p:
            assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m))


TIMES = [(1, 2, 0.5), (1, 1.5, 0.25), (2, 2, 0.5), (1, 1, 0.25)]  # t_f, whole backward, share of it for the weights


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "backward", "share"), TIMES)
def test_zero_bubbles_idle_time(p, m, forward, backward, share):
    weights = share * backward
    for extra in range(p):
        timeline = simulate(zero_bubble(p, m, extra), forward, backward, weight_gradient_share=share)
        idle_between = max(busy_from_first_to_last(timeline, rank) for rank in range(p)) - m * (forward + backward)
        idle = timeline.makespan_seconds - m * (forward + backward)
        hidden = (min(m, p + extra) - 1) * weights
        assert idle_between == max(0, (p - 1) * (forward + backward - weights) - hidden)
        assert idle == max((p - 1) * forward, idle_between)


def busy_from_first_to_last(timeline, rank):
    spans = list(timeline.of(rank))
    return spans[-1].end - spans[0].start


def test_zb_h2_leaves_no_rank_idle_between_its_first_op_and_its_last():
    timeline = simulate(zero_bubble(4, 8, extra_in_flight=3))
    assert [busy_from_first_to_last(timeline, rank) for rank in range(4)] == [24] * 4
    assert [next(timeline.of(rank)).start for rank in range(4)] == [0, 1, 2, 3]
    assert timeline.makespan_seconds == simulate(zero_bubble(4, 8)).makespan_seconds == 27


def test_every_op_starts_as_early_as_it_can():
    schedule = interleaved(3, 7, 2)
    timeline = simulate(schedule, 0.7, 1.9, message_seconds=0.2)
    ends = {(span.rank, span.label): span.end for span in timeline.spans if span.kind != "communication"}
    for rank, ops in enumerate(schedule.ranks):
        free_at = 0.0
        for op, span in zip(ops, timeline.of(rank, "forward", "backward")):
            assert span.label == str(op)
            arrived = [ends[who, str(need)] + (0.2 if who != rank else 0) for who, need in schedule.needs(rank, op)]
            assert span.start == max([free_at, *arrived])
            free_at = span.end


def test_stages_of_different_speed():
    timeline = simulate(gpipe(2, 2), forward_seconds=[1, 3], backward_seconds=[2, 6])
    assert [(s.label, s.start, s.end) for s in timeline.of(1)] == [
        ("F0", 1, 4), ("F1", 4, 7), ("B0", 7, 13), ("B1", 13, 19),
    ]  # fmt: skip
    assert timeline.makespan_seconds == 21
    chunks = simulate(interleaved(1, 1, 2), forward_seconds=[1, 3], backward_seconds=[2, 6])
    assert [(s.label, s.seconds) for s in chunks.of(0)] == [("F0", 1), ("F0.1", 3), ("B0.1", 6), ("B0", 2)]


def test_a_message_delays_its_receiver_and_not_its_sender():
    timeline = simulate(gpipe(2, 2), message_seconds=0.5)
    assert [(s.label, s.start, s.end) for s in timeline.of(0, "communication")] == [
        ("send F0", 1, 1.5),
        ("send F1", 2, 2.5),
    ]
    assert [s.start for s in timeline.of(0, "forward")] == [0, 1]
    assert [s.start for s in timeline.of(1, "forward")] == [1.5, 2.5]
    assert timeline.makespan_seconds == (2 + 2 - 1) * 3 + 2 * 0.5
    alone = simulate(interleaved(1, 3, 2), message_seconds=0.5)  # between chunks of one rank nothing travels
    assert not [span for span in alone.spans if span.kind == "communication"]
    assert alone.makespan_seconds == 3 * 3


def test_messages_cost_the_interleaved_schedule_more():
    def added(schedule):
        return simulate(schedule, message_seconds=0.1).makespan_seconds - simulate(schedule).makespan_seconds

    assert added(interleaved(4, 8, 2)) > 1.5 * added(gpipe(4, 8)) > 0
