"""Losses on each other can be told apart."""

import json
import math
from dataclasses import asdict

import pytest

from course.pictures.curves import draw_losses, draw_metrics
from labtrain import Step


def test_curves_on_each_other_can_be_told_apart():
    curves = {"1 process": [3.0, 2.0, 1.5], "2 ranks": [3.0, 2.0, 1.5], "4 ranks": [3.0, 2.0]}
    plot = draw_losses(curves, floor_nats=0.5, num_steps=40)
    [ax] = plot.figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines) == [*curves, "the text's floor"]
    for name, losses in curves.items():
        assert list(lines[name].get_ydata()) == losses
        assert list(lines[name].get_xdata()) == list(range(1, len(losses) + 1))
        assert f"{name}: {losses[0]:.2f} to {losses[-1]:.2f} at step {len(losses)}" in plot.alt
    looks = [(line.get_linewidth(), line.get_linestyle(), line.get_marker()) for line in ax.lines]
    assert len(set(looks)) == len(looks)  # without colour too
    assert ax.get_xlim() == (0, 41)
    assert ax.get_ylim()[0] == 0
    assert set(lines["the text's floor"].get_ydata()) == {0.5}
    assert "The text's floor: 0.50" in plot.alt
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(lines)


def test_a_run_may_begin_later_and_another_may_have_no_finite_loss():
    plot = draw_losses({"resumed": [math.nan, math.nan, 2.0, 1.5], "broken": [math.nan] * 2})
    assert "resumed: 2.00 to 1.50 at step 4. broken: nan to nan at step 2" in plot.alt


def test_a_note_is_seen_and_said():
    plot = draw_losses({}, note="not finished")
    assert plot.figure.axes[0].get_title("right") == "not finished"
    assert "not finished" in plot.alt and ">not finished</text>" in plot.svg()


def test_metrics_of_a_run_that_was_resumed(tmp_path):
    file = tmp_path / "run.jsonl"
    steps = [asdict(Step(number, 3.0 - number / 10, 1.0, 0.1, 0.5, 64.0 * number)) for number in (1, 2, 1, 2)]
    again = [asdict(Step(3, 2.5, 2.0, 0.1, 0.5, 99.0, evaluation_loss=2.6)) | {"resumed_after": 2}]
    file.write_text("\n".join(json.dumps(step) for step in steps + again) + '\n{"step": 4, "lo')  # killed just then
    plot = draw_metrics(file)
    losses, norms, speeds = plot.figure.axes
    assert [list(ax.lines[0].get_xdata()) for ax in (losses, norms, speeds)] == [[1, 2, 3]] * 3
    assert list(losses.lines[0].get_ydata()) == [2.9, 2.8, 2.5]  # of the last run
    assert list(norms.lines[0].get_ydata()) == [1.0, 1.0, 2.0]
    assert list(speeds.lines[0].get_ydata()) == [64.0, 128.0, 99.0]
    assert all(ax.lines[1].get_xdata() == [2.5, 2.5] for ax in (losses, norms, speeds))
    expected = "Steps 1 to 3: loss 2.90 to 2.50. Evaluation: 2.60 at step 3. Resumed after step 2 (dashed)."
    assert plot.alt == expected
    file.write_text("")
    with pytest.raises(ValueError, match=r"run\.jsonl has no steps: name a file that labtrain wrote with --metrics"):
        draw_metrics(file)
