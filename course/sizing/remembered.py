"""Remembers what a function of a plan returned, by the fields on which it depends: plans that share them share it."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter

MOST = 100_000  # entries of each function, after which it starts anew


def remembered(*fields: str) -> Callable:
    """Make a function of a plan, and of whatever follows, remember its results by these fields of the plan.

    It must depend on no others, which `course.sizing.search` takes for granted, and nobody may change what it returns.
    A model counts as the same if it is the same object: to hash all of its fields takes longer than most of these
    functions. An entry keeps it, so no other object can get its identity.
    """
    key = attrgetter(*(name for name in fields if name != "model"))

    def decorate(function: Callable) -> Callable:
        known = {}

        @wraps(function)
        def look_up(plan, *rest):
            at = id(plan.model), key(plan), rest
            if (entry := known.get(at)) is None:
                if len(known) >= MOST:
                    known.clear()
                entry = known[at] = function(plan, *rest), plan.model
            return entry[0]

        return look_up

    return decorate
