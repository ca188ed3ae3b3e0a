"""Reads from Linux which threads of this process run or wait, for whom, and how much
has arrived.
"""

import contextlib
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine, "")  # the number of that call
_PRIVATE = 128  # flag of a futex: within one process
_RECEIVED = slice(128, 136)  # tcpi_bytes_received in struct tcp_info of linux/tcp.h


def is_busy() -> bool:
    """At each of 20 moments, was some other thread of this process running, or waiting only for a
    core or a disk?
    """
    me = threading.get_native_id()
    for _ in range(20):  # one moment is not enough: gloo's loops wake up a hundred times a second
        facts = [_of_task(task, "stat") for task in tasks() if task != me]
        states = [text.rpartition(")")[2][1:2] for text in facts]
        if "R" not in states and "D" not in states:
            return False
        time.sleep(0.003)
    return True


def bytes_received() -> int:
    """Count what has arrived over this process's TCP connections, read or not: it grows for as long
    as a peer sends.
    """
    total = 0
    for connection in tcp_sockets():
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
        total += int.from_bytes(facts[_RECEIVED], sys.byteorder)
    return total


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each open until the next."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.proto == socket.IPPROTO_TCP:
                        yield connection


def tasks() -> list[int]:
    """Return the threads of this process, those of C++ too."""
    return sorted(map(int, os.listdir("/proc/self/task")))


def switches(task: int | None) -> int:
    """Count how often a thread has been given a core, or has given it up."""
    return sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", _of_task(task, "status"))))


def main_thread(pid: int) -> tuple[str, float]:
    """Return the state of a process's main thread, such as "S" for one that sleeps, and how many
    seconds it has run.
    """
    facts = read_text(f"/proc/{pid}/task/{pid}/stat").rpartition(")")[2].split()
    if not facts:
        return "", 0.0  # it is gone
    ticks = int(facts[11]) + int(facts[12])  # in user code, and in the kernel
    return facts[0], ticks / os.sysconf("SC_CLK_TCK")


def name(task: int | None) -> str:
    return _of_task(task, "comm")


def may_wait_for_a_thread(task: int | None) -> bool:
    """Does a thread stay in a futex, in which threads wait for each other? True also where Linux
    does not tell.
    """
    return _stays(task, lambda: _syscall(task)[:1] in ([], [_FUTEX]))


def waits_for_a_python_thread(task: int | None) -> bool:
    """Can only a Python thread of this process wake this one? Not if one of C++ may, such as one
    that reads files.
    """

    def is_so() -> bool:
        syscall = _syscall(task)
        if syscall[:1] != [_FUTEX] or not int(syscall[2], 16) & _PRIVATE or int(syscall[4], 16):
            return False
        python = {thread.native_id for thread in threading.enumerate()} | {os.getpid()}
        others = [other for other in tasks() if other not in python and "gloo" not in name(other)]
        return all(_syscall(other)[:1] == [_FUTEX] for other in others)

    return _stays(task, is_so)


def _stays(task: int | None, is_so: Callable[[], bool]) -> bool:
    """Is something so at each of four moments, between which the thread has not run?

    For a moment of each turn with the GIL, a thread that computes is in a futex, too.
    """
    before = switches(task)
    for _ in range(4):
        if not is_so():
            return False
        time.sleep(0.003)
    return switches(task) == before


def _syscall(task: int | None) -> list[str]:
    """Return the number and the arguments of the call that a thread is in; nothing where Linux does
    not tell.
    """
    return _of_task(task, "syscall").split() if _FUTEX else []


def _of_task(task: int | None, name: str) -> str:
    return read_text(f"/proc/self/task/{task}/{name}")


def read_text(path: str) -> str:
    """Read a file of /proc; return "" if it is gone, or hidden."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
