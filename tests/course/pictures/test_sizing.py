"""Pictures of plans and steps: every part as long as its number, on the limit's scale, and every bar with its sum."""

import matplotlib

matplotlib.use("agg")

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from matplotlib import pyplot

from course.measure.utilisation import TimedStep, predict_step
from course.pictures.sizing import draw_memory, draw_published, draw_step_time
from course.pictures.utilisation import draw_shares, draw_steps
from course.sizing import DGX_A100, Plan, memory, step_time, table_1
from labkit.schedules import Op, one_f_one_b
from labkit.shape import GPT
from labkit.timeline import Span, Timeline

PLAN = Plan(GPT(16, 8192, 2048, 51200, 64), 8, 16, pp_size=8, recompute="selective")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def texts(ax):
    return [text.get_text().strip() for text in ax.texts]


def test_memory_is_stacked_to_the_total_of_each_stage():
    ax = draw_memory({"mine": PLAN}, DGX_A100)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["mine, first stage", "mine, last stage"]
    for row, stage in enumerate((0, 7)):
        widths = [bars[row].get_width() * 1e9 for bars in ax.containers]
        assert widths == pytest.approx(list(asdict(memory(PLAN, stage)).values()))
        assert f"{memory(PLAN, stage).total / 1e9:.3g} GB: fits" in texts(ax)
    [limit] = [line.get_xdata()[0] for line in ax.lines]
    assert limit == 80
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "weights", "gradients", "optimizer", "activations",
    ]  # fmt: skip


def test_what_does_not_fit_is_said_and_ends_inside_the_picture():
    ax = draw_memory({"": replace(PLAN, recompute="none", micro_batch_size=8)}, DGX_A100)
    assert any(text.endswith("too much") for text in texts(ax))
    assert ax.get_xlim()[1] > max(bar.get_x() + bar.get_width() for bars in ax.containers for bar in bars)
    assert draw_memory({"": replace(PLAN, pp_size=1)}, DGX_A100).get_yticklabels()[0].get_text() == "each GPU"


def test_sums_stand_in_one_column_beyond_the_limit_and_every_bar():
    plans = {how: replace(PLAN, micro_batch_size=16, recompute=how) for how in ("none", "selective", "full")}
    ax = draw_memory(plans, DGX_A100)
    sums = [text for text in ax.texts if "GB" in text.get_text()]
    assert [text.get_text().partition(": ")[2] for text in sums] == [*["too much"] * 2, *["fits"] * 4]
    [place] = {text.get_position()[0] for text in sums}
    assert place > max(80, *(bar.get_x() + bar.get_width() for bars in ax.containers for bar in bars))
    ax.figure.canvas.draw()
    assert max(text.get_window_extent().x1 for text in sums) <= ax.get_window_extent().x1


def test_parts_of_a_step_follow_each_other():
    estimate = step_time(PLAN, DGX_A100)
    ax = draw_step_time({"mine": estimate})
    bars = [bars[0] for bars in ax.containers]
    for bar, following in pairwise(bars):
        assert bar.get_x() + bar.get_width() == pytest.approx(following.get_x(), abs=0.01 * estimate.total)
    drawn = sum(bar.get_width() for bar in bars)
    assert drawn == pytest.approx(estimate.total, rel=0.01)  # hairlines are left out
    assert f"{estimate.total:.3g} s" in texts(ax)


def test_published_and_estimated_stand_above_each_other_with_the_error():
    ax = draw_published(table_1(), DGX_A100)
    published, estimated = (line.get_ydata() for line in ax.lines)
    assert list(published) == pytest.approx([row.flops_per_gpu / 1e12 for row in table_1()])
    assert texts(ax) == [f"{ours / theirs - 1:+.1%}" for ours, theirs in zip(estimated, published)]


def widths(ax):
    """Of the bars, for each look: [[width of each rank], ...]."""
    corners = [[path.get_extents().extents for path in collection.get_paths()] for collection in ax.collections]
    return [[right - left for left, _, right, _ in boxes] for boxes in corners]


def test_bars_are_the_shares_of_each_rank():
    step = predict_step(PLAN)
    ax = draw_shares(step)
    assert [list(column) for column in zip(*step.shares)] == [pytest.approx(column) for column in widths(ax)]
    assert texts(ax) == [f"{shares.computing:.0%}" for shares in step.shares]
    assert len(ax.get_legend().get_texts()) == 3


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
    waits = [path.get_extents().extents for path in second.collections[2].get_paths()]
    assert [(left, right) for left, _, right, _ in waits] == [(3, 4)]  # as in the bars: not what was idle


def test_long_steps_are_in_seconds():
    [ax] = draw_steps([predict_step(replace(PLAN, micro_batch_size=16))], ["long"])
    assert ax.get_xlabel() == "s"
