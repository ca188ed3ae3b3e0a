"""What this machine has, and in words what will run on it and how.

`this_machine` only looks, `facts` and `what_runs_here` only word what was seen, so that the words can be tested with
machines that nobody here owns.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from labkit.sizes import counted

GIB = 2**30
MIB = 2**20

MOST_RANKS = 16
"""The largest world a notebook launches."""

RANK_BYTES = 128 * MIB
"""Memory to reckon for a small rank. Measured: 50 MiB of its own with one layer of 1024 x 1024, the rest is shared."""

LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge, through the CPU",
    "NODE": "PCIe host bridges of one CPU socket",
    "SYS": "the link between CPU sockets",
}
"""nvidia-smi's names for the ways between two GPUs without NVLink, the fastest first."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """What matters for running ranks here. ``gpus`` are those in the machine, ``usable_gpus`` those torch can use."""

    cores: int
    memory_bytes: int
    free_memory_bytes: int
    free_shared_memory_bytes: int
    open_files_limit: int
    loopback_works: bool
    torch_version: str
    nccl_version: str | None = None
    usable_gpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    """(lower GPU, higher GPU) to nvidia-smi's name of the way between them: NV18, PIX, SYS, ..."""


def check() -> None:
    """Print what this machine has and what will run on it."""
    machine = this_machine()
    print(facts(machine))
    print()
    print(what_runs_here(machine))


def main() -> int:
    """For whoever prepares a node: the same, then a real launch; 1 if something needed is missing, with what to do."""
    check()
    missing = what_is_missing(this_machine()) + packages_to_mend()
    if not missing:
        try:
            _launch_four()
        except Exception as error:
            missing.append(f"LAUNCH: four ranks could not be started and add up their numbers: {error}")
    for line in missing:
        print(f"MISSING  {line}", file=sys.stderr)
    return 1 if missing else 0


# --- words ---------------------------------------------------------------------------------------------------------


def facts(machine: Machine) -> str:
    """The machine as a table of text."""
    kinds = {gpu: machine.gpus.count(gpu) for gpu in machine.gpus}
    gpus = ", ".join(f"{count} x {gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu, count in kinds.items())
    nccl = machine.nccl_version or "not in this build of PyTorch"
    rows = {
        "CPU cores": f"{machine.cores} that this process may use",
        "memory": f"{machine.free_memory_bytes / GIB:.1f} GiB free of {machine.memory_bytes / GIB:.1f} GiB",
        "shared memory": f"{_size(machine.free_shared_memory_bytes)} free in /dev/shm",
        "GPUs": gpus or "none",
        "between GPUs": _ways_between(machine),
        "PyTorch": machine.torch_version,
        "NCCL": nccl,
        "open files": f"at most {machine.open_files_limit} in one process",
        "ports": "loopback works" if machine.loopback_works else "loopback does NOT work",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items() if value)


def what_runs_here(machine: Machine) -> str:
    """What will run on this machine and how, then what to mend, as sentences.

    >>> laptop = Machine(8, 16 * GIB, 9 * GIB, 8 * GIB, 1024, True, "2.13.0")
    >>> print(what_runs_here(laptop).splitlines()[0])
    Every notebook runs here. Ranks are processes on 8 CPU cores and talk through gloo.
    """
    if not machine.loopback_works:
        return what_is_missing(machine)[0]
    return "\n".join([*_how_ranks_run(machine), *_what_to_mend(machine)])


def _how_ranks_run(machine: Machine) -> list[str]:
    cores = counted(machine.cores, "CPU core")
    if machine.usable_gpus > 1:
        lines = [f"Every notebook runs here. Up to {machine.usable_gpus} ranks run on GPUs, one each, through NCCL."]
        lines.append(f"Launches of more ranks than that run as processes on {cores}, through gloo.")
        return lines + _placement_advice(machine)
    lines = [f"Every notebook runs here. Ranks are processes on {cores} and talk through gloo."]
    if machine.usable_gpus == 1:
        lines.append("The one GPU can hold one rank only: NCCL refuses two on the same GPU.")
    elif machine.gpus:
        lines.append(
            f"The {counted(len(machine.gpus), 'GPU')} cannot be used by this PyTorch ({machine.torch_version}): "
            "it is a build without CUDA, or CUDA_VISIBLE_DEVICES hides them."
        )
    lines.append("Calls, groups and results are the same as on GPUs; only the seconds differ.")
    if machine.cores < MOST_RANKS:
        lines.append(
            f"Up to {counted(machine.cores, 'rank')} really run at the same time. More take turns: right, but slower, "
            "so read the shape of a timing here, not its size."
        )
    return lines


def _placement_advice(machine: Machine) -> list[str]:
    """Where the fast links are, and so where tensor groups belong."""
    if not machine.links:
        return []
    slow = [way for way in machine.links.values() if not way.startswith("NV")]
    if not slow:
        return ["NVLink joins every pair of GPUs: tensor groups may span all of them."]
    joined = [pair for pair, way in machine.links.items() if way.startswith("NV")]
    if joined:
        pairs = ", ".join(f"{a}-{b}" for a, b in sorted(joined))
        return [f"NVLink joins only the GPUs {pairs}: keep a tensor group inside them."]
    return ["No NVLink between these GPUs: tensor parallelism will be slow, data and pipeline parallelism less so."]


def _what_to_mend(machine: Machine) -> list[str]:
    lines = []
    room = int(machine.free_memory_bytes // RANK_BYTES)
    if room < MOST_RANKS:
        lines.append(
            f"MEMORY: room for about {counted(room, 'rank')}; notebooks launch up to {MOST_RANKS}. Close others."
        )
    if machine.free_shared_memory_bytes < GIB:
        lines.append(
            f"SHARED MEMORY: {_size(machine.free_shared_memory_bytes)} in /dev/shm is little; large tensors passed to "
            "ranks, and NCCL, need it. Start the container with --ipc=host or --shm-size=8g."
        )
    if machine.open_files_limit < 1024:
        lines.append(f"OPEN FILES: {machine.open_files_limit} is little. Run `ulimit -n 4096` before `make lab`.")
    return lines


def what_is_missing(machine: Machine) -> list[str]:
    """What the lab cannot run without, and how to mend it; empty on a machine that will do."""
    missing = []
    if not machine.loopback_works:
        missing.append(
            "LOOPBACK: nothing can listen on 127.0.0.1, so ranks cannot reach each other: `ip link set lo up`."
        )
    if machine.free_memory_bytes < 4 * RANK_BYTES + GIB:
        missing.append(
            f"MEMORY: {_size(machine.free_memory_bytes)} free is not enough for 4 ranks: close other programs."
        )
    are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # to use the CPU on purpose
    if machine.gpus and not machine.usable_gpus and not are_hidden and machine.torch_version.endswith("+cpu"):
        missing.append(
            f"CUDA: this node has GPUs, and PyTorch {machine.torch_version} is built without CUDA: install another, "
            'start from an NGC container, or say that the CPU is meant: CUDA_VISIBLE_DEVICES="".'
        )
    return missing


def packages_to_mend() -> list[str]:
    """Packages of a workshop that are not installed, or in a version outside of the range."""
    to_mend = []
    for text in metadata.requires("megatron-lab") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "lab"}):
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = "missing"
            if version == "missing" or not requirement.specifier.contains(version, prereleases=True):
                to_mend.append(f"PACKAGE: {requirement.name} is {version}: pip install '{requirement}'".split(" ;")[0])
    return to_mend


def _launch_four() -> None:
    """Four real ranks, and a sum over them."""
    from labkit.launch import launch

    if launch(_sum_of_ranks, world_size=4) != [6.0] * 4:
        raise RuntimeError("their sum is wrong")
    print("Four ranks were launched and added up their numbers.")


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    from labkit.groups import local_device

    total = torch.tensor([float(dist.get_rank())], device=local_device())
    dist.all_reduce(total)
    return total.item()


def _ways_between(machine: Machine) -> str:
    """How many pairs of GPUs each kind of link joins."""
    ways = list(machine.links.values())
    kinds = sorted(set(ways), key=lambda way: (not way.startswith("NV"), list(LINKS).index(way) if way in LINKS else 0))
    return "; ".join(f"{counted(ways.count(way), 'pair')} by {_way_name(way)}" for way in kinds)


def _way_name(way: str) -> str:
    words = counted(int(way[2:]), "NVLink") if re.fullmatch(r"NV\d+", way) else LINKS.get(way, "?")
    return f"{way} ({words})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


# --- looking -------------------------------------------------------------------------------------------------------


def this_machine() -> Machine:
    """Look at the machine. Starts no process but nvidia-smi, and does not touch a GPU's memory."""
    import torch  # here, so that the words above can be had without its seconds
    import torch.cuda.nccl

    total, free = _memory()
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return Machine(
        cores=_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        free_shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback_works=_loopback_works(),
        torch_version=torch.__version__,
        nccl_version=".".join(map(str, nccl)) if nccl else None,
        usable_gpus=torch.cuda.device_count(),
        gpus=parse_gpus(_nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")),
        links=parse_topology(_nvidia_smi("topo", "-m")),
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs that ``nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits`` lists.

    >>> parse_gpus("NVIDIA H100 80GB HBM3, 81559")
    (Gpu(name='NVIDIA H100 80GB HBM3', memory_bytes=85520809984),)
    """
    rows = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return tuple(Gpu(name.strip(), int(mib) * MIB if mib.strip().isdigit() else 0) for name, _, mib in rows)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The way between each two GPUs in the matrix of ``nvidia-smi topo -m``."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    links = {}
    for row, cells in enumerate(rows):
        for column in range(row + 1, len(rows)):  # the GPUs' columns come first, then those of network cards
            links[int(rows[row][0][3:]), int(rows[column][0][3:])] = cells[1 + column]
    return links


def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where it is missing, fails or hangs."""
    try:
        run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _cores() -> int:
    """CPU cores that this process may use: its affinity, and a container's quota."""
    quotas = [parse_cpu_quota(text) for text in _cgroup_files("cpu.max")]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in quotas if quota)]))


def parse_cpu_quota(text: str) -> float | None:
    """Cores allowed by a cgroup's ``cpu.max``, None for no limit.

    >>> parse_cpu_quota("150000 100000"), parse_cpu_quota("max 100000")
    (1.5, None)
    """
    quota, _, period = text.partition(" ")
    return None if quota.strip() == "max" else int(quota) / int(period)


def _memory() -> tuple[int, int]:
    """Bytes in all and free: the machine's, or a container's. What only caches files counts as free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    groups = zip(_cgroup_files("memory.max"), _cgroup_files("memory.current"), _cgroup_files("memory.stat"))
    for limit, used, stat in groups:
        if limit.strip() != "max":
            cached = sum(map(int, re.findall(r"^inactive_file (\d+)", stat, re.M)))
            total, free = min(total, int(limit)), min(free, int(limit) - int(used) + cached)
    return total, max(free, 0)


def _cgroup_files(name: str) -> list[str]:
    """The texts of ``name`` in this process's control group (version 2) and in those above it."""
    path = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/"
    )
    place = Path("/sys/fs/cgroup") / path.lstrip("/")
    folders = [folder for folder in (place, *place.parents) if folder.is_relative_to("/sys/fs/cgroup")]
    return [(folder / name).read_text() for folder in folders if (folder / name).is_file()]


def _loopback_works() -> bool:
    """Whether a socket on 127.0.0.1 can be reached, on a port that the system chooses."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
