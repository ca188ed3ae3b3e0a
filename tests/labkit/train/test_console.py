"""The lines before and after a run. (The bar is looked at where it is printed: test_main.py.)"""

from labkit.train import Step
from labkit.train.console import describe_end, describe_start
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
