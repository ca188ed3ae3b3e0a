"""Holds the processes of one world in the kernel: their pipes, control sockets, and how
each ended.
"""

import contextlib
import itertools
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Iterator

from labkit.launch.client import ServerHandle
from labkit.launch.linux import read_text
from labkit.launch.rank import STACK_SIGNAL, libc
from labkit.launch.wire import Connection

_world_ids = itertools.count()


class Ranks:
    """Forks ``num_ranks`` ranks and turns all that happens to them into events; ``settings`` go to
    every rank.
    """

    def __init__(self, server: ServerHandle, num_ranks: int, settings: dict):
        self.server = server
        self.num_ranks = num_ranks
        self.world_id = next(_world_ids)
        self.directory = f"{server.directory}/world{self.world_id}"
        self.exits: dict[int, int] = {}  # rank -> wait status
        self._selector = selectors.DefaultSelector()
        self._controls: list[Connection] = []
        given = []  # the ranks' ends of everything
        os.mkdir(self.directory, mode=0o700)
        try:
            for rank in range(num_ranks):
                for stream in ("stdout", "stderr"):
                    read_end, write_end = os.pipe()
                    given.append(write_end)
                    os.set_blocking(read_end, False)
                    self._selector.register(read_end, selectors.EVENT_READ, (rank, stream))
                kernel_end, rank_end = socket.socketpair()
                given.append(rank_end.detach())
                control = Connection(kernel_end)
                self._controls.append(control)
                self._selector.register(control, selectors.EVENT_READ, (rank, "control"))
            self._selector.register(server.connection, selectors.EVENT_READ, (None, "server"))
            self.pids = server.fork(self.world_id, num_ranks, given)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                fault = f"{num_ranks} ranks need {6 * num_ranks} open files: {error.strerror}"
                raise OSError(error.errno, f"{fault}. Raise `ulimit -n`") from None
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        for rank in range(num_ranks):
            self.send(rank, "settings", {**settings, "directory": self.directory, "rank": rank})

    def send(self, rank: int | None, *message) -> None:
        """Send a message to a rank, or to all of them if ``rank`` is None."""
        for control in self._controls if rank is None else [self._controls[rank]]:
            control.send(*message)

    def kill(self) -> None:
        """Kill all ranks, and what they started."""
        self.server.connection.send("kill", self.world_id)

    def ask_for_stack(self, rank: int) -> None:
        """Have a rank write the stack of its main thread into its file, also while it cannot run
        Python.
        """
        self.server.connection.send("ask_for_stack", self.world_id, rank)

    def events(self, timeout: float) -> Iterator[tuple]:
        """Yield what comes within ``timeout`` seconds, as `_read` does, and note which ranks have
        left.
        """
        for key, _ in self._selector.select(timeout):
            yield from self._read(key)
        known = self.server.exits.get(self.world_id, {})
        for rank in known.keys() - self.exits.keys():
            for key in list(self._selector.get_map().values()):
                if key.data[0] == rank:
                    # Its last words first: a pipe holds 64 KiB, which is one read.
                    yield from self._read(key)
            self.exits[rank] = known[rank]

    def end(self, kill: bool) -> None:
        """Let the ranks leave, or kill them, and give back all that they held."""
        if self.server.owner != os.getpid():  # a fork of the kernel, which has no ranks of its own
            return
        if kill:
            self.kill()
        else:
            self.send(None, "call", None)
        deadline = time.monotonic() + 3
        while len(self.exits) < self.num_ranks and self.server.connection.is_open:
            if time.monotonic() > deadline:
                self.kill()  # a rank that does not leave by itself
            for _ in self.events(0.05):
                pass
        if not self.server.connection.is_open:  # its ranks died with it, but not what they started
            mark = f"LABKIT_WORLD={self.directory}\0"
            for pid in self.pids:
                kill_process(pid)
            for pid in os.listdir("/proc"):
                if mark in read_text(f"/proc/{pid}/environ"):
                    kill_process(int(pid))
        self._release()

    def _read(self, key: selectors.SelectorKey) -> Iterator[tuple]:
        """Yield ``("output", rank, stream, data)``, or a rank's own message as
        ``(kind, rank, *fields)``.
        """
        rank, source = key.data
        if source == "server":
            self.server.poll()
        elif source == "control":
            control = self._controls[rank]
            for kind, *fields in control.arrived():
                yield (kind, rank, *fields)
            if not control.is_open:
                self._selector.unregister(control)
        else:
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                return
            if data:
                yield ("output", rank, source, data)
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)

    def _release(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data[1] in ("stdout", "stderr"):
                os.close(key.fd)
        self._selector.close()
        for control in self._controls:
            control.close()
        self.server.exits.pop(self.world_id, None)
        shutil.rmtree(self.directory, ignore_errors=True)


def kill_process(pid: int) -> None:
    """Kill a process that may be gone, and its group, such as a rank's data-loading workers."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            send(pid, signal.SIGKILL)


def ask_for_stack(pid: int) -> None:
    """Have a rank's main thread, and no other of its threads, write its stack; the rank may be
    gone.
    """
    libc.tgkill(pid, pid, int(STACK_SIGNAL))
