"""What a process has and leaves behind: children, open descriptors, addresses that it listens on."""

import contextlib
import os
import time


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def descriptors(pid: int) -> dict[str, int]:
    """The open descriptors of a process by kind, without those of Jupyter: its TCP sockets and its history file."""
    with open("/proc/net/unix") as file:
        unix = {f"socket:[{line.split()[6]}]" for line in file.read().splitlines()[1:]}
    links = _links(pid)
    return {
        "pipes": sum(link.startswith("pipe:") for link in links),
        "sockets": sum(link in unix for link in links),
        "files": sum("labkit" in link for link in links),
    }


def listening(*pids: int) -> set[str]:
    """The addresses, in hexadecimal, that these processes listen on."""
    links = {link for pid in pids for link in _links(pid)}
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for fields in map(str.split, file.read().splitlines()[1:]):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    addresses.add(fields[1])
    return addresses


def _links(pid: int) -> list[str]:
    """What each open descriptor of a process leads to."""
    links = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return links


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
