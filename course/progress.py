"""Lists what a participant has solved and what is left, notebook by notebook: the table in Start_Here.

    python -m course.progress FILE.json     what was solved, checked and predicted, as `course.room` reads it
    python -m course.progress FILE.xml      the same as JUnit, for whatever collects test results
    python -m course.progress FOLDER        FOLDER/USER.json

The exercises are not listed here a second time: every one in `course.exercises` counts, and so do the museum and the
steps of the project.
"""

import argparse
import getpass
import importlib
import json
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import course.exercises
import course.predictions
from course import shared_file
from course.exercises.record import checks, clear, predictions, results, solved
from course.junit import Case, suite_of
from course.museum import context_museum, experts_museum, gpu_museum, museum, sharding_museum
from course.predict import Question
from course.project.steps import STEPS
from course.table import Table
from labtrain.command_line import run_command

__all__ = [
    "LAST_OF_THE_LAB",
    "all_exercises",
    "clear",
    "exercises",
    "predictions",
    "questions",
    "save",
    "save_button",
    "solved",
    "table",
]


UNKNOWN = "wrong, by no typical mistake"
LAST_OF_THE_LAB = "08"
"""The notebooks up to this one are the lab. Those after it lie further; each says what it needs."""


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
    museums = [museum, gpu_museum, context_museum, sharding_museum, experts_museum]
    return sorted([*found, *museums, *STEPS], key=lambda thing: thing.notebook)


def exercises() -> dict[str, list[str]]:
    """Return the names of all exercises, by the number of their notebook."""
    found: dict[str, list[str]] = {}
    for exercise in all_exercises():
        found.setdefault(exercise.notebook, []).append(exercise.name)
    return found


@cache
def questions() -> dict[str, Question]:
    """Return every question that a notebook asks, by its key."""
    names = [each.name for each in pkgutil.iter_modules(course.predictions.__path__, "course.predictions.")]
    found = [each for name in names for each in vars(importlib.import_module(name)).values()]
    return {each.key: each for each in found if isinstance(each, Question)}


def table() -> "Solved":
    """Return what is solved and what is left, notebook by notebook, and how many questions were predicted."""
    done, seen = solved(), results()
    in_time = {
        key: each["right"] for key, each in predictions().items() if each["right"] is not None or key not in seen
    }
    asked: dict[str, list[bool | None]] = {}
    for key in questions():
        asked.setdefault(key.partition(".")[0], []).append(in_time[key] is True if key in in_time else None)
    rows = [(number, [(name, name in done) for name in names]) for number, names in exercises().items()]
    return Solved(rows, asked)


def save(path: str | Path) -> Path:
    """Write what was solved, checked and predicted: JUnit into a file .xml, JSON into any other; returns the file.

    A folder gets a file with the user's name. What is written replaces an earlier file as a whole.
    """
    path = Path(path)
    if path.is_dir():
        path /= f"{getpass.getuser()}.json"
    if path.suffix == ".xml":
        content = ElementTree.tostring(junit(), encoding="utf-8", xml_declaration=True)
    else:
        parts = {"solved": solved(), "checks": checks(), "predictions": predictions(), "results": results()}
        content = json.dumps(parts, indent=1).encode()
    shared_file.replace(path, content)
    return path


def junit() -> ElementTree.Element:
    """Return a test suite per notebook: exercises, skipped if not attempted, and the predictions that were made."""
    suites = ElementTree.Element("testsuites")
    done, tried, predicted = solved(), checks(), predictions()
    for number, names in exercises().items():
        cases = []
        for name in names:
            is_right = True if name in done else False if name in tried else None
            mistake = tried[name]["mistake"] if is_right is False else None
            cases.append(Case("exercises", name, is_right, mistake or UNKNOWN))
        for key in predicted:
            if key.startswith(f"{number}."):
                cases.append(Case("predictions", key, predicted[key]["right"], predicted[key]["mistake"] or UNKNOWN))
        suites.append(suite_of(number, cases))
    return suites


def save_button(path: str | Path = ".") -> Any:
    """Return a button that saves to ``path``, as `save` does, and says where."""
    from ipywidgets import Button, HBox, Label

    button, said = Button(description="Save my progress", button_style="primary"), Label()

    def pressed(_) -> None:
        try:
            said.value = f"Saved in {save(path).resolve()}"
        except OSError as error:
            said.value = f"Not saved: {error}"

    button.on_click(pressed)
    return HBox([button, said])


class Solved:
    """A table of solved exercises and of predictions, with sums of the lab and of what lies further.

    In a notebook it is shown as such, in a terminal as the same words.

    A question of ``asked`` was answered in time, right at first (True) or not; None if it was not.
    """

    def __init__(self, rows: list[tuple[str, list[tuple[str, bool]]]], asked: dict[str, list[bool | None]]):
        self._asked = asked
        lab = [row for row in rows if row[0] <= LAST_OF_THE_LAB]
        further = [row for row in rows if row[0] > LAST_OF_THE_LAB]
        self._rows = [*map(self._row, lab), self._sum("the lab", lab)]
        self._rows += [*map(self._row, further), self._sum("further", further)]
        self._rows.append(self._sum("all", rows))

    def _row(self, row: tuple[str, list[tuple[str, bool]]]) -> list[str]:
        number, marks = row
        words = ", ".join(f"{name} ✓" if is_solved else name for name, is_solved in marks)
        return [*self._sum(number, [row])[:-1], words]

    def _sum(self, name: str, rows: list[tuple[str, list[tuple[str, bool]]]]) -> list[str]:
        marks = [is_solved for _, exercises in rows for _, is_solved in exercises]
        rights = [right for number, _ in rows for right in self._asked.get(number, [])]
        return [name, f"{sum(marks)} of {len(marks)}", _predicted(rights), ""]

    def __repr__(self) -> str:
        return str(Table(HEADS, self._rows, widths=[10, 10, 26, 0]))

    def _repr_markdown_(self) -> str:
        return Table(HEADS, self._rows).markdown


HEADS = ["notebook", "solved", "predicted", "exercises"]


def _predicted(rights: list[bool | None]) -> str:
    """Return how many questions were predicted, and how well."""
    made = [right for right in rights if right is not None]
    return f"{len(made)} of {len(rights)}" + f", {sum(made)} right at first" * bool(made)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what you have solved and predicted into a file.")
    parser.add_argument("path", help="a file .json or .xml (JUnit), or a folder")
    try:
        saved = save(parser.parse_args().path)
    except OSError as error:
        parser.error(f"nothing was written: {error}")
    print(saved)


if __name__ == "__main__":
    run_command(main)
