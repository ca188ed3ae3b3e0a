"""What a wrong answer tells: which typical mistake gives the same values, or how they are related to the right ones."""

import math

from course.exercises.values import leaves, same, show

NONE = (
    "None is what a function gives back that does not end with `return`, whatever it prints or changes. So does "
    "dist.all_reduce, which works in place: return the tensor that you gave it."
)


def explain(got: list, right: list, mistakes: list[tuple[str, list]]) -> str:
    """Return what a report says of wrong answers, given those in all cases or on all ranks; "" if nothing is known.

    Each of the ``mistakes`` is its advice and what it answers.

    >>> explain([1, 3], [1, 2], [("You counted from 1.", [1, 3])])
    'What this usually is: You counted from 1.'
    """
    advice = _nearest(got, right, mistakes) or _by_parts(got, right, mistakes)
    if not advice and _has_none(got) and not _has_none(right):
        advice = NONE
    if advice:
        return f"What this usually is: {advice}"
    if len(got) > 2 and same(got[1:], got[:-1]) and not same(right[1:], right[:-1]):
        return "The answer is always the same: does it look at what it is given?"
    return _relation(list(zip(got, right)))


def _has_none(answers: list) -> bool:
    return any(value is None or "NoneType" in str(value) for value in leaves(answers))


def _nearest(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for the mistake that gives all wrong answers, and of the others the most."""
    wrong = [place for place, (answer, wanted) in enumerate(zip(got, right)) if not same(answer, wanted)]
    matches = [
        (sum(map(same, got, answers)), advice)
        for advice, answers in mistakes
        if all(same(got[place], answers[place]) for place in wrong)
    ]
    most, advice = max(matches, key=lambda match: match[0], default=(0, None))
    return advice if 2 * most > len(got) else None


def _by_parts(got: list, right: list, mistakes: list[tuple[str, list]]) -> str | None:
    """Return the advice for several mistakes at once, if each wrong part is what one gives that has only this wrong."""
    found: list = []
    size = _num_parts([*got, *right]) or 0
    for part in range(size):
        if not all(same(answer[part], wanted[part]) for answer, wanted in zip(got, right)):
            alone = [[*wanted[:part], answer[part], *wanted[part + 1 :]] for answer, wanted in zip(got, right)]
            found.append(next((advice for advice, answers in mistakes if same(answers, alone)), None))
    return None if None in found else " And: ".join(dict.fromkeys(found))


def _num_parts(answers: list) -> int | None:
    """Return of how many parts, up to four, each answer consists; None if they differ."""
    sizes = {len(each) if isinstance(each, list) else 0 for each in answers}
    return size if len(sizes) == 1 and 1 < (size := sizes.pop()) <= 4 else None


def _relation(pairs: list[tuple]) -> str:
    """Say what holds between all answers and the right ones, if it is something simple.

    >>> _relation([([2, 4, 6], [1, 2, 3])])
    'Every number is 2 times the right one.'
    >>> _relation([([1, [5, 6]], [1, [6, 5]])])
    'Only part 2 of the 2 is wrong. These are the right values, in a different order or shape.'
    """
    found = ""
    if size := _num_parts([answer for pair in pairs for answer in pair]):
        wrong = {part for got, right in pairs for part in range(size) if not same(got[part], right[part])}
        if len(wrong) == 1:
            [part] = wrong
            found = f"Only part {part + 1} of the {size} is wrong. "
            pairs = [(got[part], right[part]) for got, right in pairs]
    flat = [(leaves(got), leaves(right)) for got, right in pairs]
    if all(len(got) > 1 and same(sorted(got, key=str), sorted(right, key=str)) for got, right in flat):
        found += "These are the right values, in a different order or shape."
    elif all(len(got) == len(right) for got, right in flat):
        numbers = [both for got, right in flat for both in zip(got, right)]
        are_numbers = all(type(value) in (int, float) and math.isfinite(value) for both in numbers for value in both)
        if are_numbers and len({right for _, right in numbers}) > 1:
            factor = next(got / right for got, right in numbers if right)
            if factor and all(same(got, factor * right) for got, right in numbers):
                found += f"Every number is {show(factor)} times the right one."
    return found.strip()
