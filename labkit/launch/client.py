"""Starts the launch server, asks it for ranks, and defers SIGINT until what the two share is
consistent.
"""

import atexit
import contextlib
import fcntl
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from labkit.launch.linux import read_text
from labkit.launch.output import say
from labkit.launch.wire import Connection

# Two threads may launch at once: a question and its answer belong together
_lock = threading.RLock()
_ranks_will_train = False
_ANSWER_SECONDS = 120.0  # of the server: on a busy machine, importing torch takes a minute
# A notebook that has imported one of these does so for its ranks.
_SLOW_TO_IMPORT = frozenset(("torch._dynamo", "torch.distributed.tensor"))
_server: "ServerHandle | None" = None  # one per process: starting it costs the import of torch


def will_train() -> None:
    """Announce, from a module that trains: the server then imports what an optimizer needs before
    it forks ranks.
    """
    global _ranks_will_train
    _ranks_will_train = True


def stopped(text: str = "Stopped.") -> KeyboardInterrupt:
    """Return an interrupt of which IPython shows the text alone."""
    interrupt = KeyboardInterrupt(text)
    lines = f"KeyboardInterrupt: {text}".splitlines()
    interrupt._render_traceback_ = lambda: lines  # pyright: ignore[reportAttributeAccessIssue]
    return interrupt


class DeferredInterrupt:
    """While open, SIGINT sets `requested`, which the launcher acts on; on leaving, it is raised.

    KeyboardInterrupt could strike between any two lines; and with several threads, blocking the
    signal does not help.
    """

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "DeferredInterrupt":
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:  # the only thread that receives signals, or may set handlers
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_):
        self.requested = True

    def __exit__(self, kind, *_):
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)
        if self.requested and kind is None:
            raise stopped()


class ServerHandle:
    """One server process, its private run directory (mode 0700, on tmpfs), and what it
    has told us.
    """

    def __init__(self, interrupt: DeferredInterrupt | None = None):
        self.owner = os.getpid()
        self.exits: dict[int, dict[int, int]] = {}  # world_id -> rank -> wait status
        self.gpu_counts: dict[str | None, int] = {}  # by the value of CUDA_VISIBLE_DEVICES
        self._answers: list[tuple] = []
        _remove_stale_directories()
        self.directory = tempfile.mkdtemp(prefix="labkit-", dir=_tmpfs())
        kernel_end, server_end = socket.socketpair()
        self.connection = Connection(kernel_end)
        with open(f"{self.directory}/starting.log", "w") as log, server_end:
            # The server's stdout keeps the lock: one that is free marks a dead server. The file
            # gets its name afterwards, so that nobody ever sees the lock free before.
            fcntl.flock(log, fcntl.LOCK_EX)
            os.rename(log.name, f"{self.directory}/server.log")
            arguments = [str(server_end.fileno()), str(self.owner), self.directory]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.launch.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_server_environment(),
                pass_fds=[server_end.fileno()],
                start_new_session=True,  # neither Ctrl-C nor the kernel's process group reach it
            )
        self.pid = self._process.pid
        atexit.register(self.close)
        self._await("importing torch", interrupt)

    @property
    def usable(self) -> bool:
        if not self.connection.is_open or self.owner != os.getpid():
            return False
        is_running = self._process.poll() is None
        # Some systems empty /dev/shm when a user logs out.
        return is_running and os.path.isdir(self.directory)

    def fork(self, world_id: int, num_ranks: int, descriptors: list[int]) -> list[int]:
        """Fork ranks that own these descriptors, three per rank. Return their process ids."""
        with _lock:
            # A list first: threads may import meanwhile.
            modules = {name for name in list(sys.modules) if name.startswith("labkit.")}
            will_train = _ranks_will_train or not _SLOW_TO_IMPORT.isdisjoint(sys.modules)
            self.connection.send(
                "fork", world_id, num_ranks, will_train, modules, descriptors=descriptors
            )
            kind, _, answer = self._await("forking ranks")
        if kind == "refused":
            self.close()
            raise RuntimeError(
                f"the launch server cannot fork ranks: {answer}. It was closed: run the cell again"
            )
        return answer

    def gpu_count(self) -> int:
        """Return how many GPUs ranks could use."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        with _lock:
            if visible not in self.gpu_counts:
                self.connection.send("count_gpus", visible)
                self.gpu_counts[visible] = self._await("counting GPUs")[1]
        return self.gpu_counts[visible]

    def poll(self) -> None:
        """Take in what the server has said, without waiting."""
        with _lock:
            for kind, *fields in self.connection.arrived():
                if kind == "exit":
                    world_id, rank, status = fields
                    self.exits.setdefault(world_id, {})[rank] = status
                else:
                    self._answers.append((kind, *fields))

    def close(self) -> None:
        """End the server and with it every rank; safe to call again."""
        if self.owner != os.getpid():  # a fork of the kernel
            return
        self.connection.close()  # the server reads the end of the stream and leaves
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.close)

    def _await(self, what: str, interrupt: DeferredInterrupt | None = None) -> tuple:
        """Wait for the answer to the question asked last: while it is open, nobody else asks."""
        end = time.monotonic() + _ANSWER_SECONDS
        while True:
            self.poll()
            if self._answers:
                return self._answers.pop()
            is_open = self.connection.is_open
            if not is_open or time.monotonic() > end:
                happened = f"gave no answer for {_ANSWER_SECONDS:g} s" if is_open else "stopped"
                said = read_text(f"{self.directory}/server.log")[-2000:]
                self.close()
                text = f"the launch server {happened} while {what}: run the cell again\n{said}"
                raise RuntimeError(text.rstrip())
            if interrupt and interrupt.requested:
                self._process.kill()
                self.close()
                raise stopped()
            time.sleep(0.001)


def current_server(interrupt: DeferredInterrupt | None = None) -> ServerHandle:
    """Return this process's server; start it if there is none."""
    global _server
    with _lock:
        if _server is None or not _server.usable:
            if sys.platform != "linux":
                raise RuntimeError(
                    f"launch needs Linux (process groups, /proc); this is {sys.platform}"
                )
            if _server is not None:
                _server.close()
            say("Starting the launcher: it imports torch, once for this kernel ...")
            _server = ServerHandle(interrupt)
        return _server


def _server_environment() -> dict[str, str]:
    # A thread pool made at import would make the server unsafe to fork; ranks set their own number
    # of threads.
    environment = os.environ | dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )
    # Threads of ranks must not spin for long on cores that something else may need: that was 15
    # times slower.
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    # Its heap in pages of 2 MiB: a fork copies an entry for each page, which was half of what a
    # rank's start cost.
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # look for GPUs without starting CUDA
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _tmpfs() -> str | None:
    """Return a folder in memory, where there is one, rather than on a disk or in a network home."""
    for folder in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):
        if folder and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 1 << 20:
            return folder
    return None


def _remove_stale_directories() -> None:
    """Remove what killed servers of this user left."""
    for directory in glob.glob(f"{_tmpfs() or tempfile.gettempdir()}/labkit-*"):
        with contextlib.suppress(OSError):
            if os.lstat(directory).st_uid == os.getuid():  # not a stranger's link
                with open(f"{directory}/server.log") as log:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
