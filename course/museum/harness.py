"""Trains on ranks with a fault put in, and keeps what can be seen from outside, compared with one process.

Nothing here knows a fault. A fault changes labkit on the rank that runs it, before the run starts. That rank is a
process of its own and ends with the run, so nothing of the fault stays.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course.parity import Difference, compare
from labkit.groups import ProcessGroups, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.placement import Placement, placements
from labkit.tensor_parallel import shard_like

Tensors = dict[str, torch.Tensor]
Placed = Mapping[str, Placement]


class Routing(NamedTuple):
    """The auxiliary loss of each step; by step and layer, how many choices were counted, and the biases after."""

    auxiliary: list[float]
    counted: list[list[int]]
    biases: list[list[list[float]]]


class Sharding(NamedTuple):
    """The reduce-scatters of all steps: called, needed, and their KB. The numbers in optimizer and shards."""

    reduce_scatters: int
    enough: int
    kilobytes: int
    in_optimizer: int
    in_shards: int


@dataclass(frozen=True)
class Run:
    """Losses and gradient norms of the steps, and the weights before step 1 and the gradients in it, by name."""

    losses: list[float]
    norms: list[float]
    weights: Tensors
    gradients: Tensors
    routing: Routing | None = None
    """Of a model with experts."""
    sharding: Sharding | None = None
    """Of a model in shards."""


@dataclass(frozen=True)
class Seen:
    """What one rank shows: its run, compared with one process, and fingerprints, which are equal for equal tensors."""

    losses: list[float]
    norms: list[float]
    weights: list[Difference]
    gradients: list[Difference]
    fingerprints: dict[str, str]
    routing: Routing | None
    sharding: Sharding | None


class Job:
    """What is trained, and how it lies over the ranks."""

    layout: ParallelLayout
    shard_size: int | None

    def train(self, groups: ProcessGroups) -> tuple[nn.Module, Run]:
        """Run all steps on this rank, and return the model too."""
        raise NotImplementedError

    def fingerprints(self, gradients: Tensors, placed: Placed, groups: ProcessGroups) -> dict[str, str]:
        """Return what is the same on some ranks and differs on others: see `course.museum.symptoms.SAME_FOR`."""
        raise NotImplementedError


@cache
def one_process(job: Job) -> Run:
    """Return the run that all cases are compared with, on the CPU even if there are GPUs: the same numbers everywhere.

    ``job`` is for a world of one rank.
    """
    return launch(train_here, job, world_size=1, backend="gloo")[0]


def train_here(job: Job) -> Run:
    """Train in a process that holds the whole model."""
    with init_groups(job.layout) as groups:
        return job.train(groups)[1]


def on_rank(apply: Callable[[], None], expected: Run, jobs: Sequence[Job]) -> list[Seen]:
    """Put a fault on this rank; run each job there, and compare it with the run of one process."""
    apply()
    return [seen(job, expected) for job in jobs]


def seen(job: Job, expected: Run) -> Seen:
    """Run one job on this rank."""
    with init_groups(job.layout, job.shard_size) as groups:
        model, run = job.train(groups)
        placed = placements(model)

        def alike(found: Tensors, whole: Tensors) -> tuple[Tensors, Tensors]:
            if run.sharding:
                return joined(found, groups.shard, whole), whole
            return found, {name: shard_like(whole[name], placement) for name, placement in placed.items()}

        start = alike(run.weights, expected.weights)
        first = alike(run.gradients, expected.gradients)
        fingerprints = job.fingerprints(first[0], placed, groups)
        compared = compare(*start), compare(*first)
        return Seen(run.losses, run.norms, *compared, fingerprints, run.routing, run.sharding)


def joined(shards: Tensors, group: dist.ProcessGroup, like: Tensors) -> Tensors:
    """Return whole tensors, of which each rank of the group has a shard."""
    of_ranks = [shards] * group.size()
    dist.all_gather_object(of_ranks, shards, group=group)
    return {name: torch.cat([each[name] for each in of_ranks]).view_as(like[name]) for name in shards}


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return the same text for the same tensors."""
    return hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
