"""Runs a function on ranks once (`launch`), or again and again on the same ranks (`World`)."""

import contextlib
import linecache
import os
import pickle
import sys
import threading
import weakref
from functools import lru_cache
from numbers import Real

from labkit.device import choose_backend
from labkit.launch import client
from labkit.launch.call import Call
from labkit.launch.client import DeferredInterrupt
from labkit.launch.frames import is_cell
from labkit.launch.output import Output, say
from labkit.launch.payload import discard, dump, pickled, why_not
from labkit.launch.ranks import Ranks
from labkit.sizes import whole_number

MAX_RANKS = 128
_say_if_new = lru_cache(maxsize=1)(say)


def launch(
    fn, /, *args, world_size: int, backend: str = "auto", timeout_seconds: float = 60.0,
    live: bool = False, strict: bool = False, **kwargs,
) -> list:  # fmt: skip
    """Run ``fn(*args, **kwargs)`` on ``world_size`` new ranks.

    Return what they return, in rank order.

    Each rank is a new process with torch.distributed initialised: no variable, group or fault of an
    earlier launch is met again. On GPUs that has a price, which was not measured: each launch makes
    a CUDA context on each GPU, loads kernels (see `labkit.device.prepare_gpu`) and starts NCCL. A
    `World` pays it once.

    ``fn``, its arguments and its results may be anything made in a notebook cell. What ranks print
    is shown by rank when all are done; with ``live=True`` at once.

    Args:
        backend: ``"auto"`` takes NCCL when each rank can have a GPU, and gloo on the CPU otherwise.
        timeout_seconds: how long a rank waits inside one communication before torch gives up; or
            the launcher, five seconds later, where torch does not: at the first use of a group,
            NCCL waits for ever for a missing member.
        strict: check in every collective that all ranks agree on operation, shape and dtype. This
            is slower, and torch 2.13 crashes (SIGSEGV) when DistributedDataParallel meets it on
            gloo, under torchrun too.

    Raises:
        ValueError: an argument does not fit; no process was started.
        RankFailed: a rank raised or died; the message is the report. `Deadlock` if they wait for
            each other.
    """
    call = _pickled_call(fn, args, kwargs)  # first: if it is refused, no process was started
    with World(
        world_size, backend=backend, timeout_seconds=timeout_seconds, strict=strict
    ) as world:
        return world._run(call, live, keep=False)


class World(contextlib.AbstractContextManager):
    """Ranks that stay alive between calls: ``with World(4) as world: world.run(fn, ...)``.

    It outlives a fault: ranks that wait are freed, and gloo's groups connected anew. A killed rank
    ends it, or one that C code does not let go, or with NCCL a message on its way; ``ended`` says
    why. Arguments and errors: see `launch`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "auto",
        timeout_seconds: float = 60.0,
        strict: bool = False,
    ):
        self.world_size = whole_number(world_size) or 0
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ValueError(
                f"world_size={world_size!r} must be a whole number from 1 to {MAX_RANKS}"
            )
        if backend not in ("auto", "gloo", "nccl"):
            raise ValueError(f"backend={backend!r} is unknown: use 'auto', 'gloo' or 'nccl'")
        # The upper limit is there because torch counts nanoseconds.
        if not isinstance(timeout_seconds, Real) or not 0 < timeout_seconds <= 1e6:
            rule = "must be a number above 0, and at most a million"
            raise ValueError(f"timeout_seconds={timeout_seconds!r} {rule}")
        if "LABKIT_WORLD" in os.environ:
            rule = "only the notebook (or script) itself can launch ranks"
            raise RuntimeError(f"launch was called on a rank: {rule}")
        self.ended = ""  # why, once it has
        self.was_freed = False  # and connected anew, after the latest fault
        self._one_call = threading.Lock()  # at a time: a second thread waits its turn
        with DeferredInterrupt() as interrupt:
            server = client.current_server(interrupt)
            self.backend, why = choose_backend(backend, self.world_size, server.gpu_count())
            _say_if_new(why)
            environment = dict(os.environ)
            if strict:
                environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            settings = {
                "world_size": self.world_size,
                "backend": self.backend,
                "timeout_seconds": timeout_seconds,
                "environment": environment,
            }
            self._ranks = Ranks(server, self.world_size, settings)
            # For a world that nobody closes.
            self._finalizer = weakref.finalize(self, self._ranks.end, kill=True)
            self._finalizer.atexit = False  # the server sees to that
            if interrupt.requested:
                self._end("it was interrupted while it started", kill=True)

    def run(self, fn, /, *args, live: bool = False, **kwargs) -> list:
        """Call ``fn(*args, **kwargs)`` on every rank. Return the results in rank order."""
        return self._run(_pickled_call(fn, args, kwargs), live)

    def _run(self, call: list[memoryview], live: bool, keep: bool = True) -> list:
        with self._one_call, DeferredInterrupt() as interrupt:
            if self.ended:
                raise RuntimeError(f"this world has ended ({self.ended}): make a new one")
            payload = dump(f"{self._ranks.directory}/payload", call)
            call.clear()  # it was copied
            current = Call(self._ranks, Output(self.world_size, live), interrupt)
            try:
                return current.run(payload, keep)
            except BaseException as error:
                self.was_freed = bool(current.renewed)
                if not current.at_rest:
                    self._end(f"{type(error).__name__} in an earlier call", kill=True)
                raise
            finally:
                discard(payload)

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, so that a new one would have to wait for it."""
        return self._one_call.locked()

    def close(self) -> None:
        """Let the ranks leave. Safe to call again."""
        with DeferredInterrupt():
            self._end("it was closed", kill=False)

    def __exit__(self, *_) -> None:
        self.close()

    def _end(self, why: str, kill: bool) -> None:
        if not self.ended:
            self.ended = why
            self._finalizer.detach()
            self._ranks.end(kill)


def _pickled_call(fn, args: tuple, kwargs: dict) -> list[memoryview]:
    """Return what every rank is sent: the state of the notebook, and the call, to be unpickled in
    that state.
    """
    if not callable(fn):
        raise ValueError(
            f"fn={fn!r} cannot be called: pass the function itself, and its arguments after it"
        )
    try:
        here = os.getcwd()
    except FileNotFoundError:
        gone = os.readlink("/proc/self/cwd")
        raise ValueError(
            f"the working directory is gone, {gone}: choose a different one with os.chdir"
        ) from None
    cells = {}
    for name, entry in linecache.cache.items():
        if is_cell(name) and len(entry) == 4:  # a shorter one has not been read
            cells[name] = entry
    settings = {
        "environment": dict(os.environ),
        "working_directory": here,
        "sys_path": [path or here for path in sys.path],
        "cells": cells,
    }
    try:
        # The call is a pickle inside a pickle: its bytes are carried as they are.
        call = [*map(pickle.PickleBuffer, pickled((fn, args, kwargs)))]
        return pickled((settings, call))
    except Exception as error:
        raise ValueError(why_not(error, fn, args, kwargs)) from None
