"""Whole numbers: what counts as one, and that no size makes anybody wait."""

import numpy as np
import pytest
import torch

from labkit.layout import ParallelLayout
from labkit.schedules import gpipe
from labkit.sizes import MAX_SIZE, check_size, counted, divisors, either, ranks_text, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_size_is_kept_as_an_int(value):
    assert whole_number(value) == check_size("size", value) == 3
    assert type(whole_number(value)) is type(check_size("size", value)) is int


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 2.0, "2", None, [2]])
def test_what_is_not_a_whole_number(value):
    assert whole_number(value) is None
    with pytest.raises(ValueError) as refused:
        check_size("num_rows", value)
    assert str(refused.value) == f"num_rows={value!r} must be a whole number"


@pytest.mark.parametrize(
    ("value", "least", "said"),
    [
        (0, 1, "num_rows=0 must be at least 1"),
        (-8, 1, "num_rows=-8 must be at least 1"),
        (-1, 0, "num_rows=-1 must be at least 0"),
        (MAX_SIZE + 1, 1, "num_rows=1000000000001 must be at most 1,000,000,000,000"),
        (10**30, 1, f"num_rows={10**30} must be at most 1,000,000,000,000"),
    ],
)
def test_a_size_has_limits(value, least, said):
    with pytest.raises(ValueError) as refused:
        check_size("num_rows", value, least)
    assert str(refused.value) == said


def test_the_limits_are_sizes():
    assert check_size("size", 1) == 1
    assert check_size("size", 0, least=0) == 0
    assert check_size("size", MAX_SIZE) == MAX_SIZE


@pytest.mark.parametrize("number", [1, 2, 12, 97, 3600, 65536])
def test_divisors_are_all_there_in_order(number):
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


def test_worlds_whose_divisors_would_take_too_long_are_refused_by_their_size():
    """It took half a minute to list the divisors of 10**18 + 9, and 10**30 was accepted."""
    with pytest.raises(ValueError, match=r"does not divide world_size=999999999989: use tp_size 1 or 999999999989, "):
        ParallelLayout(MAX_SIZE - 11, tp_size=7)  # a prime
    for too_large in (10**18 + 9, 10**30):
        with pytest.raises(ValueError, match=r"must be at most 1,000,000,000,000"):
            ParallelLayout(too_large, tp_size=2)
        with pytest.raises(ValueError, match=r"must be at most 1,000,000,000,000"):
            gpipe(2, too_large)


def test_a_choice_of_numbers_in_words():
    assert either([4]) == "4"
    assert either([2, 4]) == "2 or 4"
    assert either(range(1, 10)) == "1, 2, 3, 4, 5, 6, 7, 8 or 9"
    assert either(range(1, 11)) == "1, 2, 3, 4, 5, 6, 7, 8, ... or 10"


def test_a_number_with_its_noun():
    assert [counted(1, "batch"), counted(0, "batch"), counted(2, "rank")] == ["1 batch", "0 batches", "2 ranks"]


def test_many_ranks_are_abbreviated():
    assert ranks_text(range(8)) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert ranks_text(range(9)) == "[0, 1, 2, ..., 8]"
    assert ranks_text((0, 2, 4, 6, 8), most=4) == "[0, 2, 4, ..., 8]"
