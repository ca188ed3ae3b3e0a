"""What people type: commands end quietly when nobody reads what they print."""

import multiprocessing
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from labtrain import TrainConfig, train
from labtrain.command_line import NOBODY_READS
from labtrain.world import world

ROOT = Path(__file__).parents[1]
MAIN = re.compile(r'^if __name__ == "__main__":\n(.*)\Z', re.MULTILINE | re.DOTALL)
NOT_TYPED = {"labkit/launch/server.py", "course/standstill/watched.py", "course/project/one_file.py"}
"""What launch and torchrun start and read."""


def test_every_command_can_be_piped():
    """The table below tries the ones that print before they have done much."""
    blocks = {
        str(path.relative_to(ROOT)): found[1]
        for package in ("labkit", "labtrain", "course")
        for path in (ROOT / package).rglob("*.py")
        if (found := MAIN.search(path.read_text()))
    }
    assert len(blocks) > 8
    unsafe = [path for path, block in blocks.items() if "run_command(main" not in block and path not in NOT_TYPED]
    assert not unsafe, "these end in a traceback when they are piped into head"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with world():
        train(TrainConfig(steps=1, num_layers=1, hidden_size=8, seq_length=8, checkpoint_dir=str(folder)))
    return folder


def run_unread(module, arguments, errors):
    """In a fork, which has imported everything: run a module as a command whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - to the end of the process
    sys.argv = [module, *arguments]
    warnings.simplefilter("ignore")  # the module was imported before
    runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("labtrain", ["--help"]),
        ("labtrain", ["--steps", "2", "--log-interval", "1"]),
        ("labtrain.checkpoint", ["{checkpoints}"]),
        ("labtrain.export", ["{checkpoints}", "{checkpoints}/exported"]),
        ("course.open", ["--help"]),
        ("course.room", ["{checkpoints}"]),
        ("course.progress", ["{checkpoints}/mine.json"]),
    ],
    ids=str,
)
def test_nobody_reads_what_is_printed(checkpoints, tmp_path, module, arguments):
    arguments = [argument.format(checkpoints=checkpoints) for argument in arguments]
    errors = tmp_path / "errors"
    command = multiprocessing.get_context("fork").Process(target=run_unread, args=(module, arguments, errors))
    command.start()
    command.join(120)
    assert (command.exitcode, errors.read_text()) == (NOBODY_READS, "")
