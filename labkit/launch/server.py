"""Forks ranks when asked, from a process that has imported torch once.

Importing torch takes seconds; forking a process that has done so takes milliseconds. It is safe:
the server is started by exec, has one thread, and never touches CUDA. It imports labkit anew after
an edit, and a rank imports the learner's modules itself: all edits reach the next launch. The
server dies with the kernel, and with it ranks and their children.
"""

import fcntl
import gc
import importlib
import os
import re
import select
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from labkit.device import count_gpus
from labkit.launch.linux import read_text
from labkit.launch.rank import STACK_SIGNAL, libc, stop
from labkit.launch.rank import main as run_rank
from labkit.launch.ranks import ask_for_stack, kill_process
from labkit.launch.wire import Connection

# Constants of Linux: of prctl, of unshare, and of the ioctl that brings a network interface up
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_THP_DISABLE = 41
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IDLE_SECONDS = 3.0
# What torch imports when an optimizer is made: 1.5 seconds on every rank, unless the server has
# done it before the first ranks of a kernel that will train, or in a pause.
_PRELOAD_TO_TRAIN = (
    "sympy",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
)


class Server:
    """Forks ranks when the kernel asks for them, reports how they ended, and leaves
    nothing behind.
    """

    def __init__(self, kernel: Connection, kernel_pid: int):
        self.kernel = kernel
        self.kernel_pid = kernel_pid
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (world_id, rank)
        self.orphans: dict[int, set[int]] = {}  # pid -> the worlds it can belong to
        self.last_request = float("inf")  # nothing has been asked yet
        self.has_gpus = os.path.exists("/dev/nvidiactl")
        self.to_import = list(_PRELOAD_TO_TRAIN)
        # Modules of labkit, with the state of their files
        self.imported: dict[str, tuple[int, int]] = {}

    def serve(self) -> None:
        """Answer the kernel until it leaves, however it leaves."""
        wakeup, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # When a child ends, wakeup becomes readable.
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.kernel, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        signal.signal(signal.SIGTERM, lambda *_: self.kernel.close())
        # The parent is asked for as well, because forks of the kernel may hold the connection open.
        while self.kernel.is_open and os.getppid() == self.kernel_pid:
            # After a pause probably nobody is about to ask: import something meanwhile.
            asked_long_ago = time.monotonic() - self.last_request > _IDLE_SECONDS
            is_idle = asked_long_ago and not self.ranks and bool(self.to_import)
            ready = {descriptor for descriptor, _ in poll.poll(0 if is_idle else 1000)}
            if wakeup in ready:
                os.read(wakeup, 4096)
            self._tidy_up()
            if self.kernel.fileno() in ready:
                self._read_kernel()
            if is_idle and not ready:
                self._import_next()

    def close(self) -> None:
        """End every rank and everything they started."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            for pid in self.ranks:
                kill_process(pid)
            self._tidy_up()
            if not self.ranks and not self.orphans:
                return
            time.sleep(0.005)

    def _import_next(self) -> None:
        name = self.to_import.pop(0)
        if self._may_import({name}):
            with suppress(ImportError):  # another version of torch may not have it
                importlib.import_module(name)
            gc.freeze()  # as in main

    def _may_import(self, modules: set[str]) -> bool:
        """Let a child try where there are GPUs: after an import that starts a thread or CUDA,
        nothing can be forked.
        """
        if not self.has_gpus or modules <= sys.modules.keys():
            return True
        _, status = os.waitpid(_fork(_exit_if_unsafe, modules), 0)
        return status == 0

    def _import_of_labkit(self, modules: set[str]) -> None:
        """Import these as their files are now: on every rank it would take a tenth of a second."""
        if any(_file_state(name) != state for name, state in self.imported.items()):
            for name in self.imported:
                package, _, attribute = name.rpartition(".")
                if package in sys.modules:
                    vars(sys.modules[package]).pop(attribute, None)
                del sys.modules[name]
            self.imported = {}
        if not self._may_import(modules):
            return  # each rank imports them itself
        before = set(sys.modules)
        for name in modules - before:
            with suppress(Exception):  # the rank that needs it will say what is wrong with it
                importlib.import_module(name)
        if new := {name for name in sys.modules.keys() - before if name.startswith("labkit.")}:
            self.imported |= {name: _file_state(name) for name in new}
            gc.freeze()

    def _read_kernel(self) -> None:
        self.last_request = time.monotonic()
        for message in self.kernel.arrived():
            match message:
                case ("fork", world_id, num_ranks, will_train, modules):
                    while will_train and self.to_import:
                        self._import_next()
                    self._import_of_labkit(modules)
                    self._fork_ranks(world_id, num_ranks)
                case ("kill", world_id):
                    for pid, (world, _) in self.ranks.items():
                        if world == world_id:
                            kill_process(pid)
                case ("ask_for_stack", *of_rank):
                    for pid, world_and_rank in self.ranks.items():
                        if world_and_rank == tuple(of_rank):
                            ask_for_stack(pid)
                case ("count_gpus", visible):
                    _, status = os.waitpid(_fork(_exit_with_gpu_count, visible), 0)
                    self.kernel.send("gpus", max(0, os.waitstatus_to_exitcode(status)))

    def _fork_ranks(self, world_id: int, num_ranks: int) -> None:
        # Three for each rank, as _become_rank takes them
        given = [self.kernel.descriptors.pop(0) for _ in range(3 * num_ranks)]
        pids = []
        try:
            _check_safe_to_fork()
            for rank in range(num_ranks):
                pid = _fork(_become_rank, os.getpid(), *given[3 * rank : 3 * rank + 3])
                with suppress(OSError):  # in parent and child: whichever runs first
                    os.setpgid(pid, pid)
                self.ranks[pid] = (world_id, rank)
                pids.append(pid)
            self.kernel.send("forked", world_id, pids)
        except OSError as error:  # also fork's own: too many processes, too little memory
            self.kernel.send("refused", world_id, str(error))
        for descriptor in given:
            os.close(descriptor)

    def _tidy_up(self) -> None:
        """Report the ranks that have ended, and end what they left behind."""
        with suppress(ChildProcessError):  # there is none at all
            for pid, status in iter(lambda: os.waitpid(-1, os.WNOHANG), (0, 0)):
                self.orphans.pop(pid, None)
                if pid in self.ranks:
                    kill_process(pid)  # for what the rank started
                    self.kernel.send("exit", *self.ranks.pop(pid), status)
        living = {world_id for world_id, _ in self.ranks.values()}
        children = read_text(f"/proc/self/task/{os.getpid()}/children")  # empty in some sandboxes
        for pid in set(map(int, children.split())) - self.ranks.keys() - self.orphans.keys():
            # A program that a rank ran, however indirectly, has its world in its environment; a
            # mere fork shows none.
            environment = read_text(f"/proc/{pid}/environ")
            marks = re.findall(r"(?:^|\0)LABKIT_WORLD=[^\0]*/world(\d+)", environment)
            self.orphans[pid] = set(map(int, marks[:1])) or living
        for pid, world_ids in self.orphans.items():
            if not world_ids & living:
                kill_process(pid)  # its own children become ours, and end next time


def _file_state(module: str) -> tuple[int, int]:
    with suppress(OSError):
        state = os.stat(sys.modules[module].__file__ or "")
        return state.st_mtime_ns, state.st_size
    return 0, 0  # it was removed


def _fork(child, *arguments) -> int:
    """Run ``child(*arguments)``, which does not return, in a fork of the server.

    Return its process id.
    """
    pid = os.fork()
    if pid == 0:
        try:
            child(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _exit_with_gpu_count(visible: str | None) -> None:
    """Ask CUDA in a child: asking in the server could start CUDA there, and no rank could be forked
    after that.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    count = 0
    with suppress(Exception):
        count = count_gpus()
    os._exit(min(count, 255))  # the exit status is the answer


def _exit_if_unsafe(modules: set[str]) -> None:
    """Import in a child, and exit with 0 if the server could still fork after that."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    _check_safe_to_fork()
    os._exit(0)


def _become_rank(server: int, stdout: int, stderr: int, control: int) -> None:
    """In the forked child: keep only the modules that the server has imported, then run
    the rank.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, stop)
    os.setpgid(0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if "[madvise]" in read_text("/sys/kernel/mm/transparent_hugepage/enabled"):
        # The server's heap has pages of 2 MiB; what is new here need not.
        libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, control}:
        with suppress(OSError):  # listdir's own
            os.close(descriptor)
    run_rank(socket.socket(fileno=control))


def _check_safe_to_fork() -> None:
    """Raise OSError, as fork does, when forking now would be wrong."""
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise OSError(f"it has {threads} threads")
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    if any("nvidia-uvm" in file for file in files):
        raise OSError("it has touched CUDA")


def _enter_private_network() -> None:
    """Leave the machine's network for one with a loopback only, where no other user can connect to
    a rank.
    """
    user = os.getuid()
    group = os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:  # without root's rights, in a user namespace of our own
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            raise PermissionError(
                "LABKIT_OWN_NETWORK is set, but this machine lets no user make a network namespace"
            )
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as anything:  # up, as `ip link set lo up` says it
        fcntl.ioctl(anything, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def main(control: int, kernel_pid: int, run_directory: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stop button is the kernel's business
    # Ranks inherit this: an early request for a stack must not kill one.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.environ.get("LABKIT_OWN_NETWORK", "0") != "0":
        _enter_private_network()
    # torch imports numpy too, where that is installed.
    for module in ("cloudpickle", "torch", "torch.distributed"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank does not copy the server's pages
    kernel = Connection(socket.socket(fileno=control))
    kernel.send("ready")
    server = Server(kernel, kernel_pid)
    try:
        server.serve()
    finally:
        server.close()
    # After an error it stays: the kernel reads its traceback there.
    shutil.rmtree(run_directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
