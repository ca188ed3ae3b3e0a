"""The bug museum of notebook 11: twelve silent faults of real systems, each put into labkit for one run.

museum.healthy()           # what a run without a fault shows
museum.case(3).run()       # what a run with fault number 3 shows
museum.case(3).check("row bias added t times")
"""

from course.exercises.base import Verdict
from course.exercises.record import note_solved, solved
from course.museum.cases import CASES, NAMES, Case, Symptoms, nothing, symptoms


class Museum:
    """All cases; solved when each has been named."""

    name, notebook = "bug_museum", "11"

    def case(self, number: int) -> Case:
        """Return case 1 to 12.

        Raises:
            ValueError: there is no such case.
        """
        if number not in range(1, len(CASES) + 1):
            raise ValueError(f"there is no case {number!r}: use 1 to {len(CASES)}")
        return CASES[number - 1]

    def healthy(self) -> Symptoms:
        """Return what the run shows without a fault."""
        return symptoms(nothing)

    def names(self) -> None:
        """Print the names of the faults, in alphabetical order."""
        print("\n".join(NAMES))

    def check(self) -> None:
        """Say how many cases you have named so far."""
        print(self.verdict().text)

    def verdict(self) -> Verdict:
        """Return what `check` prints, as data."""
        left = [case.number for case in CASES if case.name not in solved()]
        if not left:
            note_solved(self.name)
            return Verdict("passed", f"bug_museum: all {len(CASES)} cases named.")
        text = f"bug_museum: {len(CASES) - len(left)} of {len(CASES)} named; left: {', '.join(map(str, left))}."
        return Verdict("not attempted" if len(left) == len(CASES) else "wrong", text)


museum = Museum()
