"""Pictures of steps: bars are each rank's shares, and timelines have one scale."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from course.measure.utilisation import TimedStep, predict_step
from course.pictures.utilisation import draw_shares, draw_steps
from course.sizing import Plan
from labkit.schedules import Op, one_f_one_b
from labkit.shape import GPT
from labkit.timeline import Span, Timeline

PLAN = Plan(GPT(16, 8192, 2048, 51200, 64), 8, 16, pp_size=8, recompute="selective")


def widths(ax):
    """Of the bars, for each look: [[width of each rank], ...]."""
    corners = [[path.get_extents().extents for path in collection.get_paths()] for collection in ax.collections]
    return [[right - left for left, _, right, _ in boxes] for boxes in corners]


def test_bars_are_the_shares_of_each_rank():
    step = predict_step(PLAN)
    ax = draw_shares(step, Figure().subplots())
    assert [list(column) for column in zip(*step.shares)] == [pytest.approx(column) for column in widths(ax)]
    assert [text.get_text() for text in ax.texts] == [f"{shares.computing:.0%}" for shares in step.shares]


def test_steps_have_one_scale_and_bars_beside_them():
    op = Op("forward", 0)
    spans = [
        (0, "forward", "F0", 0, 3, op), (1, "wait", "for F0", 0, 4, op), (1, "forward", "F0", 4, 5, op),
        (0, "communication", "send F0", 3, 4, op),
    ]  # fmt: skip
    plan = replace(PLAN, world_size=2, pp_size=2, micro_batch_size=16)
    step = TimedStep(plan, one_f_one_b(2, 1), Timeline([Span(*span) for span in spans], "paced: 3 ms a layer"))
    first, second = draw_steps([predict_step(plan), step], ["predicted", "run"])
    assert first.get_xlim() == second.get_xlim()
    assert second.get_title("right").startswith("paced: 3 ms a layer")
    assert len(first.figure.axes) == 4
    legend = [text.get_text() for text in second.get_legend().get_texts()]
    assert {"F forward", "waits for a message under way", "idle"} <= set(legend)
    waits = [path.get_extents().extents for path in second.collections[2].get_paths()]
    assert [(left, right) for left, _, right, _ in waits] == [(3, 4)]  # as in the bars: not what was idle


def test_long_steps_are_in_seconds():
    [ax] = draw_steps([predict_step(replace(PLAN, micro_batch_size=16))], ["long"])
    assert ax.get_xlabel() == "s"
