"""A row of the check, where it runs, and what it found."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from course.nccl_rules import Under
from course.parity import Difference, Parity
from labkit.launch import World

LARGEST_ERROR = 1e-9  # in float64 a different order of sums makes errors of about 1e-15
RANK_TIMEOUT_SECONDS = 30
A_GPU = "a GPU"
SEVERAL_GPUS = "several GPUs"


@dataclass(frozen=True)
class Found:
    """What a row measured, and beside it what was expected."""

    is_right: bool
    measured: str
    expected: str


class LeftOut(Exception):
    """A row that says nothing here; its text says why."""


@dataclass
class Where:
    """Where rows run: on the GPUs of this machine, or on its CPU.

    Ranks get a GPU each and talk through NCCL if there are as many GPUs. Otherwise they share GPU 0, or the CPU, and
    talk by NCCL's rules (course/nccl_rules.py) through the host.
    """

    device: str
    num_gpus: int
    worlds: dict[int, World] = field(default_factory=dict)
    in_one_process: dict = field(default_factory=dict)
    """What one process has, by what it ran: several rows compare with it."""

    @cached_property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    def has_nccl(self, num_ranks: int) -> bool:
        return self.is_gpu and num_ranks <= self.num_gpus

    def world(self, num_ranks: int, timeout_seconds: float = RANK_TIMEOUT_SECONDS) -> World:
        """Start ranks. The caller closes them."""
        if self.has_nccl(num_ranks):
            return World(num_ranks, backend="nccl", timeout_seconds=timeout_seconds)
        if self.is_gpu:
            os.environ["LABKIT_SHARE_GPU"] = "1"
        return World(num_ranks, backend="gloo", timeout_seconds=timeout_seconds)

    def run(self, num_ranks: int, fn: Callable, *args) -> list:
        """Call a function on ranks that are kept for later rows; return what each of them returned."""
        world = self.worlds.get(num_ranks)
        if world is None or world.ended:
            self.close(but=1)  # ranks of a different number would hold memory of the GPU
            world = self.worlds[num_ranks] = self.world(num_ranks)
        if self.has_nccl(num_ranks) or num_ranks == 1:
            return world.run(fn, *args)
        return world.run(Under(fn), *args)

    def close(self, but: int = 0) -> None:
        """End the ranks that are kept, but not those of a world of this size."""
        for size in [size for size in self.worlds if size != but]:
            self.worlds.pop(size).close()


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    notebook: str
    cell: str
    """The id of the cell for which it stands."""
    check: Callable[[Where], Found]
    needs: str = ""
    """What it cannot run without, if anything: `A_GPU`, `SEVERAL_GPUS`."""
    limit_seconds: float = 60
    is_alone: bool = False
    """It may take the process along, so it gets one of its own."""


def judged(ranks: Sequence[Sequence[Difference]], largest_error: float = LARGEST_ERROR) -> Found:
    """Say the largest error of all ranks, and where it is."""
    found = [Parity(ranks).worst(rank) for rank in range(len(ranks))]
    rank = max(range(len(ranks)), key=lambda number: found[number].error)
    error = found[rank].error
    is_right = math.isfinite(error) and error < largest_error
    return Found(
        is_right, f"relative error {error:.1e} (rank {rank}, {found[rank].name})", f"below {largest_error:.0e}"
    )
