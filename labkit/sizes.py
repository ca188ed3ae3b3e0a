"""Whole numbers: what is one, which is a size, and what divides it."""

import math
import operator
from functools import lru_cache


def whole_number(value) -> int | None:
    """The value as an int, numpy's integers too; None if it is no whole number, as a bool is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_size(name: str, value) -> int:
    """The value as an int; ValueError for what is no whole number from 1 up."""
    number = whole_number(value)
    if number is None or number < 1:
        raise ValueError(f"{name}={value!r} is not a size: use a whole number from 1 up")
    return number


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))


@lru_cache(maxsize=1024)
def choices(number: int) -> str:
    """The divisors as words.

    >>> choices(6), choices(96)
    ('1, 2, 3 or 6', '1, 2, 3, 4, 6, 8, 12, 16, ... or 96')
    """
    *others, last = map(str, divisors(number))
    shown = others if len(others) <= 8 else [*others[:8], "..."]
    return f"{', '.join(shown)} or {last}" if others else last
