"""What is seen of a function while it runs: where the first nan arises, and which tensors are one and the same."""

import pytest
import torch

from course.exercises.calling import unwritten_memory_shows
from course.exercises.watch import UNWRITTEN, Watch

INF = torch.inf


def zero_by_zero(x):
    return (x - x) / (x - x)


def in_place(x):
    x = x - 1
    x /= x
    return x


def infinite_difference(x):
    y = x * INF
    return y - y


def softmax_of_nothing(x):
    return torch.softmax(x - INF, 0)


def mean_of_nothing(x):
    return x[x > 9].mean()


def log_of_negative(x):
    return torch.log(x - 5)


def never_written(x):
    total = torch.empty(2)
    total += x
    return total


def written_in_time(x):
    total = torch.empty(2)
    total.copy_(x - 5)
    return torch.log(total)


def given(x):
    return x + torch.tensor([torch.nan, 1.0])


def numbers_stay(x):
    return torch.empty(2).copy_(x) + 1


@pytest.mark.parametrize(
    ("function", "x", "said"),
    [
        (zero_by_zero, [1.0, 2.0], "in line 2, `return (x - x) / (x - x)`: 0 / 0 is nan."),
        (in_place, [1.0, 2.0], "in line 3, `x /= x`: 0 / 0 is nan."),
        (infinite_difference, [1.0, 2.0], "in line 3, `return y - y`: inf - inf is nan."),
        (infinite_difference, [-1.0, 2.0], "-inf - (-inf) is nan."),
        (softmax_of_nothing, [1.0, 2.0], "softmax over a row whose numbers are all -inf, or one of which is inf"),
        (mean_of_nothing, [1.0, 2.0], "mean of an empty tensor is nan."),
        (log_of_negative, [1.0, 2.0], "log of a number below 0 is nan."),
        (written_in_time, [1.0, 2.0], "in line 4, `return torch.log(total)`: log of a number below 0 is nan."),
        (never_written, [1.0, 2.0], f"in line 3, `total += x` before anybody has written to it. {UNWRITTEN}"),
        (zero_by_zero, [torch.nan, 2.0], "`x` has nan in it, as it was given"),
        (numbers_stay, [1.0, 2.0], ""),
    ],
)
def test_where_nan_comes_from(function, x, said):
    x = torch.tensor(x)
    watch = Watch(function, {"x": x})
    with unwritten_memory_shows(), watch:
        function(x)
    assert watch.why_nan.endswith(said) or said in watch.why_nan, watch.why_nan
    assert bool(watch.why_nan) == bool(said)


def same_entry(x):
    return torch.cat([x] * 3)


def counts_once(x):
    counts = torch.zeros(4)
    counts[torch.tensor([1, 1, 2])] += 1
    return counts


def counts_each(x):
    counts = torch.zeros(4)
    for index in (1, 1, 2):
        counts[index] += 1
    return torch.cat([counts, x])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (same_entry, "in which one tensor stands 3 times"),
        (counts_once, "has a number twice, and what is written there first is lost."),
        (counts_each, ""),
    ],
)
def test_what_else_is_seen(function, said):
    watch = Watch(function, {})
    with watch:
        function(torch.ones(2))
    assert said in " ".join(watch.notes) and bool(watch.notes) == bool(said)
