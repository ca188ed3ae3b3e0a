"""Says how wrong answers are related to the right ones. Each sentence is computed from all of them: none is a guess.

Answers are nested lists, one for each case or for each rank. ``given`` has the arguments for each, by name.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

import torch

from course.exercises.values import leaves, same, show
from labkit.sizes import ranks_text

RANKS = "the number of ranks"
Pairs = list[tuple]
"""What was answered and what is right, for each case or for each rank."""

ROUNDINGS: dict[str, Callable] = {
    "rounded down": torch.floor,
    "rounded up": torch.ceil,
    "rounded to a whole number": torch.round,
    "without its sign": torch.abs,
    "or 0 where that is negative": lambda x: x.clamp(min=0),
}
FUNCTIONS: dict[str, Callable] = {
    "the square of": torch.square,
    "the root of": torch.sqrt,
    "1 divided by": torch.reciprocal,
    "1 minus": lambda x: 1 - x,
    "the logarithm of": torch.log,
    "the exponential of": torch.exp,
}


def relation(pairs: Pairs, given: Sequence[dict] = (), says_where: bool = True, named: bool = True) -> str:
    """Say what holds between all answers and the right ones, if it is something simple, or else where they are wrong.

    Factors are ``named`` by the sizes that they are equal to, unless these answers are too few to say so.

    >>> relation([([2, 4, 6], [1, 2, 3])], [{"t": 2}])
    'Every number is 2 times the right one. That is t.'
    >>> relation([([1, [5, 6]], [1, [6, 5]])])
    'Only part 2 of the 2 is wrong. These are the right values in reverse order.'
    """
    size = num_parts([answer for pair in pairs for answer in pair])
    is_one_tensor = is_on_ranks(given) and all(_depth(right) == 1 for _, right in pairs)
    place = where if says_where else _nowhere
    if not size or is_one_tensor:
        return fact(pairs, given, named) or place(pairs, given)
    wrong = [part for part in range(size) if not all(same(got[part], right[part]) for got, right in pairs)]
    of_part = {part: [(got[part], right[part]) for got, right in pairs] for part in wrong}
    if len(wrong) == 1:
        only = f"Only part {wrong[0] + 1} of the {size} is wrong."
        found = fact(of_part[wrong[0]], given, named)
        if found or says_where:
            return f"{only} {found or where(of_part[wrong[0]], given)}".strip()
    if said := swapped(pairs):
        return said
    if found := fact(pairs, given, named):
        return found
    if all(any(same(list(order), right) for order in permutations(got)) for got, right in pairs):
        return "The parts are right, and in a different order."
    parts_of: dict[str, list[int]] = {}
    for part in wrong:
        parts_of.setdefault(fact(of_part[part], given, named), []).append(part + 1)
    texts = [f"Part{'s' * (len(parts) > 1)} {_and(parts)}: {text}" for text, parts in parts_of.items() if text]
    return " ".join(texts) or place(pairs, given)


def _nowhere(*_) -> str:
    return ""


def is_on_ranks(given: Sequence[dict]) -> bool:
    """Whether the answers are those of ranks."""
    return bool(given) and RANKS in given[0]


def num_parts(answers: list) -> int | None:
    """Return of how many parts, up to four, each answer consists; None if they differ."""
    sizes = {len(each) if isinstance(each, list) else 0 for each in answers}
    return size if len(sizes) == 1 and 1 < (size := sizes.pop()) <= 4 else None


def shape_of(value) -> list[int]:
    """Return the shape of nested lists, as far down as it is one."""
    shapes = [shape_of(item) for item in value] if isinstance(value, list) else []
    return [len(shapes), *(shapes[0] if all(shape == shapes[0] for shape in shapes) else [])] if shapes else []


def fact(pairs: Pairs, given: Sequence[dict], named: bool = True) -> str:
    """Return the first relation that holds between all pairs; "" if none does."""
    if isinstance(next(got for got, right in pairs if not same(got, right)), dict):
        return "This is a dict. Return what is in it, without the names."
    for find in FACTS:
        if found := find(pairs, given) if find is not _factor else _factor(pairs, given, named):
            return found
    return ""


def where(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say where the answers are right, and where they are wrong.

    >>> where([(4, 5), (6, 6)], [{RANKS: 2}, {RANKS: 2}])
    'It is right on ranks [1], and wrong on [0].'
    >>> where([([[1, 2], [3, 5]], [[1, 2], [3, 4]])], [])
    'Only row 1 has wrong numbers, of 2, counted from 0.'
    """
    is_right = [same(*pair) for pair in pairs]
    if found := _where_an_argument_is(is_right, given):
        return found
    if any(is_right) and is_on_ranks(given) and given[0][RANKS] == len(pairs):
        ranks = [[rank for rank, each in enumerate(is_right) if each is wanted] for wanted in (True, False)]
        text = "It is right on ranks {}, and wrong on {}.".format(*map(ranks_text, ranks))
        lines = {_wrong_lines(*pair) for pair in pairs if not same(*pair)}
        return f"{text} {lines.pop()}".strip() if len(lines) == 1 else text
    if found := _range_of_factors(pairs):
        return found
    got, right = pairs[is_right.index(False)]
    if isinstance(got, list) and isinstance(right, list) and max(_depth(got), _depth(right)) == 1:
        num_right = next((place for place, both in enumerate(zip(got, right)) if not same(*both)), 0)
        return f"The first {num_right} of {len(right)} are right." if num_right > 1 else ""
    got, right = _tensor(got), _tensor(right)
    if got is None or right is None or got.shape != right.shape:
        return ""
    is_wrong = ~torch.isclose(got, right, rtol=1e-5, atol=1e-6)
    if lines := _wrong_lines(got.tolist(), right.tolist()):
        return lines
    num_right = int((~is_wrong).sum())
    return f"{num_right} of the {got.numel()} numbers are right." if num_right else ""


def _where_an_argument_is(is_right: list[bool], given: Sequence[dict]) -> str:
    """Say which word or bool is among the arguments exactly where the answers are wrong."""
    if len(given) != len(is_right) or is_on_ranks(given) or min(is_right.count(True), is_right.count(False)) < 2:
        return ""
    for name, value in [(name, value) for each in given for name, value in each.items()]:
        if isinstance(value, (str, bool)) and all((each.get(name) != value) == it for each, it in zip(given, is_right)):
            return f"It is wrong wherever {name} is {value!r}, and right everywhere else."
    return ""


def _wrong_lines(got, right) -> str:
    """Say which rows, or which columns, are wrong.

    >>> _wrong_lines([[1, 0], [2, 0]], [[1, 5], [2, 0]])
    'Only row 0 has wrong numbers, of 2, counted from 0.'
    """
    got, right = _tensor(got), _tensor(right)
    if got is None or right is None or got.shape != right.shape or got.dim() != 2:
        return ""
    is_wrong = ~torch.isclose(got, right, rtol=1e-5, atol=1e-6)
    lines_of = {"row": is_wrong.any(1), "column": is_wrong.any(0)}
    whole_of = {"row": is_wrong.all(1), "column": is_wrong.all(0)}
    for name, lines in sorted(lines_of.items(), key=lambda item: not torch.equal(item[1], whole_of[item[0]])):
        if lines.all():
            continue
        wrong = lines.nonzero().flatten().tolist()
        named, is_one = f"Only {name}{'s' * (len(wrong) > 1)} {_and(wrong)}", len(wrong) == 1
        if torch.equal(lines, whole_of[name]):
            return f"{named} of {len(lines)} {'is' if is_one else 'are'} wrong, counted from 0."
        return f"{named} {'has' if is_one else 'have'} wrong numbers, of {len(lines)}, counted from 0."
    return ""


def _range_of_factors(pairs: Pairs) -> str:
    """Say between which factors single numbers lie, if all are too large, or all too small."""
    if len(pairs) < 2 or not all(type(each) in (int, float) and math.isfinite(each) for pair in pairs for each in pair):
        return ""
    factors = [got / right if right else 1.0 for got, right in pairs]
    low, high = min(factors), max(factors)
    if low <= 0 or (low < 0.999 and high > 1.001) or same(low, high):
        return ""
    word = "large" if high > 1 else "small"
    return f"All are too {word}, or right: {show(low)} to {show(high)} times the right one."


def _and(values: Sequence) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _tensor(value) -> torch.Tensor | None:
    """Return nested lists of numbers as a tensor; None if they are not of one shape.

    >>> _tensor([[], [1, 2]]), _tensor([[1, 2], []]), _tensor([[1], [[2]]])
    (None, None, None)
    """
    values = leaves(value)
    if not values or not all(type(each) in (int, float) for each in values) or not _is_rectangular(value):
        return None
    return torch.tensor(value, dtype=torch.float64)


def _is_rectangular(value) -> bool:
    """Whether all lists of one level are equally long and deep; torch lets an empty first one stand for all."""
    lists = [each for each in value if isinstance(each, list)] if isinstance(value, list) else []
    if not lists:
        return True
    is_even = len(lists) == len(value) and len(set(map(len, lists))) == 1 and len(set(map(_depth, lists))) == 1
    return is_even and all(map(_is_rectangular, lists))


def _tensors(pairs: Pairs) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return all pairs as finite tensors, or None."""
    found = [(_tensor(got), _tensor(right)) for got, right in pairs]
    if any(each is None or not bool(torch.isfinite(each).all()) for pair in found for each in pair):
        return None
    return found  # pyright: ignore[reportReturnType]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def _is_telling(values: Sequence) -> bool:
    """Whether there are enough different numbers, other than 0 and 1, that a relation is no accident."""
    return len({value for value in values if value not in (0, 1)}) > 1


def swapped(pairs: Pairs) -> str:
    """Say which two parts are swapped in all answers, if that is all that is wrong; None, where right, has no parts.

    >>> swapped([([2, 1], [1, 2]), (None, None)])
    'Parts 1 and 2 are swapped.'
    """
    pairs = [pair for pair in pairs if pair != (None, None)]
    size = num_parts([answer for pair in pairs for answer in pair]) or 0
    for one, other in combinations(range(size), 2):
        order = [{one: other, other: one}.get(part, part) for part in range(size)]
        if all(same([got[part] for part in order], right) for got, right in pairs):
            return f"Parts {one + 1} and {other + 1} are swapped."
    return ""


def _as_given(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say which argument was given back: as it is, that of one rank, or those of all ranks together."""
    if not given or len(given) != len(pairs):
        return ""
    names = [
        name for name in given[0] if all(isinstance(each.get(name), list) and leaves(each[name]) for each in given)
    ]
    for name in names:
        if all(same(got, each[name]) for (got, _), each in zip(pairs, given)):
            return f"This is `{name}`, as it was given."
    if not is_on_ranks(given):
        return ""
    for name in names:
        blocks = [
            ([got for got, _ in block], [each[name] for each in of_ranks])
            for block, of_ranks in zip(_blocks(pairs, given), _blocks(given, given))
        ]
        for rank in range(max(len(values) for _, values in blocks)):
            if all(rank < len(values) and all(same(got, values[rank]) for got in gots) for gots, values in blocks):
                return f"All ranks have `{name}` of rank {rank}, as it was given."
        tensors: list[Any] = [(_all_tensors(gots), _all_tensors(values)) for gots, values in blocks]
        if any(gots is None or values is None or not _of_one_shape(values) for gots, values in tensors):
            continue
        for text, function in TOGETHER.items():
            if all(all(_close(got, function(torch.stack(values))) for got in gots) for gots, values in tensors):
                return f"This is `{name}` of all ranks, {text}."
    return ""


TOGETHER: dict[str, Callable] = {
    "added up": lambda x: x.sum(0),
    "averaged": lambda x: x.mean(0),
    "of which the largest number was taken at each place": lambda x: x.amax(0),
    "of which the smallest number was taken at each place": lambda x: x.amin(0),
    "joined": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    "stacked": lambda x: x,
}


def _all_tensors(values: list) -> list[torch.Tensor] | None:
    tensors = [_tensor(value) for value in values]
    return None if any(each is None for each in tensors) else tensors  # pyright: ignore[reportReturnType]


def _of_one_shape(tensors: Sequence[torch.Tensor]) -> bool:
    return len({each.shape for each in tensors}) == 1


def _blocks(values: Sequence, given: Sequence[dict]) -> Iterator:
    """Yield what belongs to all ranks, case by case."""
    start = 0
    while start < len(values):
        end = start + given[start][RANKS]
        yield values[start:end]
        start = end


def _over_ranks(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say what holds between the answers of one rank and those of the others."""
    if not is_on_ranks(given):
        return ""
    blocks: list[Any] = [_tensors(block) for block in _blocks(pairs, given)]
    blocks = [block for block in blocks if block is None or not all(_close(got, right) for got, right in block)]
    if None in blocks:
        return ""
    for said, holds in OVER_RANKS.items():
        if all(holds(*zip(*block)) for block in blocks):
            return said
    for dim in (0, 1):
        if all(_are_pieces(*zip(*block), dim=dim) for block in blocks):
            return f"Joined along dim {dim}, the ranks' answers are the right one: each rank has its piece alone."
        if all(_are_pieces(right, got, dim=dim) for got, right in (zip(*block) for block in blocks)):
            return f"This is the whole, and right is the rank's own piece of it, along dim {dim}."
    for rank in range(max(len(block) for block in blocks)):
        if all(_all_have(rank, *zip(*block)) for block in blocks):
            return f"All ranks have what rank {rank} should have."
    return ""


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.stack(tuple(tensors)).sum(0) if len({each.shape for each in tensors}) == 1 else None


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    return all(_close(tensors[0], each) for each in tensors)


def _adds_up(got, right, times=lambda n: 1) -> bool:
    total = _sum(got)
    return (
        total is not None
        and _are_alike(right)
        and not _are_alike(got)
        and _is_telling([*right[0].flatten().tolist(), 2, 3])
        and _close(total * times(len(got)), right[0])
    )


def _was_added_up(got, right, times=lambda n: 1) -> bool:
    total = _sum(right)
    return total is not None and not _are_alike(right) and all(_close(each, total * times(len(got))) for each in got)


def _shifted(by: Callable[[int, int], int]) -> Callable:
    def holds(got, right) -> bool:
        return not _are_alike(right) and all(_close(each, right[by(rank, len(got))]) for rank, each in enumerate(got))

    return holds


OVER_RANKS: dict[str, Callable] = {
    "Added up over the ranks, your answers are the right one: each rank has its part of a sum.": _adds_up,
    "The mean of the ranks' answers is the right one: each rank has its own.": lambda got, right: _adds_up(
        got, right, lambda n: 1 / n
    ),
    "These are the right answers of all ranks, added up. Each rank should have its own.": _was_added_up,
    "These are the right answers of all ranks, averaged. Each rank should have its own.": lambda got, right: (
        _was_added_up(got, right, lambda n: 1 / n)
    ),
    "Each rank has what the next rank should have.": _shifted(lambda rank, n: (rank + 1) % n),
    "Each rank has what the rank before it should have.": _shifted(lambda rank, n: (rank - 1) % n),
    "The ranks' answers are in reverse: rank 0 has what the last rank should have.": _shifted(
        lambda rank, n: n - 1 - rank
    ),
}


def _are_pieces(pieces, whole, dim: int) -> bool:
    """Whether each whole consists of all pieces, joined."""
    if (
        any(each.dim() <= dim for each in pieces)
        or len({(*each.shape[:dim], *each.shape[dim + 1 :]) for each in pieces}) > 1
    ):
        return False
    joined = torch.cat(tuple(pieces), dim)
    return len(pieces) > 1 and all(_close(joined, each) for each in whole)


def _all_have(rank: int, got, right) -> bool:
    return rank < len(right) and not _are_alike(right) and all(_close(each, right[rank]) for each in got)


def _order(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say how right values are ordered, if the order is all that is wrong."""
    flat = [(leaves(got), leaves(right)) for got, right in pairs]
    if not all(len(got) > 1 and same(sorted(got, key=str), sorted(right, key=str)) for got, right in flat):
        return ""
    num_pieces = [each[RANKS] for each, pair in zip(given, pairs) if not same(*pair)] if is_on_ranks(given) else []
    pairs = [pair for pair in pairs if not same(*pair)]
    if all(same(_turned(got), right) for got, right in pairs):
        return "These are the right values, transposed."
    if all(isinstance(right, list) and same(got, right[::-1]) for got, right in pairs):
        return "These are the right values in reverse order."
    if not all(_form(got) == _form(right) for got, right in pairs):
        return ""
    depths = {_depth(right) for _, right in pairs}
    if depths == {1}:
        return f"These are the right values, in a different order. {where(pairs, ())}".strip()
    if all(same(sorted(got, key=str), sorted(right, key=str)) for got, right in pairs):
        return "The rows are right, and in a different order."
    if depths == {3} and all(same(*map(_sorted_parts, pair)) for pair in pairs):
        return "The rows are right in each part, and in a different order."
    if depths == {2} and all(same(list(map(_sorted, got)), list(map(_sorted, right))) for got, right in pairs):
        return "Each row has the right values, in a different order."
    if len(num_pieces) == len(pairs) and _was_read_row_by_row(pairs, num_pieces):
        return (
            "The right pieces were put one after the other, and the numbers then read row by row, as `reshape` and "
            "`view` do. The pieces belong side by side: join them along dim 1."
        )
    return _together(pairs) or "These are the right values, in wrong places."


def _sorted(row: list) -> list:
    return sorted(row, key=str)


def _sorted_parts(parts: list) -> list:
    return list(map(_sorted, parts))


def _was_read_row_by_row(pairs: Pairs, num_pieces: Sequence[int]) -> bool:
    tensors = _tensors(pairs) or []
    return bool(tensors) and all(
        right.dim() == 2
        and right.size(1) % num == 0
        and _close(got, right.unflatten(1, (num, -1)).transpose(0, 1).reshape(right.shape))
        for (got, right), num in zip(tensors, num_pieces)
    )


def _together(pairs: Pairs) -> str:
    """Say which two ranks stand in one group, and should not."""
    for got, right in pairs:
        values = leaves(right)
        if _depth(right) != 2 or len(set(values)) < len(values) or not all(type(value) is int for value in values):
            continue
        row_of = {value: row for row in right for value in row}
        for row in got:
            other = next((each for each in row if row_of[each] is not row_of[row[0]]), None)
            if other is not None:
                return (
                    f"These are different groups: {row[0]} is with {other} in {row}, and belongs to {row_of[row[0]]}."
                )
    return ""


def _turned(value):
    """Return rows as columns."""
    return [list(column) for column in zip(*value)] if len(shape_of(value)) == 2 else None


def _depth(value) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _form(value) -> list | None:
    """Return nested lists without what is in them."""
    return [_form(item) for item in value] if isinstance(value, list) else None


def _other_shape(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say which shape a wrong answer has, if it is not that of the right one."""
    del given
    got, right = next(pair for pair in pairs if not same(*pair))
    if shape_of(got) != shape_of(right) and same(leaves(got), leaves(right)):
        return (
            f"These are the right values, in a different shape: {shape_of(got)}, not {shape_of(right) or 'one number'}."
        )
    if shape_of(got) == shape_of(right) or not isinstance(right, list):
        return ""
    if _form(got) == _form(right) or not isinstance(got, list):
        return ""
    if len(got) == len(right) and _depth(right) > 1:
        place = next(place for place, (one, other) in enumerate(zip(got, right)) if _form(one) != _form(other))
        if shape_of(got[place]) != shape_of(right[place]) and shape_of(right) == [len(right)]:
            return f"Part {place + 1} has the shape {shape_of(got[place])}, not {shape_of(right[place])}."
    return f"The shape is {shape_of(got)}, not {shape_of(right)}."


def _missing(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say what is missing where all that is there is right."""
    del given
    got, right = next(pair for pair in pairs if not same(*pair))
    if isinstance(right, list) and len(right) > 1:
        for part, value in enumerate(right):
            if same(got, value) and all(
                same(*pair) or same(pair[0], pair[1][part : part + 1][0]) for pair in pairs if len(pair[1]) > part
            ):
                return f"This is part {part + 1} of the {len(right)}: return all."
        if isinstance(got, list) and got and len(got) < len(right) and same(got, right[: len(got)]):
            return f"What is there is right, but these are only the first {len(got)} of {len(right)}."
        if isinstance(got, list) and len(got) > len(right) and same(got[: len(right)], right):
            return f"The first {len(right)} are right, and there are {len(got) - len(right)} too many."
    return ""


def sizes_of(arguments: dict) -> dict[str, float]:
    """Return the numbers among arguments by name, and the sizes of their tensors.

    >>> sizes_of({"t": 2, "x": [[1, 2, 3], [4, 5, 6]], "flag": True})
    {'t': 2, 'x.shape[0]': 2, 'x.shape[1]': 3}
    """
    found = {}
    for name, value in arguments.items():
        if type(value) in (int, float):
            found[name] = value
        elif isinstance(value, list) and all(type(leaf) in (int, float, bool) for leaf in leaves(value)):
            shape = shape_of(value)
            found |= {
                f"{name}.shape[{dim}]" if len(shape) > 1 else f"len({name})": size for dim, size in enumerate(shape)
            }
        elif isinstance(value, list):
            found[f"len({name})"] = len(value)
    return found


def _factor(pairs: Pairs, given: Sequence[dict], named: bool = True) -> str:
    """Say which factor is between all answers and the right ones, and which sizes give it."""
    if (tensors := _tensors(pairs)) is None:
        return ""
    factors = []
    for got, right in tensors:
        if got.shape != right.shape:
            return ""
        numbers = right.flatten().nonzero().flatten()
        factor = float(got.flatten()[numbers[0]] / right.flatten()[numbers[0]]) if len(numbers) else None
        if factor == 0 or not _close(got, (factor or 1) * right):
            return ""
        factors.append(factor)
    known = [factor for factor in factors if factor is not None]
    numbers = {number for _, right in tensors for number in right.flatten().tolist()}
    names = _names_of(factors, given) if named else []
    if len(names) > 3:
        names = []  # chance
    that = " or ".join(names)
    if known and same(known[1:], known[:-1]) and len(numbers) > 1:
        return f"Every number is {show(known[0])} times the right one.{f' That is {that}.' if that else ''}"
    return f"Every number is {that} times the right one." if that and len(known) > 1 else ""


def _factor_of_each_rank(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say which factor is between the answer of each rank and the right one, in one case, if the factors differ."""
    if not is_on_ranks(given) or given[0][RANKS] != len(pairs) or (tensors := _tensors(pairs)) is None:
        return ""
    factors = []
    for got, right in tensors:
        there = right.flatten().nonzero().flatten()
        if got.shape != right.shape or len({round(float(each), 6) for each in right.flatten()[there]}) < 2:
            return ""
        factors.append(float(got.flatten()[there[0]] / right.flatten()[there[0]]))
        if factors[-1] == 0 or not _close(got, factors[-1] * right):
            return ""
    times = [f"{show(factor)} on rank {rank}" for rank, factor in enumerate(factors)]
    return f"Every number is a multiple of the right one, but not the same on all ranks: {_and(times)}."


def _rounded_to_few_bits(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say if the numbers are right up to the rounding of a short dtype, and such as it can hold."""
    del given
    if (tensors := _tensors(pairs)) is None or any(got.shape != right.shape for got, right in tensors):
        return ""
    got, right = (torch.cat([each.flatten() for each in values]) for values in zip(*tensors))
    for dtype in (torch.float16, torch.bfloat16):
        is_held = torch.equal(got.to(dtype).double(), got) and not torch.equal(right.to(dtype).double(), right)
        if is_held and torch.allclose(got, right, rtol=2 * torch.finfo(dtype).eps, atol=0):
            name = str(dtype).removeprefix("torch.")
            return f"These are the right numbers as {name} rounds them: compute in the dtype that was given."
    return ""


def _names_of(factors: list, given: Sequence[dict]) -> list[str]:
    """Return what gives these factors: a size, its inverse, its root or square, or a product of sizes."""
    sizes = [sizes_of(each) for each in given]
    known = [(factor, each) for factor, each in zip(factors, sizes) if factor is not None]
    if not known or len(sizes) != len(factors) or all(same(factor, -1) for factor, _ in known):
        return []
    names = [name for name in sizes[0] if all(each.get(name, 0) > 0 for each in sizes)]
    is_one_number = len({round(factor, 9) for factor, _ in known}) < 2
    for powers in ((1, -1), () if is_one_number else (2, 0.5, -0.5, -2)):
        found = [
            _product_text({name: power})
            for name, power in product(names, powers)
            if all(same(factor, each[name] ** power) for factor, each in known)
        ]
        if found:
            return found
    if is_one_number:
        return []  # roots, and two sizes, give almost any number
    found = (
        _product_text(powers)
        for powers in _products(names)
        if all(same(factor, _value(powers, each)) for factor, each in known)
    )
    return list(itertools.islice(found, 1))


def _products(names: list[str]) -> Iterator[dict[str, int]]:
    """Yield products and quotients of two or three sizes, as the power of each."""
    for number in (2, 3):
        for chosen in combinations(names, number):
            for powers in product((1, -1), repeat=number):
                yield dict(zip(chosen, powers))


def _value(powers: Mapping[str, float], sizes: dict[str, float]) -> float:
    return math.prod(sizes[name] ** power for name, power in powers.items())


def _product_text(powers: Mapping[str, float]) -> str:
    """Return a product of sizes as text.

    >>> _product_text({"n": 1, "t": -1, "p": -1}), _product_text({"t": -0.5})
    ('n / (t * p)', '1 / the root of t')
    """
    words = {1: "{}", 2: "the square of {}", 0.5: "the root of {}"}
    above = [words[power].format(name) for name, power in powers.items() if power > 0]
    below = [words[-power].format(name) for name, power in powers.items() if power < 0]
    text = " * ".join(above) or "1"
    if not below:
        return text
    return f"{text} / {below[0]}" if len(below) == 1 else f"{text} / ({' * '.join(below)})"


def _nearly(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say about which factor is between large numbers that were rounded."""
    del given
    if (tensors := _tensors(pairs)) is None or any(got.shape != right.shape for got, right in tensors):
        return ""
    got, right = (torch.cat([each.flatten() for each in values]) for values in zip(*tensors))
    largest = int(right.abs().argmax())
    if len(right) < 3 or int((right.abs() > 99).sum()) < 2:
        return ""
    times = float(got[largest] / right[largest])
    if abs(times - 1) < 0.05 or not torch.allclose(got, times * right, rtol=0.01, atol=max(1.0, times)):
        return ""
    return f"Every number is about {times:.2f} times the right one."


def _offset(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say by how much all numbers are too large or too small, if that is one number or a product of sizes."""
    if (tensors := _tensors(pairs)) is None or any(got.shape != right.shape for got, right in tensors):
        return ""
    offsets = []
    for got, right in tensors:
        differences = (got - right).flatten()
        if not len(differences) or not _close(differences, differences[:1].expand_as(differences)):
            return ""
        offsets.append(float(differences[0]))
    if len({number for _, right in tensors for number in right.flatten().tolist()}) < 3:
        return ""
    if same(offsets[1:], offsets[:-1]):
        return f"Every number is {show(abs(offsets[0]))} too {'large' if offsets[0] > 0 else 'small'}."
    sizes = [sizes_of(each) for each in given]
    if len(sizes) != len(offsets) or len(offsets) < 3 or len({round(each, 9) for each in offsets}) < 2:
        return ""
    names = [name for name in sizes[0] if all(each.get(name, 0) > 0 for each in sizes)]
    for powers in ({name: power} for power in (1, 2) for name in names), _products(names):
        for each in powers:
            times = [offset / _value(each, of_case) for offset, of_case in zip(offsets, sizes)]
            if same(times[1:], times[:-1]):
                factor = "" if same(abs(times[0]), 1) else f"{show(abs(times[0]))} * "
                return f"It is too {'large' if times[0] > 0 else 'small'} by {factor}{_product_text(each)}."
    return ""


def _by_an_argument(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say if what is too much, or too little, is a multiple of an argument, or a step from it of a different length."""
    if (tensors := _tensors(pairs)) is None or any(got.shape != right.shape for got, right in tensors):
        return ""
    if not given or len(given) != len(pairs):
        return ""
    for name in given[0]:
        values: list[Any] = [_tensor(each.get(name)) if isinstance(each.get(name), list) else None for each in given]
        if any(value is None or not _fits(value, got) for value, (got, _) in zip(values, tensors)):
            continue
        times = _multiple((got - right, value.expand_as(got)) for value, (got, right) in zip(values, tensors))
        if times:
            return f"It is too {'large' if times > 0 else 'small'} by {show(abs(times))} times `{name}`."
        steps = [
            (got - value, right - value) for value, (got, right) in zip(values, tensors) if value.shape == got.shape
        ]
        times = _multiple(steps) if len(steps) == len(tensors) else None
        if times and not same(times, 1):
            return f"The change from `{name}` is {show(times)} times what it should be."
    return ""


def _fits(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor has as many columns, so that it can be added to each row."""
    return value.dim() > 0 and value.shape == other.shape[other.dim() - value.dim() :]


def _multiple(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """Return how many times the second of each pair the first one is, if that is one number for all."""
    one, other = (torch.cat([each.flatten() for each in tensors]) for tensors in zip(*pairs))
    there = other.nonzero().flatten()
    if len({round(float(each), 6) for each in other[there]}) < 2:
        return None
    times = float(one[there[0]] / other[there[0]])
    return times if _close(one, times * other) else None


def _function(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say which function of the right numbers the wrong ones are."""
    del given
    if (tensors := _tensors(pairs)) is None or any(got.shape != right.shape for got, right in tensors):
        return ""
    if not _is_telling([number for _, right in tensors for number in right.flatten().tolist()]):
        return ""
    for text, function in FUNCTIONS.items():
        if all(_close(got, function(right)) for got, right in tensors):
            return f"Every number is {text} the right one."
    for text, function in ROUNDINGS.items():
        if all(_close(got, function(right)) for got, right in tensors):
            return f"Every number is the right one {text}."
    return ""


def _along_a_dim(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say if an answer was added up, or averaged, along a dim, or should have been."""
    del given
    if (tensors := _tensors([pair for pair in pairs if not same(*pair)])) is None:
        return ""
    for dim, (verb, function) in product((0, 1), {"added up": torch.sum, "averaged": torch.mean}.items()):
        if all(right.dim() > dim and right.numel() > 1 and _close(got, function(right, dim)) for got, right in tensors):
            return f"This is the right answer, {verb} along dim {dim}."
        if all(got.dim() > dim and right.numel() > 1 and _close(function(got, dim), right) for got, right in tensors):
            return f"Your answer has one dim too many: {verb} along dim {dim} it is right."
    return ""


def _zeros(pairs: Pairs, given: Sequence[dict]) -> str:
    """Say if nothing but zeros came, and that nobody may have written to them."""
    tensors = _tensors(pairs)
    if not is_on_ranks(given) or tensors is None or not all(got.shape == right.shape for got, right in tensors):
        return ""
    if any(bool(got.any()) for got, _ in tensors) or sum(right.numel() for _, right in tensors) < 2:
        return ""
    return (
        "Every number is 0. If you return new zeros into which a collective should have written: of its two tensors, "
        "the output comes first."
    )


FACTS = (
    *(_zeros, _as_given, _over_ranks, _order, _missing, _other_shape, _rounded_to_few_bits, _factor),
    *(_factor_of_each_rank, _offset, _by_an_argument, _function, _along_a_dim, _nearly),
)


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
