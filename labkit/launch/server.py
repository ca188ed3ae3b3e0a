"""The server: a process that has imported torch once, and forks ranks from itself when asked.

Importing torch takes seconds, forking a process that has done so takes milliseconds. What makes it safe:

- It is started by exec, never forked from the notebook's kernel, whose threads would not survive a fork.
- It stays single-threaded and never touches CUDA, and refuses to fork when either is no longer so.
- It imports torch, numpy, cloudpickle, what those import, and this package only: a rank imports the rest of labkit
  and the learner's own modules itself, so that edits of them reach the next launch.
- It watches the kernel and dies with it; ranks die with the server; what ranks leave behind is
  re-parented to the server, which ends it.
"""

import ctypes
import gc
import importlib
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

from labkit.launch import wire
from labkit.launch.rank import main as run_rank

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PRELOAD = ("numpy", "cloudpickle", "torch", "torch.distributed")
_IDLE_SECONDS = 3.0
_PRELOAD_TO_TRAIN = ("sympy", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")
"""What torch itself imports when an optimizer is made: 1.5 seconds of every rank's time. Before the first ranks of a
kernel that will train; else when nobody has asked for a while, in steps, to stay watchful.

Not where there are GPUs: nobody promises that these modules leave CUDA alone, and such machines have many cores."""


class Server:
    """Forks ranks, reports how they ended, and leaves nothing behind.

    Understands ``("descriptors",)``, which carries three descriptors a rank (stdout, stderr, control socket),
    ``("fork", world_id, num_ranks, will_train)``, ``("signal", world_id, number, rank or None)`` and
    ``("count_gpus", visible)``. Answers ``("forked", world_id, pids)`` or ``("refused", world_id, why)``,
    ``("exit", world_id, rank, status)`` and ``("gpus", count)``.
    """

    def __init__(self, kernel: socket.socket, kernel_pid: int):
        self.kernel, self.kernel_pid = kernel, kernel_pid
        self.reader = wire.Reader()
        self.descriptors: list[int] = []  # received, not yet given to a rank
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (world_id, rank)
        self.orphans: dict[int, set[int]] = {}  # pid -> the worlds it can belong to
        self.gpu_counter: int | None = None  # pid of the child that asks CUDA
        self.has_forked = self.stopping = False
        self.last_request = 0.0
        self.to_import = [] if os.path.exists("/dev/nvidiactl") else list(_PRELOAD_TO_TRAIN)

    def serve(self) -> None:
        """Answer the kernel until it leaves, however it leaves."""
        wakeup, kernel_exit = _wake_on_signals(), _pidfd(self.kernel_pid)
        poll = select.poll()
        for descriptor in (self.kernel.fileno(), wakeup, kernel_exit):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        signal.signal(signal.SIGTERM, self._stop)
        while not self.stopping:
            is_idle = self._is_idle()
            ready = {descriptor for descriptor, _ in poll.poll(0 if is_idle else 1000)}
            if kernel_exit in ready or os.getppid() != self.kernel_pid:
                return
            if wakeup in ready:
                os.read(wakeup, 4096)
            self._reap()
            self._adopt()
            self._end_orphans()
            if self.kernel.fileno() in ready and not self._read_kernel():
                return
            if is_idle and not ready:
                self._import_next()

    def close(self) -> None:
        """End every rank and everything they started."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            for pid in list(self.ranks):
                _kill_group(pid)
            self._reap()
            self._adopt()
            self._end_orphans()
            if not self.ranks and not self.orphans:
                return
            time.sleep(0.005)

    def _is_idle(self) -> bool:
        """Whether there is time to import something: nobody has asked for a while, so probably nobody will just now."""
        asked_long_ago = time.monotonic() - self.last_request > _IDLE_SECONDS
        return self.has_forked and not self.ranks and bool(self.to_import) and asked_long_ago

    def _import_next(self) -> None:
        with suppress(ImportError):  # another version of torch may not have it
            importlib.import_module(self.to_import.pop(0))
        gc.freeze()  # as in _preload

    def _stop(self, *_):
        self.stopping = True

    def _read_kernel(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.kernel, 1 << 16, 250)
        except ConnectionResetError:  # it was killed before it had read all that was sent to it
            return False
        self.last_request = time.monotonic()
        self.descriptors += descriptors
        for message in self.reader.feed(data):
            match message:
                case ("fork", world_id, num_ranks, will_train):
                    while will_train and self.to_import:
                        self._import_next()
                    self._fork_ranks(world_id, num_ranks)
                case ("signal", world_id, number, rank):
                    self._signal(world_id, number, rank)
                case ("count_gpus", visible):
                    self._count_gpus(visible)
        return bool(data)

    # -- forking ------------------------------------------------------------------------------------------

    def _fork_ranks(self, world_id: int, num_ranks: int) -> None:
        given, self.descriptors = self.descriptors[: 3 * num_ranks], self.descriptors[3 * num_ranks :]
        try:
            _check_safe_to_fork()
            pids = [self._fork_rank(world_id, rank, given[3 * rank : 3 * rank + 3]) for rank in range(num_ranks)]
            wire.send(self.kernel, "forked", world_id, pids)
            self.has_forked = True
        except OSError as error:  # also fork's own: too many processes, too little memory
            wire.send(self.kernel, "refused", world_id, str(error))
        for descriptor in given:
            os.close(descriptor)

    def _fork_rank(self, world_id: int, rank: int, descriptors: list[int]) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become_rank(server, rank, *descriptors)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _set_own_group(pid)  # in parent and child: whichever runs first
        self.ranks[pid] = (world_id, rank)
        return pid

    def _count_gpus(self, visible: str | None) -> None:
        """Ask CUDA in a child: asking here could start CUDA, and no rank could be forked after that."""
        self.gpu_counter = os.fork()
        if self.gpu_counter == 0:
            count = 0
            try:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                if visible is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
                import torch

                count = torch.cuda.device_count()
            finally:
                os._exit(min(count, 255))  # the exit status is the answer

    # -- ending -------------------------------------------------------------------------------------------

    def _signal(self, world_id: int, number: int, rank: int | None) -> None:
        for pid, place in list(self.ranks.items()):
            if place[0] == world_id and rank in (None, place[1]):
                if number == signal.SIGKILL:
                    _kill_group(pid)
                else:
                    _quietly(os.kill, pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.orphans.pop(pid, None)
            if pid == self.gpu_counter:
                wire.send(self.kernel, "gpus", os.waitstatus_to_exitcode(status))
            elif pid in self.ranks:
                world_id, rank = self.ranks.pop(pid)
                _kill_group(pid)  # what the rank started, data-loading workers say
                wire.send(self.kernel, "exit", world_id, rank, status)

    def _adopt(self) -> None:
        """Note the processes that became ours because their parent ended, and whose they can be.

        A program that a rank ran, however indirectly, has the rank's environment. A process that never
        ran another program does not show one: it can belong to any world that lives.
        """
        for pid in _children() - self.ranks.keys() - self.orphans.keys() - {self.gpu_counter}:
            marked = re.search(rb"(?:^|\0)LABKIT_WORLD=(\d+)", _environment(pid))
            self.orphans[pid] = {int(marked[1])} if marked else self._living_worlds()

    def _end_orphans(self) -> None:
        for pid, world_ids in self.orphans.items():
            if not world_ids & self._living_worlds():
                _quietly(os.kill, pid, signal.SIGKILL)  # its own children become ours, and end next time

    def _living_worlds(self) -> set[int]:
        return {world_id for world_id, _ in self.ranks.values()}


def _become_rank(server: int, rank: int, stdout: int, stderr: int, control: int) -> None:
    """In the forked child: keep nothing of the server but its imported modules, then run the rank."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    _close_all_but({0, 1, 2, control})
    connection = socket.socket(fileno=control)
    _, settings = wire.receive(connection)
    run_rank(rank, connection, settings)


def _check_safe_to_fork() -> None:
    """Raises OSError, as fork does, when forking now would be wrong."""
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise OSError(f"it has {threads} threads")
    if any("nvidia-uvm" in _link(descriptor) for descriptor in os.listdir("/proc/self/fd")):
        raise OSError("it has touched CUDA")


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            _quietly(os.close, int(name))


def _children() -> set[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:  # a sandbox that lacks it: only what stays in a rank's process group is ended with it
        return set()


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _wake_on_signals() -> int:
    """A descriptor that becomes readable when a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old Linux, a sandbox, conda's Python: the parent is looked at each second
        return None


def _kill_group(pid: int) -> None:
    _quietly(os.killpg, pid, signal.SIGKILL)
    _quietly(os.kill, pid, signal.SIGKILL)


def _set_own_group(pid: int) -> None:
    _quietly(os.setpgid, pid, pid)


def _quietly(function, *arguments) -> None:
    try:
        function(*arguments)
    except OSError:  # already gone
        pass


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(control: int, kernel_pid: int, run_directory: str) -> None:
    """``python -m labkit.launch.server CONTROL KERNEL_PID RUN_DIRECTORY``: see labkit/launch/client.py."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stop button is the kernel's business
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: an early stack request must not kill a rank
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for module in _PRELOAD:
        __import__(module)
    gc.collect()
    gc.freeze()  # a collection in a rank does not copy the server's pages
    kernel = socket.socket(fileno=control)
    wire.send(kernel, "ready")
    server = Server(kernel, kernel_pid)
    try:
        server.serve()
    finally:
        server.close()
    shutil.rmtree(run_directory, ignore_errors=True)  # not after an error: the kernel reads its traceback there


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
