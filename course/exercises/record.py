"""Which exercises somebody has solved: a small file of their own that outlives the kernel."""

import json
import os
from datetime import date
from pathlib import Path


def file() -> Path:
    """Return where it is kept: ``LABKIT_PROGRESS`` if that is set, else among this user's application states."""
    states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("LABKIT_PROGRESS") or Path(states) / "labkit" / "progress.json")


def solved() -> dict[str, str]:
    """Return the names of the solved exercises, each with its date; empty if the file cannot be read."""
    try:
        content = json.loads(file().read_text())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def note_solved(name: str) -> None:
    """Remember that an exercise was solved. If nothing can be written, nothing is remembered."""
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
