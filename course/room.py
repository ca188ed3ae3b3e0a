"""Adds up what everybody in a room has solved and predicted, for whoever leads it.

    python -m course.room /shared/room

Everybody's record lies in a folder that all see, each in a file of its own: the environment variable
``LABKIT_PROGRESS`` puts it there (/shared/room/NAME.json), or `course.progress.save_button`. There is no server.
"""

import argparse
import asyncio
from collections import Counter
from datetime import datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

from course import person, progress
from course.person import Event, Person
from course.predict import Question
from course.table import Table
from labtrain.command_line import run_command

COLUMNS = ["notebook", "here now", "have predicted", "right first time", "waiting", "late", "solved, by how many"]
"""Waiting: answers whose cell has not run. Late: answers given after the result, which count as neither."""
RECENT = timedelta(minutes=3)
MOST_QUESTIONS = 2
MOST_ANSWERS = 8
MOST = 8
"""How many mistakes are shown."""
MOST_FILES = 20
"""How many of the files that cannot be counted are named one by one."""


class Room:
    """A folder of records, added up; nobody is named, unless ``names`` is set.

    A file that is not a record, or that cannot be read just now, is left out: one line below the table says why.
    """

    def __init__(self, folder: str | Path, names: bool = False):
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder: give the one that everybody's record is kept in")
        self.names, self.now = names, datetime.now().astimezone()
        self.people: list[Person] = []
        unreadable: Counter[str] = Counter()
        for path in sorted(path for path in Path(folder).glob("*.json") if not path.name.startswith(".")):
            try:
                found = person.read(path)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error  # without the path, which is a name
                unreadable[f"{path.name if names else 'a file'}: {why}"] += 1
                continue
            self.people.append(found)
        self.events = [event for each in self.people for event in each.events]
        self.solved = Counter(name for each in self.people for name in each.solved)
        self.not_counted = [_not_counted(text, count) for text, count in unreadable.most_common(MOST_FILES)]
        if others := unreadable.total() - sum(count for _, count in unreadable.most_common(MOST_FILES)):
            self.not_counted.append(f"Not counted: {others} more files")

    def rows(self) -> list[list[str]]:
        """Return a row for each notebook, in the order of `COLUMNS`."""
        last, rows = {event.who: event.notebook for event in sorted(self.events, key=_when)}, []
        for number, exercises in progress.exercises().items():
            here = [who for who, notebook in last.items() if notebook == number]
            answers = [event for event in self.events if event.notebook == number and event.state]
            states = Counter(event.state for event in answers)
            judged = states["right"] + states["wrong"]
            share = f"{states['right'] / judged:.0%} of {judged}" if judged else ""
            solved = ", ".join(f"{name} {self.solved[name]}" for name in exercises)
            not_judged = [str(states[state] or "") for state in ("waiting", "late")]
            predicted = str(len({event.who for event in answers}))
            rows.append([number, self._who(here, ""), predicted, share, *not_judged, solved])
        return rows

    def tables(self) -> list[Table]:
        """Return the rows of the lab and, once somebody has done something there, of what lies further."""
        known = person.notebooks()
        begun = {event.notebook for event in self.events} | {known.get(name, "") for name in self.solved}
        lab = [row for row in self.rows() if row[0] <= progress.LAST_OF_THE_LAB]
        further = [row for row in self.rows() if row[0] > progress.LAST_OF_THE_LAB]
        if not begun & {row[0] for row in further}:
            return [Table(COLUMNS, lab)]
        return [Table(COLUMNS, lab, "the lab"), Table(COLUMNS, further, "further")]

    def mistakes(self) -> list[list[str]]:
        """Return what is wrong most often now: by how many people, and what."""
        made: dict[str, dict[str, None]] = {}  # a person counts once
        for event in self.events:
            if event.wrong is not None:
                made.setdefault(f"{event.name}: {event.wrong}"[:300], {})[event.who] = None
        most = sorted(made.items(), key=lambda item: -len(item[1]))[:MOST]
        return [[str(len(who)), text + (f" [{', '.join(who)}]" if self.names else "")] for text, who in most]

    def open_questions(self) -> list[Table]:
        """Return what was answered to the questions of the last three minutes, else to the last one.

        Nothing says which answer is right, so that a room can look at this before it runs the cell.
        """
        answers = sorted((event for event in self.events if event.state), key=_when)
        recent = Counter(event.name for event in answers if self.now - event.time < RECENT)
        keys = [key for key, _ in recent.most_common(MOST_QUESTIONS)] or [event.name for event in answers[-1:]]
        return [self._answers(person.questions()[key]) for key in keys]

    def quiet(self) -> list[str]:
        """Return who has done nothing new for three minutes."""
        last = {event.who: event.time for event in sorted(self.events, key=_when)}
        return [each.name for each in self.people if each.name not in last or self.now - last[each.name] >= RECENT]

    def _answers(self, question: Question) -> Table:
        given: dict[str, list[str]] = {}
        for each in self.people:
            if question.key in each.answers:
                given.setdefault(each.answers[question.key], []).append(each.name)
        most = sorted(given.items(), key=lambda item: -len(item[1]))
        rest = [who for _, people in most[MOST_ANSWERS:] for who in people]
        most = [*most[:MOST_ANSWERS], *([("other answers", rest)] if rest else [])]
        ran = [each.name for each in self.people if question.key in each.seen]
        count = f"{sum(len(people) for _, people in most)} of {len(self.people)} have answered"
        title = f"{question.key}: {question.text} {count}; {self._who(ran, 'nobody')} ran it."
        bars = [[text, "█" * min(len(people), 40), self._who(people, "")] for text, people in most]
        return Table(["answer", "", "people"], bars, title)

    def _who(self, people: list[str], nobody: str) -> str:
        if self.names:
            return ", ".join(sorted(people)) or nobody
        return str(len(people))

    def __repr__(self) -> str:
        lines = [*self._heads(), ""]
        for table in self.open_questions():
            lines += [table.caption, str(Table(table.heads, table.rows)), ""]
        for table in self.tables():
            lines += [str(table), ""]
        lines.append("wrong most often now")
        return "\n".join([*lines, *(f"{count:>4}  {text}" for count, text in self.mistakes()), *self.not_counted])

    def _repr_html_(self) -> str:
        heads, files = (
            "".join(f"<p>{escape(line)}</p>" for line in lines) for lines in (self._heads(), self.not_counted)
        )
        tables = [*self.open_questions(), *self.tables()]
        tables.append(Table(["people", "wrong most often now"], self.mistakes()))
        return heads + "".join(table.html for table in tables) + files

    def _heads(self) -> list[str]:
        last = f"; something last happened at {max(self.events, key=_when).time:%H:%M:%S}" if self.events else ""
        quiet = self._who(self.quiet(), "nobody")
        return [f"{len(self.people)} people{last}.", f"Nothing new for three minutes: {quiet}."]


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


def _not_counted(text: str, count: int) -> str:
    return f"Not counted: {person.plain(text)[:200]}" + f" ({count} files)" * (count > 1)


def _when(event: Event) -> datetime:
    return event.time


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
    run_command(main)
