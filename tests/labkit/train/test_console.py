"""The lines before and after a run, and what is shown while it lasts."""

import io
from dataclasses import replace

import pytest

from labkit.train import Step
from labkit.train.console import describe_end, describe_start, progress_bar
from labkit.train.world import world
from tests.labkit.train.tiny import TINY


def test_the_line_before_a_run():
    text = describe_start(TINY, 4, None)
    assert text.startswith("4 ranks (tp 1, pp 1, dp 4); ")
    assert f"; {TINY.shape.num_parameters:,} parameters in float64; 64 tokens per step; " in text
    assert text.endswith("; no floor is known for invented")
    assert describe_start(TINY, 1, 0.5).startswith("1 rank (")
    assert describe_start(TINY, 1, 0.5).endswith("; the text's floor is 0.5000")


def test_the_line_after_a_run():
    done = [Step(number, 3.0 - number / 10, 1.0, 0.1, 1.0, 64.0) for number in (1, 2)]
    assert describe_end(TINY, done, None) == "Step 2: loss 2.8000"
    assert describe_end(TINY, done, 0.5) == "Step 2: loss 2.8000, 2.3000 above the text's floor"
    assert describe_end(TINY, [], 0.5) == "Nothing to do: the checkpoint has 10 steps or more. Give more --steps"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_log_has_lines(monkeypatch, is_terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stderr)
    with world(), progress_bar(replace(TINY, log_interval=4), 0) as show:
        for number in range(1, 11):
            show(Step(number, 3.0 - number / 10, 1.0, 0.1, 1.0, 64.0))
    shown = stderr.getvalue()
    if is_terminal:
        assert "10/10" in shown and "\r" in shown and shown.count("\n") == 1
    else:
        lines = ("step 1/10: loss 2.9000", "step 4/10: loss 2.6000", "step 8/10: loss 2.2000")
        assert shown == "".join(f"{line}, 64 tokens/s\n" for line in lines)
