"""A machine's links are drawn as the matrix has them: bridges, one bar for all, switches, and what crosses sockets."""

import pytest

from course.measure.topology import Topology
from course.pictures.topology import draw_topology

TWO_PAIRS = Topology(
    ("GPU0", "GPU1", "GPU2", "GPU3", "NIC0"),
    (
        ("X", "NV4", "SYS", "SYS", "PIX"),
        ("NV4", "X", "SYS", "SYS", "NODE"),
        ("SYS", "SYS", "X", "NV4", "SYS"),
        ("SYS", "SYS", "NV4", "X", "SYS"),
        ("PIX", "NODE", "SYS", "SYS", "X"),
    ),
)


def keys(scene):
    return {mark.key for mark in scene.marks}


def test_each_link_is_drawn():
    scene = draw_topology(TWO_PAIRS, "An example")
    assert {"nv0.1", "nv2.3", "pci0.4", "sys1", "socket1"} <= keys(scene)
    assert not {"nv0.2", "pci1.4", "socket2"} & keys(scene)
    assert "GPU0  X     NV4" in str(scene.table)
    [gpu] = [mark for mark in scene.marks if mark.key == "device0"]
    assert gpu.fact == "GPU0 reaches GPU1 by NV4, GPU2 by SYS, GPU3 by SYS, NIC0 by PIX"


@pytest.mark.parametrize("num_gpus", [3, 8])
def test_one_bar_where_every_gpu_reaches_every_other(num_gpus):
    ways = tuple(tuple("X" if i == j else "NV18" for j in range(num_gpus)) for i in range(num_gpus))
    scene = draw_topology(Topology(tuple(f"GPU{i}" for i in range(num_gpus)), ways), "A node")
    assert {"nvlink", *(f"nv{i}" for i in range(num_gpus))} <= keys(scene)
