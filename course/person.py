"""Reads what one person of a room has done from a file that they, or anybody in their place, could fill with anything.

Every sentence that is taken over is without what would steer a terminal.
"""

import json
import os
import re
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

from course import progress, shared_file
from course.exercises import record
from course.progress import questions


class Event(NamedTuple):
    """What somebody did: checked an exercise, predicted, or ran the cell that shows a result."""

    time: datetime
    notebook: str
    who: str
    name: str
    wrong: str | None = None
    """Why it is wrong now; None if it is not."""
    state: str = ""
    """Of a prediction: "right" or "wrong" at first, "waiting" for its cell, or "late", given after the result."""


class Person(NamedTuple):
    """What one person did, which exercises they solved, their answers in words by key, and the results they saw.

    An answer is what they would say now, until they see the result; then it is their first. One given late is left out.
    """

    name: str
    events: list[Event]
    solved: list[str]
    answers: dict[str, str]
    seen: list[str]


@cache
def notebooks() -> dict[str, str]:
    """Return the number of each exercise's notebook."""
    return {name: number for number, names in progress.exercises().items() for name in names}


def read(path: Path) -> Person:
    """Return what one person did.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record, or not of the person after whom it is named.
    """
    text, owner = shared_file.read(path)
    if shared_file.number_of(path.stem) not in (None, owner) and owner not in (os.geteuid(), 0):
        raise ValueError("it belongs to a different user than the one whose name it has")
    try:
        return _person(plain(path.stem), json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is not a record of progress ({type(error).__name__}: {error})") from None


def plain(line: str) -> str:
    """Return a line without what would steer a terminal: others wrote it."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _person(who: str, content: dict) -> Person:
    given, seen = (
        {key: value for key, value in content.get(part, {}).items() if key in questions()}
        for part in ("predictions", "results")
    )
    events = [_event(time, who, key) for key, time in seen.items()]
    for name, check in content.get("checks", {}).items():
        if _notebook(name):
            wrong = check["mistake"] or f"no typical mistake ({check['status']})"
            events.append(_event(check["time"], who, name, None if check["status"] == "passed" else wrong))
    answers = {}
    for key, answer in given.items():
        wrong, state = None, "late" if key in seen else "waiting"
        if answer["right"] is not None:
            state = "right" if answer["right"] is True else "wrong"
        if state == "wrong":
            wrong = answer["mistake"] or f"answered {answer['first']}"
        kept = answer["last" if state == "waiting" else "first"]
        if state != "late" and questions()[key].fits(kept):  # it may be to an earlier wording
            answers[key] = plain(questions()[key].said(kept)[:80])
        events.append(_event(answer["time"], who, key, wrong, state))
    return Person(who, events, list(record.solved_in(content)), answers, list(seen))


def _event(time: str, who: str, name: str, wrong: str | None = None, state: str = "") -> Event:
    moment, now = datetime.fromisoformat(time).astimezone(), datetime.now().astimezone()
    if moment > now + timedelta(days=1):
        raise ValueError(f"something happened in {moment.year}, which is in the future")
    return Event(min(moment, now), _notebook(name), who, plain(name), wrong and plain(str(wrong)[:300]), state)


def _notebook(name: str) -> str:
    """Return the number of the notebook that a check or a question belongs to; "" for a name that is not known."""
    case = re.fullmatch(r"(?:(\w+) )?case \d{1,3}", name)
    name = (case[1] or "bug_museum") if case else name
    return name.partition(".")[0] if name in questions() else notebooks().get(name, "")
