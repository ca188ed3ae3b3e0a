"""Reads answers to the exercises: a text for each exercise, in which every answer stands as somebody would type it.

A text is Python. Its first lines are what its answers share. A heading begins each answer: what the check finds, a mark
if `make test` tries it, and what is wrong in a teacher's words. Then come the words that its author must be told.

    # === wrong, in make test: divides twice
    # says: Every number is 0.25 times the right one.
    def average(gradients):
        ...

What an answer's last definition names is the answer. `make sweep-answers` tries all of them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "answers"
HEADING = re.compile(r"# === (\w+)(, in make test)?(?:: (.*))?\n")
ONLY_MEASURED = "measured"
"""Stands in the place of a verdict for what only real ranks can tell: no test tries it."""


@dataclass(frozen=True)
class Answer:
    """An answer to an exercise, and what the check says of it: the ``status`` of the verdict, and words in its text."""

    exercise: str
    status: str
    in_make_test: bool
    why: str
    says: list[str]
    function: Callable


def read(path: Path) -> Iterator[Answer]:
    """Yield the answers in a text; a report names its lines."""
    first, *sections = re.split(r"(?m)^(?=# === )", path.read_text())
    shared: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook
    exec(compile(first, path, "exec"), shared)
    line = first.count("\n")
    for section in sections:
        heading = HEADING.match(section)
        assert heading, f"{path}:{line + 1} is not a heading"
        names = dict(shared)
        exec(compile("\n" * line + section, path, "exec"), names)
        line += section.count("\n")
        *_, last = re.findall(r"(?m)^(?:def )?(\w+)(?:\(.*| = .*)", section)
        says = re.findall(r"(?m)^# says: (.*)", section)
        yield Answer(path.stem, heading[1], bool(heading[2]), heading[3] or "", says, names[last])


def answers() -> list[Answer]:
    """Return all answers to all exercises."""
    return [answer for path in sorted(FOLDER.glob("*.txt")) for answer in read(path)]


def answer_named(exercise: str, name: str) -> Callable:
    """Return the answer whose function has this name."""
    found = (answer.function for answer in read(FOLDER / f"{exercise}.txt"))
    return next(function for function in found if function.__name__ == name)
