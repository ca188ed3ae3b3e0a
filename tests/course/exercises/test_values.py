"""When two answers are the same, and how an answer is written."""

import numpy as np
import pytest

from course.exercises.values import same, show


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (np.array([1.0, 2.0]), [1, 2], True),
        (0.1 + 0.2, 0.3, True),
        ([1, 2], [1, 2, 3], False),
        ([[1, 2]], [1, 2], False),
        ({"a": (1,)}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, 0, False),
        (float("nan"), 1.0, False),
    ],
)
def test_same(one, other, expected):
    assert same(one, other) is expected


def test_show_cuts_long_answers_in_the_middle():
    assert show(list(range(100)), longest=4) == "[0, 1, 2, ..., 99]"
    assert show(np.array([6.0, 10.5])) == "[6, 10.5]"


def test_an_overflow_is_shown_not_raised():
    assert show([float("inf"), float("nan"), -float("inf"), 12345.0]) == "[inf, nan, -inf, 12345]"
