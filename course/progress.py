"""Which exercises somebody has solved: kept in a small file of their own, shown in Start_Here.

Which there are is not written down again: every exercise in this package counts, for the notebook that its file names.
"""

import importlib
import json
import os
import pkgutil
import re
from datetime import date
from pathlib import Path
from typing import Any


def file() -> Path:
    """Where it is kept: ``LABKIT_PROGRESS``, or else among this user's application states."""
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("LABKIT_PROGRESS") or Path(states) / "labkit" / "progress.json")


def solved() -> dict[str, str]:
    """The names of the exercises that were solved, and when; empty if the file cannot be read."""
    try:
        content = json.loads(file().read_text())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def note_solved(name: str) -> None:
    """Remember that an exercise was solved. Where nothing can be written, nothing is remembered."""
    path, content = file(), solved()
    if name not in content:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(content | {name: str(date.today())}, indent=1))
            temporary.replace(path)
        except OSError:
            pass


def clear() -> None:
    """Forget everything that was solved."""
    file().unlink(missing_ok=True)
    print("Forgotten: no exercise counts as solved.")


def exercises() -> dict[str, list[str]]:
    """The names of all exercises, by the number of their notebook."""
    package = importlib.import_module("course.exercises")
    found: dict[str, list[str]] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"course.exercises.{module_info.name}")
        notebook = re.search(r"notebook (\d\d)", (module.__doc__ or "").partition("\n")[0])
        if notebook:
            names = [thing.name for thing in vars(module).values() if _is_exercise(thing)]
            found.setdefault(notebook[1], []).extend(names)
    return dict(sorted(found.items()))


def table() -> "Table":
    """What is solved and what is left, notebook by notebook."""
    done = solved()
    return Table([(number, [(name, name in done) for name in names]) for number, names in exercises().items()])


class Table:
    """Shown as a table in a notebook, and as the same words in a terminal."""

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


def _is_exercise(thing: Any) -> bool:
    return not isinstance(thing, type) and hasattr(thing, "verdict") and isinstance(getattr(thing, "name", None), str)
