"""Runs the command line: ``python -m labtrain --help``, also under torchrun."""

import labtrain.before_torch  # isort: skip  # noqa: F401 - torch reads what it sets

import inspect
import io
import os
import signal
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import torch
import torch.distributed as dist
import tyro

from labkit.groups import local_rank
from labkit.launch.rank import describe_error
from labkit.launch.report import is_consequence
from labtrain.command_line import run_command
from labtrain.config import TrainConfig
from labtrain.console import describe_end, describe_start
from labtrain.spelling import SHORT_OPTIONS, as_typed, options
from labtrain.trainer import train
from labtrain.world import check_same_options, describe_lost_peer, say_once, world


def main() -> int:
    """Return 0 if all steps are done, 2 if options do not fit, 1 on NaN or out of memory, 130 if
    interrupted.
    """
    try:
        config = read_options()
        if config is None:
            return 0
        if isinstance(config, TrainConfig) and config.check:
            # torch's fake tensors take long to import, and a run needs none
            from labtrain.estimate import estimate

            fits = estimate(config, config.check, say=lambda line: print(as_typed(line)))
            return 0 if fits else 2
        options = {}
        if isinstance(config, TrainConfig):
            options = {"one_queue": config.one_queue, "posts_receives": config.posts_receives}
        with world(**options):
            return run(config)
    except ValueError as error:  # from bringing the world up
        say_once(f"labtrain: {as_typed(str(error))}")
        return 2
    except KeyboardInterrupt:
        say_once("labtrain: interrupted", restart_helps=True)
        return 130
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        say_once(
            "labtrain: a peer is gone before all ranks have met, so the others end",
            restart_helps=True,
        )
        return 1


@dataclass(frozen=True)
class _Options(TrainConfig):
    def __post_init__(self):
        """Check nothing: tyro would put what is wrong into a box, in words of its own."""


def options_class() -> type[_Options]:
    """Return the options as tyro reads them, with their short names."""
    kinds = get_type_hints(TrainConfig)
    for name, short in SHORT_OPTIONS.items():
        _Options.__annotations__[name] = Annotated[kinds[name], tyro.conf.arg(aliases=[short])]
    return _Options


def read_options() -> TrainConfig | str | None:
    """Return the config, or what is wrong with the options; None if they only ask for help, which
    is printed.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):  # or every rank would say the same
            given = tyro.cli(
                options_class(),
                prog="python -m labtrain",
                description=inspect.getdoc(TrainConfig),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        return TrainConfig(**vars(given))
    except ValueError as error:
        return as_typed(str(error))
    except SystemExit as left:
        text = textwrap.dedent(printed.getvalue()).strip()
        if left.code:
            return text
        if os.environ.get("RANK", "0") == "0":  # no world is up yet
            print(text)
        return None


def run(config: TrainConfig | str) -> int:
    """Train on a rank of a world that is up, and return the exit code; a text says what is wrong
    with its options.
    """
    is_first_here = local_rank() == 0
    try:
        check_same_options(config, options())  # before anything on one rank alone
        assert isinstance(config, TrainConfig)
        floor_nats = config.make_dataset().floor_nats  # the file may be gone when the run ends
        # Raises on every rank if sizes do not fit
        start = describe_start(config, dist.get_world_size(), floor_nats)
        if is_first_here:  # each node may have a log of its own
            print(start, flush=True)
        steps = train(config)
    except ValueError as error:
        say_once(f"labtrain: {as_typed(str(error))}")
        return 2
    except FloatingPointError as error:
        say_once(f"labtrain: {error}")
        return 1
    except (RuntimeError, MemoryError) as error:
        if lost_a_peer(error):
            # torchrun's: this rank ends in a moment by itself
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            folder = config.checkpoint_dir if isinstance(config, TrainConfig) else None
            say_once(f"labtrain: {describe_lost_peer(folder)}", restart_helps=True)
            return 1
        is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # On a CPU torch raises a plain RuntimeError
        if not is_known and "can't allocate memory" not in str(error):
            raise
        way_out = "use a smaller model or --micro-batch-size, or more --tp, --cp or --pp"
        say_once(f"labtrain: out of memory ({error}): {way_out}", restart_helps=True)
        return 1
    if is_first_here:
        print(describe_end(config, steps, floor_nats), flush=True)
    return 0


def lost_a_peer(error: Exception) -> bool:
    """Return whether this is no fault of this rank, but the consequence of one that has gone."""
    where = error.__traceback__  # describe_error takes it away
    is_so = is_consequence(describe_error(error))
    error.__traceback__ = where
    return is_so


if __name__ == "__main__":
    run_command(main)
