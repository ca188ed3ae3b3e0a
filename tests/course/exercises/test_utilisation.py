"""The exercises of notebook 12: solutions agree with the lab, and plans win the challenge by running."""

from dataclasses import replace

import pytest

from course.exercises import utilisation as exercises
from course.exercises.utilisation import GIVEN, beat, utilisation
from course.measure.utilisation import Pace, TimedStep, predict_step
from course.timeline import Timeline
from labkit.timeline.spans import Span


def one_cut(spans, start, end):
    return sum(max(0, min(finish, end) - begin) for kind, begin, finish in spans if kind != "wait") / (end - start)


def no_cut(spans, start, end):
    return sum(finish - begin for kind, begin, finish in spans if kind != "wait") / (end - start)


@pytest.mark.parametrize(("function", "advice"), [(one_cut, "not at its start"), (no_cut, "wherever they lie")])
def test_spans_that_are_not_cut_at_both_ends_are_recognised(function, advice):
    assert advice in " ".join(utilisation.verdict(function).text.split())


def test_utilisation_is_that_of_a_timeline():
    spans = [("forward", 0.0, 2.0), ("wait", 2.0, 5.0), ("backward", 5.0, 9.0)]
    timeline = Timeline((Span(0, kind, kind, begin, end) for kind, begin, end in spans), "measured")
    assert exercises.my_utilisation(spans, 0, 9) == pytest.approx(timeline.utilisation(0))


def slowed(seconds_of):
    """Steps that take so many seconds by their plan."""

    def measure(plan, **_):
        spans = [Span(rank, "forward", "F0", 0, seconds_of(plan)) for rank in range(plan.world_size)]
        return TimedStep(plan, predict_step(plan).schedule, Timeline(spans, "measured"))

    return measure


def test_the_challenge_is_won_by_running_it(monkeypatch):
    asked = []
    monkeypatch.setattr(
        exercises, "measure_step", slowed(lambda plan: asked.append(plan) or (1.5 if plan == GIVEN else 0.5))
    )
    assert beat.verdict(exercises.my_plan).status == "passed"
    assert list(dict.fromkeys(asked)) == [exercises.my_plan(), GIVEN]


def test_a_plan_that_is_slow_on_the_ranks_does_not_win(monkeypatch):
    monkeypatch.setattr(exercises, "measure_step", slowed(lambda plan: 1.5 if plan == GIVEN else 1.2))
    verdict = beat.verdict(exercises.my_plan)
    assert verdict.status == "wrong"
    assert "1.25 times as fast" in verdict.text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(pp_size=1, micro_batch_size=1, zero_stage=3), "zero_stage=3"),  # one stage: no bubble to make smaller
        (dict(pp_size=4, zero_stage=2, recompute="none", micro_batch_size=8), "zero_stage=2"),  # would not fit, either
        (dict(micro_batch_size=2), "Idle / ideal is 0.88, given 1.75"),  # without recomputation it would not fit
    ],
)
def test_no_advice_follows_from_what_a_plan_was_not_refused_for(changes, fault):
    text = " ".join(beat.verdict(lambda: replace(GIVEN, **changes)).text.split())
    assert fault in text
    assert "What this usually is" not in text


def test_real_ranks_run_the_challenge(monkeypatch):
    """How fast they are depends on what else runs here: a factor is not tested, so layers may be quicker."""
    monkeypatch.setattr(exercises, "PACE", Pace(0.0005))
    verdict = beat.verdict(exercises.my_plan)
    assert verdict.status in ("passed", "wrong")
    assert "ms a step" in verdict.text


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1, "num_chunks": 2},
        {"micro_batch_size": 1, "num_chunks": 4},
        {"micro_batch_size": 1, "pp_size": 4, "zero_stage": 1, "num_chunks": 4},
        {"micro_batch_size": 1, "pp_size": 1, "zero_stage": 1},
    ],
)
def test_there_are_several_ways_to_win(monkeypatch, changes):
    monkeypatch.setattr(exercises, "measure_step", slowed(lambda plan: predict_step(plan).seconds))
    assert beat.verdict(lambda: replace(GIVEN, **changes)).status == "passed"


@pytest.mark.parametrize(("returned", "says"), [(5, "return a Plan"), (replace(GIVEN, zero_stage=3), "use 0 or 1")])
def test_something_else_is_wrong_and_no_error(returned, says):
    verdict = beat.verdict(lambda: returned)
    assert verdict.status == "wrong"
    assert says in " ".join(verdict.text.split())
