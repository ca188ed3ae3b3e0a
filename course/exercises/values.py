"""Compares two answers, and writes an answer as a report shows it.

Tensors and arrays count as the nested lists that they hold, so an exercise never fails because of a
container, a device or a dtype: only because of a value or a shape.
"""

import math
from collections.abc import Iterator, ValuesView
from decimal import Decimal
from fractions import Fraction
from typing import Any

TOLERANCE = 1e-5  # relative; float32 sums in a different order differ by less
FREED = "(its memory is freed)"


def plain(value) -> Any:
    """Return ``value`` with every tensor, array and tuple in it turned into lists.

    >>> plain((1, [2.0, (3,)]))
    [1, [2.0, [3]]]
    >>> plain((Fraction(1, 2), Fraction(3)))
    [0.5, 3]
    """
    if hasattr(value, "tolist"):
        return FREED if is_freed(value) else value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, (Fraction, Decimal)):
        return int(value) if isinstance(value, Fraction) and value.denominator == 1 else float(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def is_freed(value) -> bool:
    """Whether this is a tensor that has elements and no memory."""
    return hasattr(value, "untyped_storage") and value.numel() > 0 and not value.untyped_storage().nbytes()


def with_lists(value):
    """Return ``value`` with what can be read only once, as a generator or map, turned into lists.

    >>> with_lists((map(abs, [-1, 2]), 3))
    ([1, 2], 3)
    """
    if isinstance(value, (Iterator, ValuesView)):
        return [with_lists(item) for item in value]
    return tuple(map(with_lists, value)) if type(value) is tuple else value


def same(one, other) -> bool:
    """Whether two answers agree: in shape exactly, in numbers up to rounding.

    >>> same((1, 2), [1.0, 2.0000001]), same([[1, 2]], [1, 2])
    (True, False)
    """
    one, other = plain(one), plain(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-6) or (one != one and other != other)  # both nan
    return type(one) is type(other) and one == other


def difference(got, expected) -> str:
    """Say where two nested lists first differ; nothing for flat ones, where the eye finds it.

    >>> difference([[0, 1], [2, 3]], [[0, 1], [2, 4]])
    'at [1]: [2, 3], expected [2, 4]'
    >>> difference([[0, 1]], [[0, 1], [2, 4]])
    '1 part, expected 2'
    """
    got, expected, path = plain(got), plain(expected), ""
    while _is_nested(expected) and isinstance(got, list) and len(got) == len(expected):
        index = next(i for i, (one, other) in enumerate(zip(got, expected)) if not same(one, other))
        got, expected, path = got[index], expected[index], f"{path}[{index}]"
    where = f"at {path}: " if path else ""
    if _is_nested(expected) and isinstance(got, list):
        return f"{where}{len(got)} part{'s' * (len(got) != 1)}, expected {len(expected)}"
    got, expected = told_apart(got, expected)
    return f"{where}{got}, expected {expected}" if path else ""


def told_apart(got, expected) -> tuple[str, str]:
    """Return both as text, with as many digits as it takes to see that they differ.

    >>> told_apart(2.99986, 3.0)
    ('2.99986', '3')
    """
    texts = ((show(got, digits=digits), show(expected, digits=digits)) for digits in (4, 6, 9))
    first = next(texts)
    return next((both for both in (first, *texts) if both[0] != both[1]), first)


def has_floats(value) -> bool:
    """Whether there is a float anywhere in ``value``."""
    return any(isinstance(leaf, float) for leaf in leaves(plain(value)))


def leaves(value) -> list:
    """Return all that is in nested lists, as one flat list."""
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def _is_nested(value) -> bool:
    return isinstance(value, list) and any(isinstance(item, list) for item in value)


def show(value, longest: int = 16, digits: int = 4) -> str:
    """Return ``value`` as short text: whole numbers without ``.0``, long lists cut in the middle.

    >>> show([6.0, 10.0, 0.333333333])
    '[6, 10, 0.3333]'
    """
    value = plain(value)
    if isinstance(value, list):
        items = [show(item, longest, digits) for item in value[:longest]]
        if len(value) > longest:
            items[-1:] = ["...", show(value[-1], longest, digits)]
        return f"[{', '.join(items)}]"
    if isinstance(value, float):
        is_large = math.isfinite(value) and abs(value) >= 1e3  # and is told from the next whole number
        return f"{value:.2f}".rstrip("0").rstrip(".") if is_large else f"{value:.{digits}g}"
    return repr(value)
