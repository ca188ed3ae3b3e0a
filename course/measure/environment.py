"""Lists what this machine has, and says in words what will run on it and how.

`look_at_machine` only looks. `facts`, `what_runs_here` and `what_is_missing` only put what was seen into words, so they
can be tested with machines that nobody here owns.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from stat import S_IROTH, S_IXOTH

from labkit.sizes import counted
from labtrain.command_line import run_command

GIB = 2**30
MIB = 2**20

MOST_RANKS = 16
"""The largest world that a notebook launches."""

RANK_BYTES = 128 * MIB
"""Memory to allow for a small rank. Measured: 50 MiB of its own with one layer of 1024 x 1024; the rest is shared."""

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
    """What matters for running ranks here. ``gpus`` are in the machine; torch can use ``usable_gpus`` of them."""

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
    """From (lower GPU, higher GPU) to nvidia-smi's name of the way between them: NV18, PIX, SYS, ..."""


def check() -> None:
    """Print what this machine has and what will run on it."""
    machine = look_at_machine()
    print(facts(machine), what_runs_here(machine), sep="\n\n")


def main() -> int:
    """Print the same, then launch real ranks; return 1 and say what to do if something needed is missing."""
    missing = packages_to_mend() + folders_to_mend()
    try:
        check()
        missing += what_is_missing(look_at_machine())
        if not missing:
            from labkit.launch import launch

            if launch(_sum_of_ranks, world_size=4) != [6.0] * 4:
                raise RuntimeError("their sum is wrong")
            print("Four ranks were launched and added up their numbers.")
    except BrokenPipeError:
        raise  # nobody reads this
    except Exception as error:
        missing.append(f"LAUNCH: four ranks could not be started and add up their numbers: {error}")
    for line in missing:
        print(f"MISSING  {line}", file=sys.stderr)
    if closed := closed_to_others():
        print(f"NOTE  Other users of this machine cannot run this installation: {closed} is closed to them.")
    return 1 if missing else 0


# --- words ---------------------------------------------------------------------------------------------------------


def facts(machine: Machine) -> str:
    """Return the machine as a table of text."""
    kinds = {gpu: machine.gpus.count(gpu) for gpu in machine.gpus}
    gpus = ", ".join(f"{count} x {gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB)" for gpu, count in kinds.items())
    rows = {
        "CPU cores": f"{machine.cores} that this process may use",
        "memory": f"{machine.free_memory_bytes / GIB:.1f} GiB free of {machine.memory_bytes / GIB:.1f} GiB",
        "shared memory": f"{_size(machine.free_shared_memory_bytes)} free in /dev/shm",
        "GPUs": gpus or "none",
        "between GPUs": _ways_between(machine),
        "PyTorch": machine.torch_version,
        "NCCL": machine.nccl_version or "not in this build of PyTorch",
        "open files": f"at most {machine.open_files_limit} in one process",
        "ports": "loopback works" if machine.loopback_works else "loopback does NOT work",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items() if value)


def what_runs_here(machine: Machine) -> str:
    """Return sentences: what will run on this machine and how, then what to mend.

    >>> laptop = Machine(8, 16 * GIB, 9 * GIB, 8 * GIB, 1024, True, "2.13.0")
    >>> print(what_runs_here(laptop).splitlines()[0])
    Every notebook runs here. Ranks are processes on 8 CPU cores and talk through gloo.
    """
    if not machine.loopback_works:
        return what_is_missing(machine)[0]
    how = _how_ranks_run_on_gpus(machine) if machine.usable_gpus > 1 else _how_ranks_run_on_cores(machine)
    return "\n".join([*how, *_what_to_mend(machine)])


def _how_ranks_run_on_gpus(machine: Machine) -> Iterator[str]:
    yield f"Every notebook runs here. Up to {machine.usable_gpus} ranks run on GPUs, one each, through NCCL."
    yield f"Launches of more ranks than that run as processes on {counted(machine.cores, 'CPU core')}, through gloo."
    joined = [f"{a}-{b}" for (a, b), way in sorted(machine.links.items()) if way.startswith("NV")]
    if machine.links and len(joined) == len(machine.links):
        yield "NVLink joins every pair of GPUs: tensor groups may span all of them."
    elif joined:
        yield f"NVLink joins only the GPUs {', '.join(joined)}: keep a tensor group inside them."
    elif machine.links:
        yield "No NVLink between these GPUs: tensor parallelism will be slow, data and pipeline parallelism less so."


def _how_ranks_run_on_cores(machine: Machine) -> Iterator[str]:
    cores, num_gpus = counted(machine.cores, "CPU core"), counted(len(machine.gpus), "GPU")
    yield f"Every notebook runs here. Ranks are processes on {cores} and talk through gloo."
    if machine.usable_gpus == 1:
        yield "The one GPU can hold one rank only: NCCL refuses two on the same GPU."
    elif machine.gpus:
        why = "it is a build without CUDA, or CUDA_VISIBLE_DEVICES hides them"
        yield f"The {num_gpus} cannot be used by this PyTorch ({machine.torch_version}): {why}."
    yield "Calls, groups and results are the same as on GPUs; only the seconds differ."
    if machine.cores < MOST_RANKS:
        yield (
            f"Up to {counted(machine.cores, 'rank')} really run at the same time. More take turns: the results are\n"
            "right, but slower, so read the shape of a timing here, not its size."
        )


def _what_to_mend(machine: Machine) -> Iterator[str]:
    room, shared = machine.free_memory_bytes // RANK_BYTES, machine.free_shared_memory_bytes
    if room < MOST_RANKS:
        ranks = counted(room, "rank")
        yield f"MEMORY: room for about {ranks}; notebooks launch up to {MOST_RANKS}. Close other programs."
    if shared < GIB:
        yield (
            f"SHARED MEMORY: {_size(shared)} in /dev/shm is little; large tensors passed to ranks, and NCCL, need it. "
            "Start the container with --ipc=host or --shm-size=8g."
        )
    if machine.open_files_limit < 1024:
        yield f"OPEN FILES: {machine.open_files_limit} is little. Run `ulimit -n 4096` before `make lab`."


def what_is_missing(machine: Machine) -> list[str]:
    """Return what the lab cannot run without, and how to mend it; empty on a machine that will do."""
    missing, free = [], machine.free_memory_bytes
    if not machine.loopback_works:
        missing.append("LOOPBACK: nothing listens on 127.0.0.1, so ranks cannot reach each other: `ip link set lo up`.")
    if free < 4 * RANK_BYTES + GIB:
        missing.append(f"MEMORY: {_size(free)} free is not enough for 4 ranks: close other programs.")
    are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # to use the CPU on purpose
    if machine.gpus and not machine.usable_gpus and not are_hidden and machine.torch_version.endswith("+cpu"):
        missing.append(
            f"CUDA: this node has GPUs, but PyTorch {machine.torch_version} is built without CUDA: install a build "
            'with it, start from an NGC container, or use the CPU on purpose: CUDA_VISIBLE_DEVICES="".'
        )
    return missing


def folders_to_mend() -> list[str]:
    """Return what to do where JupyterLab cannot keep its own files, as in a home that is read-only."""
    try:
        from jupyter_core.paths import jupyter_config_dir, jupyter_data_dir
    except ImportError:  # `packages_to_mend` says so
        return []
    for folder in map(Path, (jupyter_config_dir(), jupyter_data_dir())):
        nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
        if not os.access(nearest, os.W_OK):
            way_out = "set HOME to a folder of your own first: `export HOME=/scratch/$USER`"
            return [f"HOME: JupyterLab keeps files in {folder}, and {nearest} cannot be written to: {way_out}."]
    return []


def closed_to_others() -> Path | None:
    """Return what keeps other users of this machine from this Python or this lab; None if nothing does."""
    for path in (Path(sys.executable).resolve(), Path(__file__).resolve()):
        for each in (*reversed(path.parents), path):
            if not each.stat().st_mode & (S_IROTH if each == path else S_IXOTH):
                return each
    return None


def packages_to_mend() -> list[str]:
    """Return the packages of a workshop that are missing, or installed in a version outside their range."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["PACKAGE: packaging is missing: pip install packaging"]
    to_mend = []
    try:
        texts = metadata.requires("megatron-lab") or []
    except metadata.PackageNotFoundError:  # as in an NGC container that was just started
        return ["PACKAGE: the lab itself is missing: in its folder, pip install -e '.[lab]'"]
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "lab"}):
            try:
                version = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                version = "missing"
            if version == "missing" or not requirement.specifier.contains(version, prereleases=True):
                requirement.marker = None  # pip installs nothing for 'jupyterlab>=4.2; extra == "lab"'
                to_mend.append(f"PACKAGE: {requirement.name} is {version}: pip install '{requirement}'")
    return to_mend


def _ways_between(machine: Machine) -> str:
    """Say how many pairs of GPUs each kind of link joins, the fastest first."""
    ways = list(machine.links.values())
    nvlinks = {way: counted(int(way[2:]), "NVLink") for way in ways if re.fullmatch(r"NV\d+", way)}
    names = nvlinks | LINKS | {way: "?" for way in ways if way not in nvlinks | LINKS}
    return "; ".join(f"{counted(ways.count(way), 'pair')} by {way} ({names[way]})" for way in names if way in ways)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


# --- a launch ------------------------------------------------------------------------------------------------------


def _sum_of_ranks() -> float:
    """On one of four real ranks: add up all their numbers."""
    import torch
    import torch.distributed as dist

    from labkit.groups import local_device

    total = torch.tensor([float(dist.get_rank())], device=local_device())
    dist.all_reduce(total)
    return total.item()


# --- looking -------------------------------------------------------------------------------------------------------


def look_at_machine() -> Machine:
    """Return what is seen here. Starts no process but nvidia-smi, and does not touch a GPU's memory."""
    import torch  # here, so that the words above do not wait for it
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
    """Read the GPUs that ``nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits`` lists.

    >>> parse_gpus("NVIDIA H100 80GB HBM3, 81559")
    (Gpu(name='NVIDIA H100 80GB HBM3', memory_bytes=85520809984),)
    """
    rows = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return tuple(Gpu(name.strip(), int(mib) * MIB if mib.strip().isdigit() else 0) for name, _, mib in rows)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the way between each two GPUs from the matrix of ``nvidia-smi topo -m``."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    links = {}
    for row, cells in enumerate(rows):
        for column in range(row + 1, len(rows)):  # the GPUs' columns come before those of network cards
            links[int(rows[row][0][3:]), int(rows[column][0][3:])] = cells[1 + column]
    return links


def _nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; nothing where it is missing, fails or hangs."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cores() -> int:
    """Return the CPU cores that this process may use, by its affinity and a container's quota."""
    quotas = [parse_cpu_quota(text) for text in _cgroup_files("cpu.max")]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in quotas if quota)]))


def parse_cpu_quota(text: str) -> float | None:
    """Return the cores that a cgroup's ``cpu.max`` allows, or None for no limit.

    >>> parse_cpu_quota("150000 100000"), parse_cpu_quota("max 100000")
    (1.5, None)
    """
    quota, _, period = text.partition(" ")
    return None if quota.strip() == "max" else int(quota) / int(period)


def _memory() -> tuple[int, int]:
    """Return total and free bytes, of the machine or a container. Memory that only caches files counts as free."""
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
    """Return the texts of ``name`` in this process's control group (version 2) and in those above it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    place = Path("/sys/fs/cgroup") / next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    folders = [folder for folder in (place, *place.parents) if folder.is_relative_to("/sys/fs/cgroup")]
    return [(folder / name).read_text() for folder in folders if (folder / name).is_file()]


def _loopback_works() -> bool:
    """Return whether a socket on 127.0.0.1 can be reached, on a port that the system chooses."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
        return True
    except OSError:
        return False


if __name__ == "__main__":
    run_command(main)
