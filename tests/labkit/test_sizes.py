"""Whole numbers: what counts as one, and how sizes and choices are written. Refusals are in test_refusals.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_limits_are_sizes():
    assert check_size("size", 1) == 1
    assert check_size("size", 0, least=0) == 0
    assert check_size("size", MAX_SIZE) == MAX_SIZE


@given(st.integers(1, 3000))
def test_divisors_are_all_there_in_order(number):
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


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
