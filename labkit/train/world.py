"""The world of ranks that a run is in: brought up by launch, by torchrun, by Slurm's srun, or by nobody (one rank)."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from labkit.groups import local_device


@contextmanager
def world() -> Iterator[None]:
    """Inside the block torch.distributed is up; a world that was brought up here is taken down again."""
    if dist.is_initialized():
        yield
        return
    os.environ.update(slurm_as_torchrun(os.environ))
    place: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    dist.init_process_group("nccl" if torch.cuda.device_count() >= ranks_here else "gloo", **place)
    if local_device().type == "cuda":
        torch.cuda.set_device(local_device())
    try:
        yield
    finally:
        dist.destroy_process_group()


def slurm_as_torchrun(environment) -> dict[str, str]:
    """The variables that torchrun would set, from those that srun sets for each task; nothing outside of srun.

    >>> srun = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001"}
    >>> srun |= {"SLURM_STEP_NODELIST": "dgx[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    >>> slurm_as_torchrun(srun)["MASTER_ADDR"], slurm_as_torchrun(srun)["LOCAL_WORLD_SIZE"]
    ('dgx07', '8')
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or environment.get("SLURM_NTASKS", "1") == "1":
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.match(r"\d+", tasks)[0],  # type: ignore[index]
        "MASTER_ADDR": _first_node(nodes),
        "MASTER_PORT": str(20000 + int(environment["SLURM_JOB_ID"]) % 20000),  # jobs that share a node differ
    }
    return {name: environment.get(name, value) for name, value in variables.items()}


def _first_node(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> _first_node("dgx[07-08,11]"), _first_node("a1,a2"), _first_node("rack2-[3,5]")
    ('dgx07', 'a1', 'rack2-3')
    """
    prefix, number = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes).groups()  # type: ignore[union-attr]
    return prefix + (number or "")
