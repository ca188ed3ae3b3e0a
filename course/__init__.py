"""The course above labkit and labtrain: what the notebooks show, ask and check."""

import sys
from pathlib import Path

from labkit import lab_folders

lab_folders.extend(__path__)  # so that a report tells this code from the learner's

EARLIER = "05_vocabulary_parallel.ipynb"
"""A notebook that only copies have which were made before the notebooks got the numbers that they have today."""


def about_earlier_copy(folder: Path) -> str:
    """Return one line for a kernel that runs in an old copy's folder of notebooks; else nothing."""
    if not (folder / EARLIER).exists():
        return ""
    copy = folder.parent
    return f"This copy is of an earlier version of the lab. `make lab` puts the new one into {copy}-2."


if "ipykernel" in sys.modules and (line := about_earlier_copy(Path.cwd())):
    print(line)
