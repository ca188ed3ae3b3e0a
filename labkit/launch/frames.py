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
    stack = []
    for caller, line in traceback.walk_stack(frame):  # the frame itself first
        stack.append((caller.f_code.co_filename, line or 0, caller.f_code.co_name))
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
    known = [frame for frame in frames if is_cell(frame[0]) or not _LIBRARY.search(frame[0])]
    lab = tuple(folder + os.sep for folder in lab_folders)
    learners = [frame for frame in known if not frame[0].startswith(lab)]
    if not learners:
        return [], known
    num_further_in = known[::-1].index(learners[-1])
    return learners, known[len(known) - num_further_in :]


def location(frames: Iterable[Frame]) -> str:
    """Say the learner's innermost line and, if it called into the lab, the lab's innermost line."""
    learners, labs = user_frames(frames)
    lines = [f"at {describe(frame)}" for frame in learners[-1:]]
    lines += [f"in {describe(frame, source=not learners)}" for frame in labs[-1:]]
    return ", ".join(lines) or "outside your code"


def describe(frame: Frame, source: bool = True) -> str:
    """Say where a frame is, and quote its line."""
    filename, line, function = frame
    where = f"{short_name(filename)}, line {line}"
    if function != "<module>":
        where += f", in {function}"
    text = linecache.getline(filename, line).partition("  #")[0].strip()
    return f"{where}:  {text}" if source and text else where


def short_name(filename: str) -> str:
    """Return ``this cell`` for the cell that runs, ``Cell In[3]`` for a different one, a short path
    for a file.
    """
    cells = [file for file, _, _ in stack_of(sys._getframe(1)) if is_cell(file)]
    if cells and filename == cells[0]:
        return "this cell"
    number = getattr(getattr(shell(), "compile", None), "_filename_map", {}).get(filename)
    if number is not None:
        return f"Cell In[{number}]"
    here = os.path.relpath(filename)
    return here if not here.startswith("..") else filename
