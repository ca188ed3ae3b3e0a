"""Tells whose code a stack frame is in, and names its place as a report shows it."""

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from labkit import lab_folders

Frame = tuple[str, int, str]  # file name, line, function
LAUNCHER = os.path.dirname(__file__) + os.sep
_LIBRARY = re.compile(
    rf"/site-packages/|/dist-packages/|/lib/python3\.\d+/|^{re.escape(LAUNCHER)}|^<frozen"
)


def shell():
    """Return IPython's shell; None outside IPython."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def is_cell(filename: str) -> bool:
    return bool(re.search(r"/ipykernel_\d+/", filename)) or filename.startswith("<ipython-input")


def stack_of(frame: FrameType) -> tuple[Frame, ...]:
    """Return a frame and its callers, innermost last."""
    stack = [
        (each.f_code.co_filename, line or 0, each.f_code.co_name)
        for each, line in traceback.walk_stack(frame)
    ]
    return tuple(stack[::-1][-60:])


def frames_of(faulthandler_text: str) -> list[Frame]:
    """Return the frames of the last stack that faulthandler wrote, innermost last."""
    last = faulthandler_text.rpartition("Stack (most recent call first)")[2]
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', last)
    return [(file, int(line), function) for file, line, function in found[::-1]]


def user_frames(frames: Iterable[Frame]) -> tuple[list[Frame], list[Frame]]:
    """Return the frames of the learner's code, and those of the lab further in, without torch's and
    Python's.
    """
    own = [frame for frame in frames if is_cell(frame[0]) or not _LIBRARY.search(frame[0])]
    lab = tuple(folder + os.sep for folder in lab_folders)
    learners = [frame for frame in own if not frame[0].startswith(lab)]
    return learners, own[len(own) - own[::-1].index(learners[-1]) :] if learners else own


def place(frames: Iterable[Frame]) -> str:
    """Say the learner's innermost line and, if it called into the lab, the lab's innermost line."""
    learners, labs = user_frames(frames)
    places = [f"at {describe(frame)}" for frame in learners[-1:]]
    places += [f"in {describe(frame, source=not learners)}" for frame in labs[-1:]]
    return ", ".join(places) or "outside your code"


def describe(frame: Frame, source: bool = True) -> str:
    """Say where a frame is, and quote its line."""
    filename, line, function = frame
    text = linecache.getline(filename, line).partition("  #")[0].strip() if source else ""
    where = f"{short_name(filename)}, line {line}" + (
        "" if function == "<module>" else f", in {function}"
    )
    return f"{where}:  {text}" if text else where


def short_name(filename: str) -> str:
    """Return ``this cell`` for the cell that runs, ``Cell In[3]`` for a different one, a short path
    for a file.
    """
    if filename == next((file for file, _, _ in stack_of(sys._getframe(1)) if is_cell(file)), None):
        return "this cell"
    number = getattr(getattr(shell(), "compile", None), "_filename_map", {}).get(filename)
    if number is not None:
        return f"Cell In[{number}]"
    here = os.path.relpath(filename)
    return here if not here.startswith("..") else filename
