"""Pictures of steps: bars are each rank's shares, and timelines have one scale."""

from dataclasses import replace

import pytest

from course.measure.utilisation import TimedStep, predict_step
from course.pictures.style import IDLE
from course.pictures.timeline import LEFT
from course.pictures.utilisation import BARS, RIGHT, draw_steps
from course.sizing import Plan
from course.timeline import Timeline
from labkit.schedules import Op, one_f_one_b
from labkit.shape import GPT
from labkit.timeline.spans import Span

PLAN = Plan(GPT(16, 8192, 2048, 51200, 64), 8, 16, pp_size=8, recompute="selective")


@pytest.fixture
def run():
    """Rank 1 waits from 0 to 4 for what is sent from 3 on, and rank 0 ends first."""
    op = Op("forward", 0)
    spans = [
        (0, "forward", "F0", 0, 3, op), (1, "wait", "for F0", 0, 4, op), (1, "forward", "F0", 4, 5, op),
        (0, "communication", "send F0", 3, 4, op),
    ]  # fmt: skip
    plan = replace(PLAN, world_size=2, pp_size=2, micro_batch_size=16)
    return TimedStep(plan, one_f_one_b(2, 1), Timeline([Span(*span) for span in spans], "paced: 3 ms a layer"))


def test_bars_are_the_shares_of_each_rank():
    step = predict_step(PLAN)
    scene = draw_steps([step], ["predicted"])
    for rank, shares in enumerate(step.shares):
        bars = [scene.by_key[f"share{rank}.{part}"] for part in range(3)]
        assert [bar.width / BARS for bar in bars] == pytest.approx(list(shares))
        assert [bar.fact.split()[2] for bar in bars] == [f"{share:.0%}" for share in shares]
        assert scene.by_key[f"share{rank}.word"].text == f"{shares.computing:.0%}"
        assert scene.table.rows[rank] == ("predicted", str(rank), *(f"{share:.0%}" for share in shares))


def test_steps_have_one_scale_and_say_where_they_are_from(run):
    predicted = predict_step(PLAN)
    scene = draw_steps([predicted, run], ["predicted", "run"])
    pixels = (RIGHT - LEFT) / run.seconds  # the longer one ends at the right
    assert scene.by_key["1.idle0"].width == pytest.approx(run.seconds * pixels)
    assert scene.by_key["idle0"].width == pytest.approx(predicted.seconds * pixels)
    assert scene.by_key["1.facts"].text == "paced: 3 ms a layer: 5 s, 40% computing"
    words = {mark.text for mark in scene.marks if mark.key.startswith("legend")}
    assert {"F forward", "waits for a message under way", "idle"} <= words
    assert scene.by_key["share7.word"].y < scene.by_key["1.title"].y


def test_only_waits_for_messages_under_way_are_drawn_as_such(run):
    [wait] = [mark for mark in draw_steps([run], ["run"]).marks if mark.key.startswith("wait")]
    pixels = (RIGHT - LEFT) / run.seconds
    assert (wait.x - LEFT, wait.width) == pytest.approx((3 * pixels, pixels))  # as in the bars: not what was idle
    assert (wait.fill, wait.dashed) == (IDLE, True)


def test_an_op_that_waits_interrupt_keeps_its_label(run):
    def labels(step):
        return [mark.text for mark in draw_steps([step], ["run"]).marks if mark.text.startswith("F0")]

    spans = [Span(rank, "forward", "F0", 0, 9, Op("forward", 0)) for rank in (0, 1)]
    spans += [Span(rank, "wait", "all_reduce", 4, 6) for rank in (0, 1)]
    plan = replace(PLAN, world_size=2, tp_size=2, pp_size=1)
    assert labels(run) == ["F0", "F0"]
    assert labels(TimedStep(plan, one_f_one_b(1, 1), Timeline(spans, "measured"))) == ["F0", "F0"]


def test_long_steps_are_in_seconds():
    scene = draw_steps([predict_step(replace(PLAN, micro_batch_size=16))], ["long"])
    assert scene.by_key["axis.unit"].text == "s"
