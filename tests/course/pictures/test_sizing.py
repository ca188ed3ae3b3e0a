"""Pictures of plans: every part as long as its number, on the limit's scale, and every bar with its sum."""

from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from course.pictures.sizing import draw_memory, draw_published, draw_step_time
from course.sizing import DGX_A100, Plan, memory, step_time, table_1
from labkit.shape import GPT

PLAN = Plan(GPT(16, 8192, 2048, 51200, 64), 8, 16, pp_size=8, recompute="selective")


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
