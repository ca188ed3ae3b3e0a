"""The bug museum: silent faults of real systems, each put into labkit for one run.

museum.healthy()           # what a run without a fault shows
museum.case(3).run()       # what a run with fault number 3 shows
museum.case(3).check("row bias added t times")

``museum`` is that of notebook 08, with twelve faults, and ``gpu_museum`` has one more there, which only GPUs have;
``context_museum`` is that of notebook 13, with three more, ``sharding_museum`` that of notebook 14, with three more,
and ``experts_museum`` that of notebook 15, with ten more.
"""

from course.exercises.base import Verdict
from course.exercises.record import note_solved, solved
from course.museum.cases import CONTEXT, EXPERTS, GPUS, MAIN, SHARDING, Case, Wing, cases_of, nothing
from course.museum.symptoms import Tables


class Museum:
    """All cases of a wing; solved when each has been named."""

    def __init__(self, name: str, notebook: str, wing: Wing):
        self.name, self.notebook, self._wing, self.cases = name, notebook, wing, cases_of(wing)

    def case(self, number: int) -> Case:
        """Return a case, by its number from 1 up.

        Raises:
            ValueError: there is no such case.
        """
        if number not in range(1, len(self.cases) + 1):
            raise ValueError(f"there is no case {number!r}: use 1 to {len(self.cases)}")
        return self.cases[number - 1]

    def healthy(self) -> Tables:
        """Return what the run shows without a fault."""
        return self._wing.symptoms(nothing)

    def names(self) -> None:
        """Print the names of the faults, in alphabetical order; a museum of few also names those of the like."""
        known = [*MAIN.faults, *CONTEXT.faults, *SHARDING.faults]
        if self._wing in (MAIN, EXPERTS):
            known = self._wing.faults
        if self._wing is GPUS:
            known = [*MAIN.faults, *GPUS.faults]
        print("\n".join(sorted(fault.name for fault in known)))

    def check(self) -> None:
        """Say how many cases you have named so far."""
        print(self.verdict().text)

    def verdict(self) -> Verdict:
        """Return what `check` prints, as data."""
        left = [case.number for case in self.cases if case.name not in solved()]
        if not left:
            note_solved(self.name)
            return Verdict("passed", f"{self.name}: all {len(self.cases)} cases named.")
        text = (
            f"{self.name}: {len(self.cases) - len(left)} of {len(self.cases)} named; left: {', '.join(map(str, left))}."
        )
        return Verdict("not attempted" if len(left) == len(self.cases) else "wrong", text)


museum = Museum("bug_museum", "08", MAIN)
context_museum = Museum("context_museum", "13", CONTEXT)
sharding_museum = Museum("sharding_museum", "14", SHARDING)
gpu_museum = Museum("gpu_museum", "08", GPUS)
experts_museum = Museum("experts_museum", "15", EXPERTS)
