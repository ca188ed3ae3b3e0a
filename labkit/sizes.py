"""Checks whole numbers and sizes, lists divisors, and words the errors for what does not fit."""

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real

# No layer, batch or cluster is larger, and the divisors of a larger number would take too long.
MAX_SIZE = 10**12


class Misfit(ValueError):
    """Sizes that do not fit together.

    ``rule`` is what they break, whatever the numbers are; ``fault`` has the numbers; ``advice`` is
    the way out. Each is in Python's names, which a command line spells its own way.

    >>> print(Misfit("a must divide b", "a=3 does not divide b=4", "use a 1, 2 or 4"))
    a=3 does not divide b=4: use a 1, 2 or 4
    """

    def __init__(self, rule: str, fault: str, advice: str):
        super().__init__(rule, fault, advice)
        self.rule = rule
        self.fault = fault
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.fault}: {self.advice}"


def whole_number(value) -> int | None:
    """Return `value` as an int (numpy integers included), or None if it is not a whole number; a
    bool is not.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        return None if is_bool else operator.index(value)
    except TypeError:
        return None


def check_size(name: str, value, least: int = 1) -> int:
    """Return `value` as an int, or raise a ValueError if it is not a whole number from ``least`` to
    `MAX_SIZE`.
    """
    number = whole_number(value)
    if number is None:
        raise ValueError(f"{name}={value!r} must be a whole number")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    if number > MAX_SIZE:
        raise ValueError(f"{name}={number} must be at most {MAX_SIZE:,}")
    return number


def check_number(name: str, value, most: int) -> float:
    """Return `value` as a float, or raise a ValueError if it is not a number from 0 to ``most``; a
    bool is not.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= most:
        raise ValueError(f"{name}={value!r} must be a number from 0 to {most}")
    return float(value)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, in order."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*low, *(number // size for size in low)}))


def does_not_divide(name: str, size: int, **factors: int) -> str:
    """Word the fault of a ``size``, called ``name``, that the product of ``factors`` does not
    divide.

    >>> does_not_divide("num_layers", 6, pp_size=3, num_chunks=4)
    'pp_size=3 * num_chunks=4 = 12 does not divide num_layers=6'
    """
    product = " * ".join(f"{factor}={value}" for factor, value in factors.items())
    if len(factors) > 1:
        product += f" = {math.prod(factors.values())}"
    return f"{product} does not divide {name}={size}"


def either(choices: Sequence[object]) -> str:
    """Write a choice of numbers as words; of many, the first eight and the last.

    >>> either(divisors(6)), either(divisors(96))
    ('1, 2, 3 or 6', '1, 2, 3, 4, 6, 8, 12, 16, ... or 96')
    """
    *others, last = map(str, choices)
    shown = others if len(others) <= 8 else [*others[:8], "..."]
    return f"{', '.join(shown)} or {last}" if others else last


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, in the plural unless it is 1.

    >>> counted(1, "rank"), counted(8, "micro-batch")
    ('1 rank', '8 micro-batches')
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Write a list of ranks; of more than ``most``, the first three and the last.

    >>> ranks_text([0, 1]), ranks_text(range(0, 512, 8))
    ('[0, 1]', '[0, 8, 16, ..., 504]')
    """
    shown = list(ranks) if len(ranks) <= most else [*ranks[:3], "...", ranks[-1]]
    return f"[{', '.join(map(str, shown))}]"
