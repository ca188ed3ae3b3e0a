"""Runs what ``python -m`` starts, and ends quietly when nobody reads what it prints, as with
``| head``.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

NOBODY_READS = 128 + signal.SIGPIPE
"""The exit code that a shell reports for a program whose output nobody reads any more."""


def run_command(main: Callable[..., int | None], *arguments: str) -> NoReturn:
    """Call a command's main function, and end the process with the exit code that it returns.

    Python ignores SIGPIPE, as ranks must when a peer has gone; so to print is an error once the
    reader has left.
    """
    try:
        try:
            code = main(*arguments)
        finally:
            # By itself Python would do so too late for anybody to take the error
            sys.stdout.flush()
    except BrokenPipeError:
        abandoned = [stream for stream in (sys.stdout, sys.stderr) if _nobody_reads(stream)]
        if not abandoned:
            raise  # it came from something else, such as a socket
        for stream in abandoned:
            # Python prints the rest once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = NOBODY_READS
    sys.exit(code)


def _nobody_reads(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
