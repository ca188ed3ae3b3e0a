"""The ranks of a run, whoever started them: launch, torchrun, Slurm's srun, or nobody (then there is one rank)."""

import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from labkit.groups import local_device
from labkit.launch.rank import prepare_gpu


@contextmanager
def world() -> Iterator[None]:
    """Keep torch.distributed up inside the block; what was brought up here is taken down again.

    Raises:
        ValueError: the environment says that there are other ranks, but not where.
    """
    if dist.is_initialized():
        yield
        return
    os.environ.update(slurm_as_torchrun(os.environ))
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if "RANK" in os.environ and missing:
        raise ValueError(
            f"RANK={os.environ['RANK']} is set, but not {' and '.join(missing)}: start the ranks with torchrun or "
            "srun, or unset RANK to train alone"
        )
    place: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(num_threads(ranks_here, os.environ))
    on_gpu = has_gpu(ranks_here, torch.cuda.device_count(), os.environ)
    if on_gpu:
        prepare_gpu()
    dist.init_process_group("nccl" if on_gpu else "gloo", **place)
    if local_device().type == "cuda":
        torch.cuda.set_device(local_device())
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if not (has_failed and on_gpu):  # it would wait for messages that never come
            dist.destroy_process_group()


def has_gpu(ranks_here: int, gpus_seen: int, environment: Mapping[str, str]) -> bool:
    """Return whether each rank of this node can have a GPU; Slurm may show each task only its own."""
    return gpus_seen >= ranks_here or (gpus_seen > 0 and "SLURM_GPUS_PER_TASK" in environment)


def num_threads(ranks_here: int, environment: Mapping[str, str]) -> int:
    """Return torch's own number for a process alone or if the user has set it, else this rank's share of the cores."""
    if ranks_here == 1 or "OMP_NUM_THREADS" in environment:
        return torch.get_num_threads()
    share = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    return int(environment.get("SLURM_CPUS_PER_TASK", share))


def say_once(text: str) -> None:
    """Print a last message on stderr, once for all ranks that say it; torchrun repeats it below its report.

    The ranks agree through the store in which they met. They also wait a moment for each other, because torchrun ends
    all others when one has left with an error.
    """
    store, world_size = HashStore(), 1
    if dist.is_initialized():
        store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    try:
        is_said_here = store.add(f"labkit.train {zlib.crc32(text.encode())}", 1) == 1
    except RuntimeError:  # the store has gone, with the rank that kept it: that rank has said why
        is_said_here = False
    if is_said_here:
        print(text, file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        about = {"message": text if is_said_here else "as on another rank", "timestamp": int(time.time())}
        about["timestamp"] += not is_said_here  # torchrun takes the earliest as the root cause, and shows it last
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(about))
    with suppress(RuntimeError):
        left, deadline = store.add("labkit.train left", 1), time.monotonic() + 2.0
        while left < world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add("labkit.train left", 0)


def slurm_as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set, from those that srun sets for each task; none outside of srun.

    A script of sbatch has SLURM_PROCID and SLURM_NTASKS too, although it runs alone: only the variables with STEP in
    their name come from srun.

    >>> srun = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001"}
    >>> srun |= {"SLURM_STEP_NODELIST": "dgx[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    >>> slurm_as_torchrun(srun)["MASTER_ADDR"], slurm_as_torchrun(srun)["LOCAL_WORLD_SIZE"]
    ('dgx07', '8')
    """
    if "RANK" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return {}
    first_node = re.match(r"([^\[,]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])  # dgx07 of dgx[07-08,11]
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.match(r"\d+", environment["SLURM_STEP_TASKS_PER_NODE"])[0],  # type: ignore[index]
        "MASTER_ADDR": "".join(first_node.groups("")),  # type: ignore[union-attr]
        "MASTER_PORT": str(20000 + int(environment["SLURM_JOB_ID"]) % 20000),  # two jobs on one node need two ports
    }
    return {name: environment.get(name, value) for name, value in variables.items()}
