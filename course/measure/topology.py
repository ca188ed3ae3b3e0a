"""Reads what lies between a machine's devices: from ``nvidia-smi topo -m``, or of the CPU where there is none."""

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from labkit.sizes import counted

DEVICE = re.compile(r"\b(?:GPU|NIC)\d+\b")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Topology:
    """The names of some devices, and the way between any two: NV4, PIX, PXB, PHB, NODE or SYS; X to itself."""

    names: tuple[str, ...]
    ways: tuple[tuple[str, ...], ...]

    def sockets(self) -> list[list[int]]:
        """Return which devices belong to the same CPU socket.

        An NVLink hides what else lies between two GPUs. So we look at third devices: two GPUs share a socket if each
        third device is across SYS from both of them, or from neither.
        """
        found: list[list[int]] = []
        for device in range(len(self.names)):
            socket = next((each for each in found if self._same_socket(each[0], device)), None)
            found.append([device]) if socket is None else socket.append(device)
        return found

    def _same_socket(self, i: int, j: int) -> bool:
        pairs = [(a, b) for k, (a, b) in enumerate(zip(self.ways[i], self.ways[j])) if k not in (i, j)]
        told = [(a, b) for a, b in pairs if not a.startswith("NV") and not b.startswith("NV")]
        return self.ways[i][j] != "SYS" and all((a == "SYS") == (b == "SYS") for a, b in told)


def read_matrix(text: str) -> Topology:
    """Return the GPUs and network cards in what ``nvidia-smi topo -m`` printed; its other columns are left out.

    >>> read_matrix("      GPU0 GPU1 CPU Affinity\\nGPU0   X   NV4  0-7\\nGPU1  NV4   X   0-7").ways
    (('X', 'NV4'), ('NV4', 'X'))
    """
    head, *lines = re.sub(r"\x1b\[[\d;]*m", "", text).strip().splitlines()  # its head is underlined
    names = tuple(DEVICE.findall(head))
    rows = {words[0]: tuple(words[1 : len(names) + 1]) for line in lines if (words := line.split())}
    if not names or not set(names) <= set(rows):
        raise ValueError(f"no matrix of GPUs in {text!r}: give what `nvidia-smi topo -m` prints")
    return Topology(names, tuple(rows[name] for name in names))


def this_machine() -> Topology:
    """Return this machine's GPUs and network cards, or its CPU sockets with their cores where it has no GPU."""
    try:
        return read_matrix(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout)
    except (OSError, ValueError, IndexError):
        sockets = Counter(_socket(core) for core in os.sched_getaffinity(0))
        names = tuple(f"{counted(number, 'core')} of CPU {socket}" for socket, number in sorted(sockets.items()))
        ways = ["X" if a == b else "SYS" for a, b in product(names, repeat=2)]
        return Topology(names, tuple(tuple(ways[i : i + len(names)]) for i in range(0, len(ways), len(names))))


def _socket(core: int) -> int:
    path = CPUS / f"cpu{core}" / "topology" / "physical_package_id"
    return max(0, int(path.read_text())) if path.exists() else 0
