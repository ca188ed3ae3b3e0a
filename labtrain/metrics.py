"""Opens the files that get the numbers of each step: JSON lines, and TensorBoard's events.

A run that resumes computes some steps again, those after its checkpoint. Both kinds of file then
have each step once.
"""

import json
import os
from io import RawIOBase
from typing import Any

import torch.distributed as dist

from labtrain.config import TrainConfig


def open_metrics(config: TrainConfig, steps_done: int) -> RawIOBase | None:
    """Open the file to append to on the first rank; raise a ValueError on all if it cannot be
    opened.
    """
    path = config.metrics
    if path is None:
        return None
    file = None
    fault = ""
    try:
        if dist.get_rank() == 0:
            if os.path.isfile(path):  # not a pipe or a device
                _end_at_a_line(path, steps_done if config.resume else None)
            file = open(path, "ab", buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        way_out = "name a file that you may write to"
        fault = f"metrics={path} cannot be written ({error.strerror}): {way_out}"
    of_first_rank = [fault]
    dist.broadcast_object_list(of_first_rank)
    if of_first_rank[0]:
        raise ValueError(of_first_rank[0])
    return file


def _end_at_a_line(path: str, steps_done: int | None) -> None:
    """Let the next line of the file be a line of its own; if the run resumes, let it be that of its
    next step.
    """
    with open(path, "r+b") as file:
        lines = file.readlines()
        kept = lines if steps_done is None else lines_to_keep(lines, steps_done)
        end = sum(map(len, kept))
        file.truncate(end)
        file.seek(end)
        if kept and not kept[-1].endswith(b"\n"):
            file.write(b"\n")


def lines_to_keep(lines: list[bytes], steps_done: int) -> list[bytes]:
    """Return the lines without those at the end that a run wrote after ``steps_done``, to which it
    goes back.

    They end where the step of a line is not below that of the next one: earlier lines are of an
    earlier run.

    >>> lines = [b'{"step": 8}\\n', b'{"step": 1}\\n', b'{"step": 2}\\n', b'{"st']
    >>> lines_to_keep(lines, steps_done=1)
    [b'{"step": 8}\\n', b'{"step": 1}\\n']
    >>> lines_to_keep(lines, steps_done=0)
    [b'{"step": 8}\\n']
    """
    kept = list(lines)
    if kept and kept[-1].startswith(b"{") and not kept[-1].endswith(b"\n"):
        kept.pop()  # the run ended while it wrote this line
    next_step = None
    while kept:
        step = _step_of(kept[-1])
        if step is None or step <= steps_done or (next_step is not None and step >= next_step):
            break
        kept.pop()
        next_step = step
    return kept


def _step_of(line: bytes) -> int | None:
    """Return which step a line is about, or None if it is not a line of a run."""
    try:
        about = json.loads(line)
    except ValueError:
        return None
    step = about.get("step") if isinstance(about, dict) else None
    return step if isinstance(step, int) else None


def open_tensorboard(config: TrainConfig, steps_done: int) -> Any:
    """Return TensorBoard's writer on the first rank; raise a ValueError on all if the package is
    not there.
    """
    folder = config.tensorboard
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        way_out = "pip install tensorboard, or use metrics="
        raise ValueError(f"tensorboard={folder} needs the package: {way_out}") from error
    if dist.get_rank() != 0:
        return None
    # It hides those steps
    return SummaryWriter(folder, purge_step=steps_done + 1 if config.resume else None)
