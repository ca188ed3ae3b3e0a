"""The command line: ``python -m labkit.train --help``, also under torchrun and srun."""

import io
import os
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout

import torch
import torch.distributed as dist
import tyro

from labkit.train.config import TrainConfig
from labkit.train.console import describe_end, describe_start
from labkit.train.trainer import train
from labkit.train.world import is_first_rank, say_once, world


def main() -> int:
    """Return 0 if all steps are done, 2 if options do not fit, 1 if numbers or memory ran out, 130 if interrupted."""
    try:
        return start()
    except ValueError as error:  # from bringing the world up
        say_once(f"labkit.train: {error}")
        return 2
    except KeyboardInterrupt:
        say_once("labkit.train: interrupted")
        return 130


def start() -> int:
    """Read the options, and train as they say."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):  # or every rank would say the same
            config = tyro.cli(TrainConfig, prog="python -m labkit.train", config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as left:
        return tell(textwrap.dedent(printed.getvalue()).strip(), int(left.code or 0))
    with world():
        return run(config)


def tell(text: str, code: int) -> int:
    """Print the help, or what is wrong with the options, and return the exit code."""
    if code != 0:
        with world():
            say_once(text)
    elif is_first_rank(os.environ):
        print(text)
    return code


def run(config: TrainConfig) -> int:
    """Train on a rank of a world that is up, and return the exit code."""
    is_first = dist.get_rank() == 0
    try:
        floor_nats = config.make_text().floor_nats  # the file may be gone when the run ends
        about = describe_start(config, dist.get_world_size(), floor_nats)
        if is_first:
            print(about, flush=True)
        steps = train(config)
    except (ValueError, FloatingPointError) as error:
        say_once(f"labkit.train: {error}")
        return 2 if isinstance(error, ValueError) else 1
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        say_once(
            f"labkit.train: out of memory ({error}): use a smaller model or micro_batch_size, or more --tp or --pp"
        )
        return 1
    if is_first:
        print(describe_end(config, steps, floor_nats), flush=True)
    return 0


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether memory ran out; on a CPU, torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
