"""Records what somebody has solved and predicted, in a small file of their own that outlives the kernel.

The file holds one JSON object: the solved exercises, each with its date, the last check of each exercise, and the
answers to predictions by their key.

    {"solved": {"group_lists": "2026-11-22"},
     "checks": {"group_lists": {"status": "passed", "mistake": null, "time": "2026-11-22T16:31:40+01:00", "tries": 3}},
     "predictions": {"01.data_size": {"kind": "number", "first": 8, "time": "2026-11-22T16:20:03+01:00",
                                      "right": false, "mistake": "That is the number of tensor groups.",
                                      "last": 2, "tries": 2}}}

`Prediction` and `Check` say what their fields mean. Earlier versions wrote solved exercises at the top: they still
count.
"""

import json
import os
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypedDict

from course import shared_file


class Prediction(TypedDict):
    """An answer to a question. ``right`` and ``mistake`` are about the first answer.

    An answer to a "number" is a number, to a "choice" its words, to an "order" the words of all items in that order.
    """

    kind: str
    first: Any
    time: str
    """When the first answer was given: ISO 8601, with the offset from UTC."""
    right: bool | None
    """None until the cell that computes the result has run, and for good if it had run before the first answer."""
    mistake: str | None
    """The sentence about the typical mistake that the first answer makes, or None."""
    last: Any
    tries: int


class Check(TypedDict):
    """What the last check of an exercise found, unless it was not attempted."""

    status: str
    mistake: str | None
    """The advice for the typical mistake that was recognised, or None."""
    time: str
    tries: int


def file() -> Path:
    """Return where it is kept: ``LABKIT_PROGRESS`` if that is set, else among this user's application states."""
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("LABKIT_PROGRESS") or Path(states) / "labkit" / "progress.json")


def solved() -> dict[str, str]:
    """Return the names of the solved exercises, each with its date; empty if the file cannot be read."""
    return _read()["solved"]


def predictions() -> dict[str, Prediction]:
    """Return the answers to predictions by their key, such as "01.data_size"; empty if the file cannot be read."""
    return _read()["predictions"]


def checks() -> dict[str, Check]:
    """Return the last check of each exercise by its name; empty if the file cannot be read."""
    return _read()["checks"]


def results() -> dict[str, str]:
    """Return when the cell that computes a question's result first ran, by the question's key."""
    return _read()["results"]


def note_result(key: str) -> None:
    """Remember that the result of a question has been seen."""
    content = _read()
    if key not in content["results"]:
        content["results"][key] = datetime.now().astimezone().isoformat(timespec="seconds")
        _write_or_say(content)


def note_solved(name: str) -> None:
    """Remember that an exercise was solved, or say that nothing can be remembered."""
    content = _read()
    if name not in content["solved"]:
        content["solved"][name] = str(date.today())
        _write_or_say(content)


def note_check(name: str, status: str, mistake: str | None) -> None:
    """Remember what a check found, in place of the one before, and that it was solved if it passed."""
    content = _read()
    if status == "passed":
        content["solved"].setdefault(name, str(date.today()))
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    before = content["checks"].get(name)
    tries = before["tries"] + 1 if before else 1
    content["checks"][name] = Check(status=status, mistake=mistake, time=now, tries=tries)
    _write_or_say(content)


def note_prediction(key: str, prediction: Prediction) -> str:
    """Remember an answer in place of what was remembered under this key; returns "", or why that cannot be."""
    content = _read()
    if content["predictions"].get(key) == prediction:
        return ""
    content["predictions"][key] = prediction
    return _write(content)


def clear() -> None:
    """Forget everything that was solved and predicted."""
    try:
        file().unlink(missing_ok=True)
        print("Forgotten: no exercise counts as solved, and no prediction as made.")
    except OSError as error:
        print(f"Nothing is forgotten: {file()}: {error.strerror}.")


def solved_in(content: dict[str, Any]) -> dict[str, str]:
    """Return the solved exercises in what a file holds: earlier versions wrote them at the top."""
    flat = {name: day for name, day in content.items() if isinstance(day, str)}
    return {**flat, **content.get("solved", {})}


def _read() -> dict[str, dict[str, Any]]:
    try:
        text, owner = shared_file.read(file())
        content = json.loads(text) if owner == os.geteuid() else {}
    except (OSError, ValueError, RecursionError):
        content = {}
    content = content if isinstance(content, dict) else {}
    for part in ("solved", "checks", "predictions", "results"):
        if not isinstance(content.get(part), dict):
            content[part] = {}
    seen = {key: when for key, when in content["results"].items() if isinstance(when, str)}
    checked, predicted = _whole(content["checks"], Check), _whole(content["predictions"], Prediction)
    return {"solved": solved_in(content), "checks": checked, "predictions": predicted, "results": seen}


def _whole(part: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the entries that have all fields of their kind."""
    fields = kind.__annotations__.keys()
    return {key: each for key, each in part.items() if isinstance(each, dict) and each.keys() >= fields}


_said: set[str] = set()


def _write(content: dict[str, dict[str, Any]]) -> str:
    """Keep it all; returns "", or why it could not be kept."""
    try:
        file().parent.mkdir(parents=True, exist_ok=True)
        shared_file.replace(file(), json.dumps(content, indent=1).encode())
        return ""
    except OSError as error:
        way_out = "Set LABKIT_PROGRESS to a file of your own before you start the lab."
        return f"Your progress is not kept in {file()}: {error.strerror}. {way_out}"


def _write_or_say(content: dict[str, dict[str, Any]]) -> None:
    """Keep it all; where that cannot be, say so in the cell, once."""
    if (why := _write(content)) and why not in _said:
        _said.add(why)
        print(why)
