"""Runs a script under torchrun, and leaves no process behind, whatever the script does."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

MOST_SECONDS = 300.0
MOST_LETTERS = 1_000_000
MARK = "MY_MEGATRON_JOB"
"""An environment variable that all processes of a job have, also those that a rank has forked."""


class Failed(RuntimeError):
    """A job ended with an error, or had to be ended."""


def torchrun(script: str | Path, world_size: int, options: dict[str, object]) -> Iterator[str]:
    """Start a script on ranks, and yield what they print, as it comes; then end all that is left of the job.

    Raises:
        Failed: a rank failed, or the job took longer or printed more than the constants above allow.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", script]
    command += [f"--{name}={value}" for name, value in options.items()]
    mark = uuid.uuid4().hex
    environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}
    num_letters = 0
    end_at = time.monotonic() + MOST_SECONDS
    with tempfile.NamedTemporaryFile("w") as output, open(output.name) as printed:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment)
        try:
            is_running = True
            while is_running:
                is_running = process.poll() is None  # asked first: what is printed before the end is read
                text = printed.read(MOST_LETTERS)
                num_letters += len(text)
                yield text
                if time.monotonic() > end_at:
                    raise Failed(f"It took more than {MOST_SECONDS:.0f} seconds, and was ended.")
                if num_letters >= MOST_LETTERS:
                    raise Failed(f"It printed more than {MOST_LETTERS:,} letters, and was ended.")
                time.sleep(0.1)
        finally:
            end(mark)
            status = process.wait()
    if status:
        raise Failed(f"torchrun ended with status {status}.")


def end(mark: str) -> None:
    """Kill every process that has the mark."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has just ended, or belongs to somebody else
            pass
