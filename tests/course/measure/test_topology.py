"""The matrix of nvidia-smi is read as it is printed, and sockets are found where NVLinks hide what lies between."""

import pytest

from course.measure import topology
from course.measure.topology import Topology, read_matrix, this_machine

NAMES = [f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(8)]


def way(i, j):
    """The way between two devices of a node with 8 GPUs, all joined by NVLink, with a card each."""
    if i == j:
        return "X"
    if i < 8 and j < 8:
        return "NV18"
    if i % 8 // 4 != j % 8 // 4:
        return "SYS"
    return "PXB" if i % 8 == j % 8 else "NODE"


@pytest.fixture
def printed():
    """As nvidia-smi prints it: tabs, an underlined head, more columns for GPUs, and a legend."""
    lines = ["\t" + "\t".join(f"\x1b[4m{name}" for name in [*NAMES, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for i, name in enumerate(NAMES):
        lines.append("\t".join([name, *(f" {way(i, j)} " for j in range(16)), "0-55,112-167\t0" if i < 8 else ""]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "NIC Legend:", "  NIC0: mlx5_0", ""])


def test_a_node_of_eight(printed):
    node = read_matrix(printed)
    assert node.names == tuple(NAMES)
    assert node.ways[0][7] == "NV18" and node.ways[5][13] == "PXB" and node.ways[0][15] == "SYS"
    assert node.sockets() == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_what_is_not_a_matrix():
    with pytest.raises(ValueError, match="topo -m"):
        read_matrix("No devices were found")


def test_without_a_driver_the_cores_are_shown(monkeypatch):
    def no_such_program(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(topology.subprocess, "run", no_such_program)
    monkeypatch.setattr(topology.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(topology, "_socket", lambda core: core // 2)
    two = this_machine()
    assert two == Topology(("2 cores of CPU 0", "1 core of CPU 1"), (("X", "SYS"), ("SYS", "X")))
    assert two.sockets() == [[0], [1]]
