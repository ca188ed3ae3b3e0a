"""Turns a freshly forked process into a rank: joins torch.distributed, then runs functions until
told to leave.
"""

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import linecache
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

import cloudpickle

from labkit.device import gpu_is_lost, prepare_gpu, take_turns, wait_for_gpu
from labkit.launch import renewal
from labkit.launch.frames import Frame
from labkit.launch.payload import Payload, dump, load, pickled
from labkit.launch.probe import Probe
from labkit.launch.wire import Connection


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, or the end of its process, as the report needs it."""

    kind: str  # the exception's class; "" if the process ended
    text: str
    frames: tuple[Frame, ...]  # innermost last
    traceback: str
    seconds: float  # on the machine's monotonic clock, so that ranks can be compared
    exception: bytes  # cloudpickled; b"" when it cannot be


# SIGUSR1 is the learner's: Slurm sends it before it takes a node away
STACK_SIGNAL = signal.SIGRTMAX - 1
_kernel: Connection | None = None  # set in a rank only: how `progress` finds the notebook
_progress_sent = 0.0
_in_call = False
_TEXT_CHARACTERS = 4000  # of an error
_NCCL_DEFAULTS = {
    # Nobody reads the dump, and four times this wait for it, in milliseconds,
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Stands between a time-out and its report: by default, a minute
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    "NCCL_NVLS_ENABLE": "0",  # sums made in NVLink's switches may round differently each time
}
"""What ranks on GPUs find in their environment where the user has not set it.

NCCL_CUMEM_ENABLE is left alone. NVIDIA/nccl issue 2379 reports that NCCL 2.29.7 sometimes hangs
while it makes about fifty communicators on GPUs without NVLink, and that 0 helps there; issue 1721
reports sends between nodes that hang with 0. Whoever meets the first of these sets it before the
first launch.
"""
libc = ctypes.CDLL(None)


def progress(done: float, total: float, text: str = "") -> bool:
    """Move a progress bar in the cell that launched this rank.

    Return False if there is none, as under torchrun.
    """
    global _progress_sent
    now = time.monotonic()
    if _kernel is not None and (done >= total or now - _progress_sent > 0.05):
        _progress_sent = now
        _kernel.send("progress", done, total, text)
    return _kernel is not None


def stop(*_) -> None:
    """Raise KeyboardInterrupt once in a call; ignore signals that come after it has ended."""
    global _in_call
    if _in_call:
        _in_call = False
        raise KeyboardInterrupt


def main(control: socket.socket) -> None:
    """Never returns: the process ends when the kernel says so, or is gone."""
    global _kernel
    _kernel = kernel = Connection(control)
    messages = kernel.messages()
    calls = queue.SimpleQueue()
    pid = os.getpid()
    _, settings = next(messages)
    probe = Probe(settings["timeout_seconds"], settings["directory"])
    _open_streams(f"{settings['directory']}/stack{settings['rank']}")
    threading.Thread(
        target=_answer, args=(messages, probe, calls), daemon=True, name="labkit-control"
    ).start()
    try:
        _join(settings, probe)
        kernel.send("up")
        while (payload := calls.get()) is not None:
            message = _run(settings, payload, probe)
            if os.getpid() != pid:
                # The function has forked, and this is the child: only the rank itself answers.
                os._exit(message[0] == "error")
            kernel.send(*message)
            # A model in a cycle holds its process groups, whose threads spin on sockets that peers
            # closed
            gc.collect()
    except BaseException as error:  # joining failed; whatever a call raises is sent by _run
        probe.broken = True
        kernel.send("error", describe_error(error))
        while calls.get() is not None:  # stay, so that the others fail for their own reasons only
            pass
    finally:
        _flush()
        os._exit(0)  # skips Python's exit, which could wait for peers that have left already


def _answer(messages: Iterator[tuple], probe: Probe, calls: queue.SimpleQueue) -> None:
    """The control thread: answers while the main thread computes or is blocked in C++."""
    for message in messages:
        match message:
            case ("where",):
                snapshot = None
                interval = sys.getswitchinterval()
                # Otherwise each file it reads waits 5 ms for a main thread that runs Python.
                sys.setswitchinterval(1e-4)
                # What it looks at may change, and if this thread ended, no call would ever arrive.
                with contextlib.suppress(Exception):
                    snapshot = probe.snapshot()
                _kernel.send("where", snapshot)  # pyright: ignore[reportOptionalMemberAccess]
                sys.setswitchinterval(interval)
            case ("call", payload):
                calls.put(payload)  # or None, to leave
            case ("stop", "now"):
                main_thread = threading.main_thread().ident or 0
                signal.pthread_kill(main_thread, signal.SIGINT)
            case ("stop", "freed"):
                renewal.free()
            case ("renew",):  # the main thread has nothing to do
                probe.forget()
                is_connected = renewal.connect_anew()
                _kernel.send("renewed", is_connected)  # pyright: ignore[reportOptionalMemberAccess]
    os.killpg(0, signal.SIGKILL)  # the kernel is gone


def _join(settings: dict, probe: Probe) -> None:
    """Initialise torch.distributed over a file store on tmpfs: no port, no name look-up."""
    _apply_environment(settings["environment"], settings)
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import _rendezvous_handlers

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings["world_size"]))
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    probe.watch()
    numbers = itertools.count()

    def private_rendezvous(*_, **__):
        """What a learner's own init_process_group() meets: env:// without a TCP port."""
        path = f"{settings['directory']}/store{next(numbers)}"
        store = dist.FileStore(path, settings["world_size"])  # pyright: ignore - private
        yield store, settings["rank"], settings["world_size"]

    _rendezvous_handlers["env"] = private_rendezvous  # a private hook: pinned by a test
    if settings["backend"] == "nccl":
        prepare_gpu()
        torch.cuda.set_device(settings["rank"])
        backend = "cpu:gloo,cuda:nccl"
    else:
        take_turns()
        backend = "gloo"
    # Groups that are made without a time-out take one of these.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, probe.timeout)
    dist.init_process_group(backend, timeout=probe.timeout)


def _apply_environment(environment: dict[str, str], settings: dict) -> None:
    """Take over the kernel's environment, then set what torchrun would set."""
    rank = str(settings["rank"])
    world_size = str(settings["world_size"])
    os.environ.clear()
    os.environ.update(environment)
    # The size of the flight recorder, which the watchdog reads.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size
    )
    os.environ.update(
        LABKIT_WORLD=settings["directory"], GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    # Nothing is sent beyond this machine.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if settings["backend"] == "nccl":
        for name, value in _NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)
    elif "LABKIT_SHARE_GPU" not in os.environ:  # as tools/gpu_check.py does
        # Otherwise a save or a backward makes a CUDA context on GPU 0 in every rank.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _run(settings: dict, payload: Payload, probe: Probe) -> tuple:
    """Call the function; return the message for the kernel: its result or its error."""
    global _in_call
    try:
        caller, call = load(payload)
        _apply_environment(caller["environment"], settings)
        os.chdir(caller["working_directory"])
        sys.path[:] = caller["sys_path"]
        linecache.cache.update(caller["cells"])  # so that tracebacks and inspect find cell sources
        function, args, kwargs = load(call)
        del call, payload  # and the bytes they hold
        _in_call = True
        result = function(*args, **kwargs)
        # Otherwise a kernel's error, or a collective that never ends, would be the next call's.
        wait_for_gpu()
        _in_call = False
        if lost := probe.lost_request():
            way_out = "keep what it returns, and call its wait(), or it hangs"
            text = f"the request of this i{lost.text()} is lost: {way_out}"
            return "error", replace(describe_error(RuntimeError(text)), frames=lost.stack)
        path = f"{settings['directory']}/result{settings['rank']}"
        try:
            return "result", dump(path, pickled(result))
        except Exception as error:
            text = f"the result, of type {type(result).__name__}, cannot be sent back: {error}"
            # There are no frames to show: the line that returned is unknown.
            return "error", replace(describe_error(TypeError(text)), frames=())
    except BaseException as error:
        _in_call = False
        probe.broken = probe.broken or gpu_is_lost()
        return "error", describe_error(error)
    finally:
        _flush()


def describe_error(error: BaseException) -> Failure:
    seconds = time.monotonic()  # before all that takes long: who failed first is asked
    cause = error.__cause__
    try:
        text = str(error)[:_TEXT_CHARACTERS]
        if cause is not None:
            text += f", from {type(cause).__name__}: {cause}"[:_TEXT_CHARACTERS]
    except Exception:  # of a __str__ of its own
        text = "(its text cannot be shown)"
    stack = traceback.extract_tb(error.__traceback__)
    exception = b""
    with contextlib.suppress(Exception):
        exception = cloudpickle.dumps(error.with_traceback(None))
    frames = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in stack)
    kind = type(error).__name__
    return Failure(kind, text, frames, "".join(stack.format()), seconds, exception)


def _open_streams(stack_file: str) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=2, all_threads=False)
    # This answers also while C code holds the GIL, when the control thread cannot. The thread that
    # gets it writes its own stack only: the others run on meanwhile, and to read frames that they
    # leave can end the process.
    stacks = open(stack_file, "w")  # noqa: SIM115 - never closed
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    libc.fflush(None)  # what C code has printed
