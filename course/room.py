"""Where a room of people is: what each has solved and predicted, added up for whoever leads it.

    python -m course.room /shared/room

Everybody's record lies in a folder that all see, each in a file of its own: the environment variable
``LABKIT_PROGRESS`` puts it there (/shared/room/NAME.json), or `course.progress.save_button`. There is no server.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from course import progress

COLUMNS = ["notebook", "here now", "have predicted", "right at first", "solved, by how many"]
MOST = 8
"""How many mistakes are shown."""


@dataclass(frozen=True)
class Person:
    """What one file says: the answers by their key, each right at first or not, and what is wrong now, with why."""

    name: str
    solved: frozenset[str]
    predicted: dict[str, bool]
    wrong: list[tuple[str, str]]
    last: tuple[datetime, str] | None
    """When and in which notebook this person did something last."""


def read(path: Path) -> Person:
    """Read one person's file.

    Raises:
        OSError: it cannot be read.
        ValueError, TypeError, KeyError, AttributeError: it is not a record.
    """
    content = json.loads(path.read_text())
    solved, checks, predictions = (dict(content.get(part, {})) for part in ("solved", "checks", "predictions"))
    moments, wrong = [], []
    for name, check in checks.items():
        moments.append((_moment(check), notebooks().get("bug_museum" if name.startswith("case ") else name, "?")))
        if check["status"] != "passed":
            wrong.append((name, str(check["mistake"] or f"no typical mistake ({check['status']})")))
    for key, answer in predictions.items():
        moments.append((_moment(answer), key.partition(".")[0]))
        if answer["right"] is False:
            wrong.append((key, str(answer["mistake"] or f"answered {answer['first']}")))
    predicted = {key: answer["right"] is True for key, answer in predictions.items()}
    return Person(path.stem, frozenset(solved), predicted, wrong, max(moments, default=None))


@cache
def notebooks() -> dict[str, str]:
    """Return the number of each exercise's notebook."""
    return {name: number for number, names in progress.exercises().items() for name in names}


class Room:
    """A folder of records, added up; nobody is named, unless ``names`` is set.

    A file that cannot be read is left out and reported: it may have been replaced just now, or damaged.
    """

    def __init__(self, folder: str | Path, names: bool = False):
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder: give the one that everybody's record is kept in")
        self.people: list[Person] = []
        self.unreadable: list[str] = []
        self.names = names
        for path in sorted(Path(folder).glob("*.json")):
            try:
                self.people.append(read(path))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                self.unreadable.append(f"{path.name} ({type(error).__name__}: {error})")

    def rows(self) -> list[list[str]]:
        """Return a row for each notebook, in the order of `COLUMNS`."""
        rows = []
        for number, exercises in progress.exercises().items():
            here = [person.name for person in self.people if person.last and person.last[1] == number]
            answers = [
                [right for key, right in person.predicted.items() if key.startswith(f"{number}.")]
                for person in self.people
            ]
            all_answers = [right for person in answers for right in person]
            share = f"{sum(all_answers) / len(all_answers):.0%} of {len(all_answers)}" if all_answers else ""
            counts = Counter(name for person in self.people for name in person.solved)
            solved = ", ".join(f"{name} {counts[name]}" for name in exercises)
            rows.append([number, self._who(here), str(sum(map(bool, answers))), share, solved])
        return rows

    def mistakes(self) -> list[tuple[int, str]]:
        """Return what is wrong most often now: by how many people, and what."""
        who: dict[tuple[str, str], list[str]] = {}
        for person in self.people:
            for mistake in person.wrong:
                who.setdefault(mistake, []).append(person.name)
        most = sorted(who.items(), key=lambda item: -len(item[1]))[:MOST]
        shown = [(len(people), f"{name}: {text[:300]}", people) for (name, text), people in most]
        return [(n, text + (f" [{', '.join(people)}]" if self.names else "")) for n, text, people in shown]

    def __repr__(self) -> str:
        table = [COLUMNS, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        mistakes = [f"{count:4}  {text}" for count, text in self.mistakes()]
        return "\n".join(map(_plain, [*self._heads(), "", *lines, "", "wrong most often now", *mistakes]))

    def _repr_html_(self) -> str:
        heads = "".join(f"<p>{escape(head)}</p>" for head in self._heads())
        mistakes = [[str(count), text] for count, text in self.mistakes()]
        return heads + _table(COLUMNS, self.rows()) + _table(["people", "wrong most often now"], mistakes)

    def _heads(self) -> list[str]:
        last = max((person.last[0] for person in self.people if person.last), default=None)
        ago = f"; something last happened at {last:%H:%M:%S}" if last else ""
        files = [f"Could not be read: {', '.join(self.unreadable)}."] if self.unreadable else []
        return [f"{len(self.people)} people{ago}.", *files]

    def _who(self, names: list[str]) -> str:
        return ", ".join(names) if self.names else str(len(names))


def watch(folder: str | Path, names: bool = False, seconds: float = 5.0) -> Any:
    """Show the room in a notebook, and draw it anew in place; the button stops and resumes that."""
    from ipywidgets import HTML, ToggleButton, VBox

    view, pause = HTML(Room(folder, names)._repr_html_()), ToggleButton(description="Pause")

    async def redraw() -> None:
        while True:
            await asyncio.sleep(seconds)
            if not pause.value:
                try:
                    view.value = Room(folder, names)._repr_html_()
                except ValueError as error:
                    view.value = escape(str(error))

    task = asyncio.get_running_loop().create_task(redraw())
    view.observe(lambda _: task.cancel(), "comm")  # which is gone once the widget is closed
    return VBox([pause, view])


def _moment(noted: dict) -> datetime:
    return datetime.fromisoformat(noted["time"]).astimezone()


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _plain(line: str) -> str:
    """Return a line without what would steer a terminal: others wrote it."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def main() -> None:
    parser = argparse.ArgumentParser(description="Add up the records of a room.")
    parser.add_argument("folder", help="with one file NAME.json for each person")
    parser.add_argument("--names", action="store_true", help="say who is where, and who makes which mistake")
    given = parser.parse_args()
    try:
        print(Room(given.folder, given.names))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
