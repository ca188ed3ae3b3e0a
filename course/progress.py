"""Lists what a participant has solved and what is left, notebook by notebook: the table in Start_Here.

    python -m course.progress FILE.json     what was solved, checked and predicted, as `course.room` reads it
    python -m course.progress FILE.xml      the same as JUnit, for whatever collects test results
    python -m course.progress FOLDER        FOLDER/USER.json

The exercises are not listed here a second time: every one in `course.exercises` counts, and so does the museum.
"""

import argparse
import getpass
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import course.exercises
from course.exercises.record import checks, clear, predictions, solved
from course.museum import context_museum, museum, sharding_museum
from course.table import Table

__all__ = ["all_exercises", "clear", "exercises", "predictions", "save", "save_button", "solved", "table"]


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
    return sorted([*found, museum, context_museum, sharding_museum], key=lambda thing: thing.notebook)


def exercises() -> dict[str, list[str]]:
    """Return the names of all exercises, by the number of their notebook."""
    found: dict[str, list[str]] = {}
    for exercise in all_exercises():
        found.setdefault(exercise.notebook, []).append(exercise.name)
    return found


def table() -> "Solved":
    """Return what is solved and what is left, notebook by notebook."""
    done = solved()
    return Solved([(number, [(name, name in done) for name in names]) for number, names in exercises().items()])


def save(path: str | Path) -> Path:
    """Write what was solved, checked and predicted: JUnit into a file .xml, JSON into any other; returns the file.

    A folder gets a file with the user's name. What is written replaces an earlier file as a whole.
    """
    path = Path(path)
    if path.is_dir():
        path /= f"{getpass.getuser()}.json"
    temporary = path.with_name(f".{path.name}")
    if path.suffix == ".xml":
        junit().write(temporary, encoding="utf-8", xml_declaration=True)
    else:
        content = {"solved": solved(), "checks": checks(), "predictions": predictions()}
        temporary.write_text(json.dumps(content, indent=1))
    return temporary.replace(path)


def junit() -> ElementTree.ElementTree:
    """Return a test suite per notebook: exercises, skipped if not attempted, and the predictions that were made."""
    suites = ElementTree.Element("testsuites")
    done, tried, predicted = solved(), checks(), predictions()
    for number, names in exercises().items():
        suite = ElementTree.SubElement(suites, "testsuite", name=number)
        found = [("exercises", name, True if name in done else False if name in tried else None) for name in names]
        keys = [key for key in predicted if key.startswith(f"{number}.")]
        found += [("predictions", key, predicted[key]["right"]) for key in keys]
        for kind, name, is_right in found:
            case = ElementTree.SubElement(suite, "testcase", classname=f"{number}.{kind}", name=name)
            if is_right is False:
                mistake = (predicted if kind == "predictions" else tried)[name]["mistake"]
                ElementTree.SubElement(case, "failure", message=mistake or "wrong, by no typical mistake")
            elif is_right is None:
                ElementTree.SubElement(case, "skipped")
        rights = [is_right for *_, is_right in found]
        for name, count in {
            "tests": len(rights),
            "failures": rights.count(False),
            "skipped": rights.count(None),
        }.items():
            suite.set(name, str(count))
    return ElementTree.ElementTree(suites)


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
    """A table of solved exercises, shown as such in a notebook and as the same words in a terminal."""

    def __init__(self, rows: list[tuple[str, list[tuple[str, bool]]]]):
        marks = [*rows, ("all", [mark for _, marks in rows for mark in marks])]
        counts = [f"{sum(is_solved for _, is_solved in each)} of {len(each)}" for _, each in marks]
        words = [", ".join(f"{name} ✓" if is_solved else name for name, is_solved in each) for _, each in rows]
        self._rows = [[name, *cells] for (name, _), *cells in zip(marks, counts, [*words, ""])]

    def __repr__(self) -> str:
        return str(Table(rows=self._rows, widths=[4, 9, 0]))

    def _repr_markdown_(self) -> str:
        return Table(["notebook", "solved", ""], self._rows).markdown


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what you have solved and predicted into a file.")
    parser.add_argument("path", help="a file .json or .xml (JUnit), or a folder")
    print(save(parser.parse_args().path))


if __name__ == "__main__":
    main()
