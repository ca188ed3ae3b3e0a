"""What a freshly forked rank does: join torch.distributed, then run functions until told to leave."""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import io
import linecache
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.launch.probe import Frame, Probe
from labkit.launch.wire import Connection


@dataclass(frozen=True)
class RankError:
    """An exception on a rank, as the kernel is told of it."""

    kind: str  # the exception's class
    text: str
    frames: tuple[Frame, ...]  # innermost last
    traceback: str
    seconds: float  # on the machine's monotonic clock, so that ranks can be compared
    exception: bytes | None  # cloudpickled, when it can be


_kernel: Connection | None = None  # set in a rank only: how `progress` finds the notebook
_progress_sent = 0.0


def progress(done: float, total: float, text: str = "") -> bool:
    """Move a progress bar in the cell that launched this rank. Return False if there is none, as under torchrun."""
    global _progress_sent
    now = time.monotonic()
    if _kernel is not None and (done >= total or now - _progress_sent > 0.05):
        _progress_sent = now
        _kernel.send("progress", done, total, text)
    return _kernel is not None


def main(control: socket.socket) -> None:
    """Never returns: the process ends when the kernel says so, or is gone."""
    global _kernel
    _kernel = kernel = Connection(control)
    messages, probe, calls = kernel.messages(), Probe(), queue.SimpleQueue()
    _, settings = next(messages)
    _open_streams(f"{settings['directory']}/stack{settings['rank']}")
    answering = threading.Thread(target=_answer, args=(messages, probe, calls), daemon=True, name="labkit-control")
    answering.start()
    try:
        _join(settings, probe)
        kernel.send("up")
        while (payload := calls.get()) is not None:
            kernel.send(*_run(settings, payload))
            gc.collect()  # a model in a cycle holds its process groups, whose threads turn on sockets that peers closed
    except BaseException as error:  # joining failed; whatever a call raises is sent by _run
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
                interval = sys.getswitchinterval()
                sys.setswitchinterval(1e-4)  # else each file it reads waits 5 ms for a main thread that runs Python
                _kernel.send("where", probe.snapshot())  # pyright: ignore[reportOptionalMemberAccess]
                sys.setswitchinterval(interval)
            case ("call", payload):
                calls.put(payload)
            case ("leave",):
                calls.put(None)
    os.killpg(0, signal.SIGKILL)  # the kernel is gone


def _join(settings: dict, probe: Probe) -> None:
    """Initialise torch.distributed over a file store on tmpfs: no port, no name look-up."""
    _apply_environment(settings["environment"], settings)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(settings["num_threads"])
    dist.set_debug_level_from_env()  # pyright: ignore[reportPrivateImportUsage]
    probe.watch_point_to_point()
    stores = iter(range(1 << 62))

    def private_rendezvous(*_, **__):
        """What a learner's own init_process_group() meets: env:// without a TCP port."""
        path = f"{settings['directory']}/store{next(stores)}"
        store = dist.FileStore(path, settings["world_size"])  # pyright: ignore[reportPrivateImportUsage]
        yield store, settings["rank"], settings["world_size"]

    rendezvous = sys.modules["torch.distributed.rendezvous"]  # the module: a function hides it as an attribute
    rendezvous._rendezvous_handlers["env"] = private_rendezvous  # a private hook: pinned by a test
    if settings["backend"] == "nccl":
        prepare_gpu()
        torch.cuda.set_device(settings["rank"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings["backend"] == "nccl" else "gloo",
        timeout=datetime.timedelta(seconds=settings["timeout_seconds"]),
    )


def prepare_gpu() -> None:
    """Change CUDA's defaults for messages that wait, and for float32, before a rank first touches it."""
    import torch

    # Lazy loading makes a kernel's first launch wait for all that runs: for ever, if that is a receive posted ahead.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    torch.set_float32_matmul_precision("highest")  # NGC containers multiply with 10 bits


def _apply_environment(environment: dict[str, str], settings: dict) -> None:
    """Take over the kernel's environment, then set what torchrun would set."""
    rank, world_size = settings["rank"], settings["world_size"]
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # the flight recorder, which the watchdog reads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(LABKIT_WORLD=str(settings["world_id"]), GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")  # nothing beyond this machine


def _run(settings: dict, payload: bytes | str) -> tuple:
    """Call the function; return the message for the kernel: its result or its error."""
    try:
        if isinstance(payload, str):  # large: written once, for all ranks
            with open(payload, "rb") as file:
                payload = file.read()
        caller, function = pickle.loads(payload)
        _apply_environment(caller["environment"], settings)
        os.chdir(caller["working_directory"])
        sys.path[:] = caller["sys_path"]
        linecache.cache.update(caller["cells"])  # so that tracebacks and inspect find cell sources
        function, args, kwargs = pickle.loads(function)
        result = function(*args, **kwargs)
        try:
            return "result", _dumps(result)
        except Exception as error:
            raise TypeError(f"the result, of type {type(result).__name__}, cannot be sent back: {error}") from error
    except BaseException as error:
        return "error", describe_error(error)
    finally:
        _flush()


def _dumps(result) -> bytes:
    """Pickle, with GPU tensors moved to the CPU: else the kernel would start CUDA, on every rank's GPU."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj):
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                return obj.cpu().__reduce_ex__(self.proto)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(result)
    return file.getvalue()


def describe_error(error: BaseException) -> RankError:
    import cloudpickle

    frames = traceback.extract_tb(error.__traceback__)
    pickled = None
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error.with_traceback(None))
    return RankError(
        kind=type(error).__name__,
        text=str(error),
        frames=tuple((frame.filename, frame.lineno or 0, frame.name) for frame in frames),
        traceback="".join(traceback.format_list(frames)),
        seconds=time.monotonic(),
        exception=pickled,
    )


def _open_streams(stack_file: str) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=2, all_threads=False)
    # This answers even while C code holds the GIL, when the control thread cannot.
    faulthandler.register(signal.SIGUSR1, file=open(stack_file, "w"), all_threads=True)  # noqa: SIM115 - never closed


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed
