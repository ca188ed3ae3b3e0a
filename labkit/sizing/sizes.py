"""Whole numbers: what is one, and what divides it."""

import operator
from functools import lru_cache


def check_size(name: str, value) -> None:
    """Raise ValueError for what is no whole number from 1 up."""
    try:
        fits = not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}={value!r} is not a size: use a whole number from 1 up")


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(size for size in range(1, number + 1) if number % size == 0)


@lru_cache(maxsize=1024)
def choices(number: int) -> str:
    """The divisors as words.

    >>> choices(6), choices(96)
    ('1, 2, 3 or 6', '1, 2, 3, 4, 6, 8, 12, 16, ... or 96')
    """
    *others, last = map(str, divisors(number))
    shown = others if len(others) <= 8 else [*others[:8], "..."]
    return f"{', '.join(shown)} or {last}" if others else last
