"""Says how wrong answers are related to the right ones. Each sentence is computed from all of them: none is a guess.

Answers are nested lists, one for each case or for each rank. ``given`` has the arguments for each, by name.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from course.exercises.values import leaves, same, show
from labkit.sizes import ranks_text

RANKS = "the number of ranks"
Pairs = list[tuple]
"""What was answered and what is right, for each case or for each rank."""


def relation(pairs: Pairs, given: Sequence[dict] = ()) -> str:
    """Say what holds between all answers and the right ones, if it is something simple, or else where they are wrong.

    >>> relation([([2, 4, 6], [1, 2, 3])])
    'Every number is 2 times the right one.'
    >>> relation([([1, [5, 6]], [1, [6, 5]])])
    'Only part 2 of the 2 is wrong. These are the right values, in a different order.'
    """
    size = num_parts([answer for pair in pairs for answer in pair])
    is_one_tensor = is_on_ranks(given) and all(_depth(right) == 1 for _, right in pairs)
    if not size or is_one_tensor:
        return fact(pairs) or where(pairs, given)
    wrong = [part for part in range(size) if not all(same(got[part], right[part]) for got, right in pairs)]
    if len(wrong) > 1:
        return swapped(pairs) or fact(pairs) or where(pairs, given)
    [part] = wrong
    of_part = [(got[part], right[part]) for got, right in pairs]
    return f"Only part {part + 1} of the {size} is wrong. {fact(of_part) or where(of_part, given)}".strip()


def is_on_ranks(given: Sequence[dict]) -> bool:
    """Whether the answers are those of ranks."""
    return bool(given) and RANKS in given[0]


def num_parts(answers: list) -> int | None:
    """Return of how many parts, up to four, each answer consists; None if they differ."""
    sizes = {len(each) if isinstance(each, list) else 0 for each in answers}
    if len(sizes) > 1:
        return None
    size = sizes.pop()
    return size if 1 < size <= 4 else None


def shape_of(value) -> list[int]:
    """Return the shape of nested lists, as far down as it is one."""
    shapes = [shape_of(item) for item in value] if isinstance(value, list) else []
    if not shapes:
        return []
    is_one = all(shape == shapes[0] for shape in shapes)
    return [len(shapes), *(shapes[0] if is_one else [])]


def fact(pairs: Pairs) -> str:
    """Return the first relation that holds between all pairs; "" if none does."""
    if isinstance(_first_wrong(pairs)[0], dict):
        return "This is a dict. Return what is in it, without the names."
    return _shape(pairs) or _order(pairs) or _factor(pairs)


def where(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say on which ranks the answers to one case are right, and on which they are wrong.

    >>> where([(4, 5), (6, 6)], [{RANKS: 2}, {RANKS: 2}])
    'It is right on ranks [1], and wrong on [0].'
    """
    right = [rank for rank, pair in enumerate(pairs) if same(*pair)]
    if not right or not is_on_ranks(given) or given[0][RANKS] != len(pairs):
        return ""
    wrong = [rank for rank in range(len(pairs)) if rank not in right]
    return f"It is right on ranks {ranks_text(right)}, and wrong on {ranks_text(wrong)}."


def swapped(pairs: Pairs) -> str:
    """Say which two parts are swapped in all answers, if that is all that is wrong; None, where right, has no parts.

    >>> swapped([([2, 1], [1, 2]), (None, None)])
    'Parts 1 and 2 are swapped.'
    """
    pairs = [pair for pair in pairs if pair != (None, None)]
    size = num_parts([answer for pair in pairs for answer in pair]) or 0
    for one, other in combinations(range(size), 2):
        order = list(range(size))
        order[one], order[other] = other, one
        if all(same([got[part] for part in order], right) for got, right in pairs):
            return f"Parts {one + 1} and {other + 1} are swapped."
    return ""


def _first_wrong(pairs: Pairs) -> tuple:
    return next(pair for pair in pairs if not same(*pair))


def _order(pairs: Pairs) -> str:
    """Say if the order is all that is wrong."""
    for got, right in pairs:
        values = leaves(got)
        if len(values) < 2 or not same(sorted(values, key=str), sorted(leaves(right), key=str)):
            return ""
    return "These are the right values, in a different order."


def _shape(pairs: Pairs) -> str:
    """Say which shape the first wrong answer has, if it is not that of the right one."""
    got, right = _first_wrong(pairs)
    is_one_number = not isinstance(right, list)
    if shape_of(got) == shape_of(right) or not isinstance(got, list):
        return ""
    if same(leaves(got), leaves(right)):
        wanted = "one number" if is_one_number else shape_of(right)
        return f"These are the right values, in a different shape: {shape_of(got)}, not {wanted}."
    return "" if is_one_number else f"The shape is {shape_of(got)}, not {shape_of(right)}."


def _factor(pairs: Pairs) -> str:
    """Say which factor is between all numbers and the right ones."""
    if any(_form(got) != _form(right) for got, right in pairs):
        return ""
    numbers = [both for pair in pairs for both in zip(*map(leaves, pair))]
    if not all(type(each) in (int, float) and math.isfinite(each) for both in numbers for each in both):
        return ""
    factor = next((got / right for got, right in numbers if right), 0)
    is_one_value = len({right for _, right in numbers}) < 2  # of which anything is a multiple
    if factor == 0 or is_one_value or not all(same(got, factor * right) for got, right in numbers):
        return ""
    return f"Every number is {show(factor)} times the right one."


def _depth(value) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _form(value) -> list | None:
    """Return nested lists without what is in them."""
    return [_form(item) for item in value] if isinstance(value, list) else None


def sizes_of(arguments: dict) -> dict[str, float]:
    """Return the numbers among arguments by name, and the sizes of their tensors.

    >>> sizes_of({"t": 2, "x": [[1, 2, 3], [4, 5, 6]], "flag": True})
    {'t': 2, 'x.shape[0]': 2, 'x.shape[1]': 3}
    """
    found = {}
    for name, value in arguments.items():
        if type(value) in (int, float):
            found[name] = value
        elif isinstance(value, list):
            is_tensor = all(type(leaf) in (int, float, bool) for leaf in leaves(value))
            shape = shape_of(value) if is_tensor else [len(value)]
            for dim, size in enumerate(shape):
                found[f"{name}.shape[{dim}]" if len(shape) > 1 else f"len({name})"] = size
    return found


def what_is_new(before: Sequence[dict], here: dict) -> str:
    """Name the sizes in which the case that failed differs from all before it.

    >>> what_is_new([{"t": 2, "d": 2}], {"t": 2, "d": 3})
    'New here: d is not t; d = 3.'
    """
    known, sizes = [sizes_of(each) for each in before], sizes_of(here)
    shared = [name for name in sizes if all(name in each for each in known)]
    found = []
    for names in ([name for name in shared if name in here], [name for name in shared if name not in here]):
        for one, other in combinations(names, 2):
            if sizes[one] != sizes[other] and all(each[one] == each[other] for each in known):
                found.append(f"{other} is not {one}")
        found += [f"{name} = {show(sizes[name])}" for name in names if all(each[name] != sizes[name] for each in known)]
        if names and names[0] not in here:
            break
        for name, value in here.items():
            if isinstance(value, (bool, str)) and all(each.get(name) != value for each in before):
                found.append(f"{name} = {value!r}")
            if _has(math.isinf, value) and not any(_has(math.isinf, each.get(name)) for each in before):
                found.append(f"{name} has infinite numbers")
    return f"New here: {'; '.join(list(dict.fromkeys(found))[:4])}." if found else ""


def _has(kind: Callable, value) -> bool:
    return any(type(leaf) is float and kind(leaf) for leaf in leaves(value))
