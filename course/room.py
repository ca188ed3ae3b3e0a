"""Adds up what everybody in a room has solved and predicted, for whoever leads it.

    python -m course.room /shared/room

Everybody's record lies in a folder that all see, each in a file of its own: the environment variable
``LABKIT_PROGRESS`` puts it there (/shared/room/NAME.json), or `course.progress.save_button`. There is no server.
"""

import argparse
import asyncio
import json
from collections import Counter
from datetime import datetime
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from course import progress
from course.table import Table

COLUMNS = ["notebook", "here now", "have predicted", "right first time", "solved, by how many"]
MOST = 8
"""How many mistakes are shown."""


class Event(NamedTuple):
    """What somebody did: checked an exercise, or predicted. ``wrong`` says why it is wrong now; None if it is not."""

    time: datetime
    notebook: str
    who: str
    name: str
    wrong: str | None
    is_judged: bool = False
    """Whether this is a prediction whose cell has run."""
    right_at_first: bool | None = None
    """Of a prediction; None for a check."""


@cache
def notebooks() -> dict[str, str]:
    """Return the number of each exercise's notebook."""
    return {name: number for number, names in progress.exercises().items() for name in names}


def read(path: Path) -> tuple[list[Event], list[str]]:
    """Return what one person did, and the names of what they solved.

    Raises:
        OSError: the file cannot be read.
        ValueError, TypeError, KeyError, AttributeError: it is not a record.
    """
    content, events = json.loads(path.read_text()), []
    for name, check in content.get("checks", {}).items():
        number = notebooks().get("bug_museum" if name.startswith("case ") else name, "?")
        wrong = None if check["status"] == "passed" else check["mistake"] or f"no typical mistake ({check['status']})"
        events.append(Event(_moment(check), number, path.stem, name, wrong))
    for key, answer in content.get("predictions", {}).items():
        wrong = None if answer["right"] is not False else answer["mistake"] or f"answered {answer['first']}"
        events.append(
            Event(
                _moment(answer),
                key.partition(".")[0],
                path.stem,
                key,
                wrong,
                answer["right"] is not None,
                answer["right"] is True,
            )
        )
    return events, list(dict(content.get("solved", {})))


class Room:
    """A folder of records, added up; nobody is named, unless ``names`` is set.

    A file that cannot be read is left out and reported: it may have been replaced just now, or damaged.
    """

    def __init__(self, folder: str | Path, names: bool = False):
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder: give the one that everybody's record is kept in")
        self.names, self.num_people = names, 0
        self.events: list[Event] = []
        self.solved: Counter[str] = Counter()
        self.unreadable: list[str] = []
        for path in sorted(Path(folder).glob("*.json")):
            try:
                events, solved = read(path)
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                why = getattr(error, "strerror", None) or error  # without the path, which is a name
                self.unreadable.append(f"{path.name if names else 'a file'} ({type(error).__name__}: {why})")
                continue
            self.num_people += 1
            self.events += events
            self.solved.update(solved)

    def rows(self) -> list[list[str]]:
        """Return a row for each notebook, in the order of `COLUMNS`."""
        last, rows = {event.who: event.notebook for event in sorted(self.events, key=_when)}, []
        for number, exercises in progress.exercises().items():
            here = [who for who, notebook in last.items() if notebook == number]
            answers = [event for event in self.events if event.notebook == number and event.right_at_first is not None]
            judged = [event.right_at_first or False for event in answers if event.is_judged]
            share = f"{sum(judged) / len(judged):.0%} of {len(judged)}" if judged else ""
            solved = ", ".join(f"{name} {self.solved[name]}" for name in exercises)
            people = ", ".join(sorted(here)) if self.names else str(len(here))
            rows.append([number, people, str(len({event.who for event in answers})), share, solved])
        return rows

    def mistakes(self) -> list[list[str]]:
        """Return what is wrong most often now: by how many people, and what."""
        made: dict[str, list[str]] = {}
        for event in self.events:
            if event.wrong is not None:
                made.setdefault(f"{event.name}: {event.wrong}"[:300], []).append(event.who)
        most = sorted(made.items(), key=lambda item: -len(item[1]))[:MOST]
        return [[str(len(who)), text + (f" [{', '.join(who)}]" if self.names else "")] for text, who in most]

    def __repr__(self) -> str:
        lines = str(Table(COLUMNS, [list(map(_plain, row)) for row in self.rows()])).splitlines()
        mistakes = [f"{count:>4}  {text}" for count, text in self.mistakes()]
        return "\n".join([*map(_plain, self._heads()), "", *lines, "", "wrong most often now", *map(_plain, mistakes)])

    def _repr_html_(self) -> str:
        heads = "".join(f"<p>{escape(head)}</p>" for head in self._heads())
        mistakes = Table(["people", "wrong most often now"], self.mistakes())
        return heads + Table(COLUMNS, self.rows()).html + mistakes.html

    def _heads(self) -> list[str]:
        last = f"; something last happened at {max(self.events, key=_when).time:%H:%M:%S}" if self.events else ""
        files = [f"Could not be read: {', '.join(self.unreadable)}."] if self.unreadable else []
        return [f"{self.num_people} people{last}.", *files]


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


def _when(event: Event) -> datetime:
    return event.time


def _moment(noted: dict) -> datetime:
    return datetime.fromisoformat(noted["time"]).astimezone()


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
