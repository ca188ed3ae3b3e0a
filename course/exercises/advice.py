"""Explains a wrong answer: by a typical mistake that gives the same values, or by how they relate to the right ones."""

import math
import re
from collections.abc import Sequence
from itertools import combinations

from course.exercises.values import FREED, leaves, same, show
from labkit.sizes import ranks_text

RANKS = "the number of ranks"

NONE = (
    "None is what a function gives back if it does not end with `return`, whatever it prints or changes. "
    "dist.all_reduce gives back None too, because it works in place: return the tensor that you gave it."
)


ERRORS = {
    "implicitly created only for scalar": "backward() starts from one number: take the mean or the sum of yours first.",
    "does not require grad": "backward() got a number that was computed without autograd: under torch.no_grad(), "
    "through .item(), .detach() or torch.tensor(...), or in a tensor that a collective has filled: autograd does not "
    "see what torch.distributed does.",
    "NoneType": "None comes from a function that does not end with `return`, and from dist.all_reduce, which works in "
    "place. It is also the `.grad` of a tensor that backward did not reach, or that was computed from others.",
    "Invalid process group specified": "This rank is not a member of the group, and only members may call it.",
    "torch.Tensor but got <class '(int|float|list)'>": "A collective takes tensors, and works in place. Put the "
    "number into one first: `total = torch.tensor(float(...))`. The sum is in `total` afterwards. A list goes, too.",
    "killed by SIGABRT": "C++ code ends a rank that gets more or fewer bytes than it expects. In a collective, what "
    "one rank sends to another must be as long as what that one receives into: print the sizes of the tensors (and the "
    "splits) on each rank. Which of them depends on what is in this rank's data?",
    "Split sizes|divide equally|in->size == out->size": "dist.all_to_all_single(output, input, splits of the output, "
    "splits of the input): each splits must add up to the rows of their tensor. Without splits, each rank gets equally "
    "many rows, and both tensors are equally long.",
    "must be world size|size list": "The list must have one tensor per rank: `dist.get_world_size()`.",
    "different dtypes|same dtype|expected scalar type": "The tensors have different dtypes. Make new ones like those "
    "that were given: `torch.empty_like(x)`, or `x.new_zeros(...)`.",
    "reduce_scatter of|outputShape|times world size": "Reduce-scatter gives every rank an equal part: its input must "
    "be as long as all shards together, padding included.",
    "alltoall: invalid tensor size": "With gloo, dist.all_to_all sends tensors of one size. dist.all_to_all_single "
    "sends uneven parts of one tensor, given the splits.",
    "storage of size 0": "This memory was freed by resize_(0) before it was used.",
    "cannot be multiplied|must match|Sizes of tensors|view size|invalid for input|1-d|number of dimensions|"
    "equal to source|Mismatch in shape": "The shapes do not fit.",
    "not implemented for": "There is no such operation for this dtype. Did an index or a count become a float, as "
    "`/` makes it? `//` does not.",
    "empty sequence|argument is empty|non-empty list|empty tensor|numel.. == 0": "A list or a tensor is empty here. "
    "What should happen then?",
    "positional argument|keyword argument": "The check calls your function with the arguments of the stub: keep them.",
    "index .*out of": "An index is too large: the last is one less than the number of items.",
}
"""What to say of an error by what is in its message, if it is not a typical mistake."""

OWN_ERROR = "Your function raises this error itself. But what it refuses here is allowed, and has a right answer."
UNWRITTEN = (
    "During a check, new memory, as from `torch.empty`, is full of nan, or of the largest whole number. You use some "
    "that nobody has written to: begin with `torch.zeros`, or fill it. (0/0 is nan, too.)"
)


def explain(got: list, right: list, mistakes: list[tuple[str, list]], given: Sequence[dict] = ()) -> str:
    """Return what a report says of wrong answers, given those in all cases or on all ranks; "" if nothing is known.

    Each of the ``mistakes`` is its advice and what it answers. ``given`` has the arguments for each answer by name;
    `RANKS` is one of them if the answers are those of ranks.

    >>> explain([1, 3], [1, 2], [("You counted from 1.", [1, 3])])
    'What this usually is: You counted from 1.'
    """
    advice = next(filter(None, (find(got, right, mistakes) for find in (_nearest, _by_parts, _by_cases))), None)
    if not advice and None in leaves(got) and None not in leaves(right):
        advice = NONE
    if advice:
        return f"What this usually is: {advice}"
    for place, value in enumerate(got):
        if hasattr(value, "message"):
            is_own = re.search(r"(?m)^ *(in|at) (?!labkit/).*: +(raise|assert) ", value.where)
            return OWN_ERROR if is_own else _of_error(value.message, given[place:])
    if FREED in leaves(got):
        return "The memory of this result was freed by resize_(0). Free what you gathered, not what you return."
    if any(map(_is_unwritten, leaves(got))) and not any(map(_is_unwritten, leaves(right))):
        return UNWRITTEN
    return _relation(list(zip(got, right)), given)


def _is_unwritten(value) -> bool:
    return value != value or value in (2**31 - 1, 2**63 - 1)


def _of_error(message: str, given: Sequence[dict]) -> str:
    words = next((words for part, words in ERRORS.items() if re.search(part, " ".join(message.split()))), "")
    shapes = [f"{name} {shape}" for name, value in (given[0] if given else {}).items() if (shape := _shape(value))]
    return f"{words} Given were {', '.join(shapes)}." if "shapes" in words and shapes else words


def _shape(value) -> list[int]:
    """Return the shape of nested lists, as far down as it is one."""
    shapes = [_shape(item) for item in value] if isinstance(value, list) else []
    return [len(shapes), *(shapes[0] if all(shape == shapes[0] for shape in shapes) else [])] if shapes else []


def _nearest(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for the mistake that gives all wrong answers, and of the others the most."""
    wrong = [place for place, (answer, wanted) in enumerate(zip(got, right)) if not same(answer, wanted)]
    values = [place for place in wrong if not hasattr(got[place], "message")] or wrong  # errors have many messages
    matches = [
        (sum(map(same, got, answers)), advice)
        for advice, answers in mistakes
        if all(same(got[place], answers[place]) for place in values)
    ]
    most, advice = max(matches, key=lambda match: match[0], default=(0, None))
    return advice if 4 * most >= 3 * len(got) else None


def _by_parts(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for several mistakes at once, if each wrong part is what one gives that has only this wrong."""
    found: list = []
    size = _num_parts([*got, *right]) or 0
    for part in range(size):
        if not all(same(answer[part], wanted[part]) for answer, wanted in zip(got, right)):
            alone = [[*wanted[:part], answer[part], *wanted[part + 1 :]] for answer, wanted in zip(got, right)]
            found.append(next((advice for advice, answers in mistakes if same(answers, alone)), None))
    return None if None in found else " And: ".join(dict.fromkeys(found))


def _by_cases(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for several mistakes at once, each of which gives the wrong answers of some cases."""
    found, left = [], {place for place, pair in enumerate(zip(got, right)) if not same(*pair)}
    for advice, answers in mistakes:
        wrong = {place for place, pair in enumerate(zip(answers, right)) if not same(*pair)}
        if wrong & left and all(same(got[place], answers[place]) for place in wrong):
            found, left = [*found, advice], left - wrong
    return None if left else " And: ".join(dict.fromkeys(found))


def _num_parts(answers: list) -> int | None:
    """Return of how many parts, up to four, each answer consists; None if they differ."""
    sizes = {len(each) if isinstance(each, list) else 0 for each in answers}
    return size if len(sizes) == 1 and 1 < (size := sizes.pop()) <= 4 else None


def _relation(pairs: list[tuple], given: Sequence[dict] = ()) -> str:
    """Say what holds between all answers and the right ones, if it is something simple.

    >>> _relation([([2, 4, 6], [1, 2, 3])], [{"t": 2}])
    'Every number is 2 times the right one. That is t.'
    >>> _relation([([1, [5, 6]], [1, [6, 5]])])
    'Only part 2 of the 2 is wrong. These are the right values, in a different order.'
    >>> _relation([(4, 5), (6, 6)], [{RANKS: 2}, {RANKS: 2}])
    'It is right on ranks [1], and wrong on [0].'
    """
    found = ""
    if size := _num_parts([answer for pair in pairs for answer in pair]):
        wrong = [part for part in range(size) if not all(same(got[part], right[part]) for got, right in pairs)]
        if len(wrong) == 1:
            [part] = wrong
            found = f"Only part {part + 1} of the {size} is wrong. "
            pairs = [(got[part], right[part]) for got, right in pairs]
        for one, other in combinations(range(size), 2):
            order = [{one: other, other: one}.get(part, part) for part in range(size)]
            if not found and all(same([got[part] for part in order], right) for got, right in pairs):
                return f"Parts {one + 1} and {other + 1} are swapped."
    more = _order(pairs) or _missing(pairs) or _other_shape(pairs) or _factor(pairs, given)
    is_right = [same(*pair) for pair in pairs]
    if not more and any(is_right) and given and RANKS in given[0]:
        ranks = [[rank for rank, each in enumerate(is_right) if each is wanted] for wanted in (True, False)]
        more = "It is right on ranks {}, and wrong on {}.".format(*map(ranks_text, ranks))
    return (found + more).strip()


def _order(pairs: list[tuple]) -> str:
    flat = [(leaves(got), leaves(right)) for got, right in pairs]
    if not all(_form(got) == _form(right) for got, right in pairs):
        return ""
    if not all(len(got) > 1 and same(sorted(got, key=str), sorted(right, key=str)) for got, right in flat):
        return ""
    return "" if all(same(got, right) for got, right in flat) else "These are the right values, in a different order."


def _form(value) -> list | None:
    """Return nested lists without what is in them."""
    return [_form(item) for item in value] if isinstance(value, list) else None


def _other_shape(pairs: list[tuple]) -> str:
    """Say which shape a wrong answer has, if it is not that of the right one."""
    got, right = next(pair for pair in pairs if not same(*pair))
    if isinstance(got, dict):
        return "This is a dict. Return what is in it, without the names."
    if _shape(got) != _shape(right) and same(leaves(got), leaves(right)):
        return f"These are the right values, in a different shape: {_shape(got)}, not {_shape(right) or 'one number'}."
    if _shape(got) == _shape(right) or not isinstance(right, list):
        return ""
    return f"The shape is {_shape(got)}, not {_shape(right)}."


def _missing(pairs: list[tuple]) -> str:
    """Say what is missing where all that is there is right."""
    got, right = next(pair for pair in pairs if not same(*pair))
    if isinstance(right, list) and len(right) > 1:
        for part, value in enumerate(right):
            if same(got, value) and all(same(*pair) or same(pair[0], pair[1][part]) for pair in pairs):
                return f"This is part {part + 1} of the {len(right)}: return all."
        if isinstance(got, list) and got and len(got) < len(right) and same(got, right[: len(got)]):
            return f"What is there is right, but these are only the first {len(got)} of {len(right)}."
    return ""


def _factor(pairs: list[tuple], given: Sequence[dict]) -> str:
    """Say which factor is between all answers and the right ones, and which argument it is."""
    factors, numbers = [], []
    for got, right in ((leaves(got), leaves(right)) for got, right in pairs):
        values = [*got, *right]
        if len(got) != len(right) or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            return ""
        factor = next((one / other for one, other in zip(got, right) if other), None)
        if factor == 0 or not all(same(one, (factor or 1) * other) for one, other in zip(got, right)):
            return ""
        factors.append(factor)
        numbers += right
    sizes = [
        {name: value if type(value) in (int, float) else 0 for name, value in arguments.items()} for arguments in given
    ]
    names = [
        f"{over}{name}"
        for name in (sizes[0] if sizes else ())
        for over, power in (("", 1), ("1/", -1))
        if all(each[name] and (f is None or same(f, each[name] ** power)) for f, each in zip(factors, sizes))
    ]
    found, that = [factor for factor in factors if factor], " or ".join(names)
    if len(set(numbers)) > 1 and found and same(found[1:], found[:-1]):
        return f"Every number is {show(found[0])} times the right one.{f' That is {that}.' if that else ''}"
    return f"Every number is {that} times the right one." if that and len(found) > 1 else ""
