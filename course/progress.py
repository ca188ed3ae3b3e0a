"""What a participant has solved and what is left, notebook by notebook: the table in Start_Here.

The exercises are not listed here a second time: every one in `course.exercises` counts, and so does the museum.
"""

import importlib
import pkgutil
from typing import Any

import course.exercises
from course.exercises.record import clear, predictions, solved
from course.museum import museum

__all__ = ["all_exercises", "clear", "exercises", "predictions", "solved", "table"]


def all_exercises() -> list[Any]:
    """Return everything that a participant can solve, notebook by notebook, in the order of its definition.

    Each has a ``name``, the number of its ``notebook`` and a ``verdict``; most are an `Exercise`.
    """
    found = []
    for module_info in pkgutil.iter_modules(course.exercises.__path__, "course.exercises."):
        module = importlib.import_module(module_info.name)
        for thing in vars(module).values():
            if not isinstance(thing, type) and hasattr(thing, "verdict"):
                found.append(thing)
    return sorted([*found, museum], key=lambda thing: thing.notebook)


def exercises() -> dict[str, list[str]]:
    """Return the names of all exercises, by the number of their notebook."""
    found: dict[str, list[str]] = {}
    for exercise in all_exercises():
        found.setdefault(exercise.notebook, []).append(exercise.name)
    return found


def table() -> "Table":
    """Return what is solved and what is left, notebook by notebook."""
    done = solved()
    return Table([(number, [(name, name in done) for name in names]) for number, names in exercises().items()])


class Table:
    """A table of solved exercises, shown as such in a notebook and as the same words in a terminal."""

    def __init__(self, rows: list[tuple[str, list[tuple[str, bool]]]]):
        self.rows = rows

    def __repr__(self) -> str:
        lines = [f"{number}  {_count(marks):<8} {_words(marks)}" for number, marks in self.rows]
        return "\n".join([*lines, f"all {_count([mark for _, marks in self.rows for mark in marks])}"])

    def _repr_markdown_(self) -> str:
        lines = [f"| {number} | {_count(marks)} | {_words(marks)} |" for number, marks in self.rows]
        total = _count([mark for _, marks in self.rows for mark in marks])
        return "\n".join(["| notebook | solved | |", "|---|---|---|", *lines, f"| all | {total} | |"])


def _count(marks: list[tuple[str, bool]]) -> str:
    return f"{sum(is_solved for _, is_solved in marks)} of {len(marks)}"


def _words(marks: list[tuple[str, bool]]) -> str:
    return ", ".join(f"{name} ✓" if is_solved else name for name, is_solved in marks)
