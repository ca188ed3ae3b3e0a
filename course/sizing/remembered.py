"""Remembers what a function of a plan returned, by the fields on which it depends: plans that share them share it."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter

MOST = 100_000  # entries of each function, after which it starts anew


def remembered(*fields: str) -> Callable:
    """Make a function of a plan, and of whatever follows, remember its results by these fields of the plan.

    It must depend on no others, which `course.sizing.search` takes for granted, and nobody may change what it returns.
    """
    key = attrgetter(*fields)

    def decorate(function: Callable) -> Callable:
        known = {}

        @wraps(function)
        def look_up(plan, *rest):
            at = key(plan), rest
            if (found := known.get(at)) is None:
                if len(known) >= MOST:
                    known.clear()
                found = known[at] = function(plan, *rest)
            return found

        return look_up

    return decorate
