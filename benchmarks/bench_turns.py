"""All-reduces on CPU ranks whose threads take turns (`labkit.device.take_turns`), against the same without turns.

The more ranks share a core, the more it matters.
"""

import os
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from labkit.launch import launch

REPEATS, CALLS = 5, 40


def rows() -> Iterator[tuple[str, float, float]]:
    for world_size in (2, 4, 8):
        ours, peer = launch(measure, world_size=world_size)[0]
        cores = len(os.sched_getaffinity(0))
        yield f"all-reduce of 16 KB, {world_size} CPU ranks on {cores} cores, against no turns", ours, peer


def measure() -> list[float]:
    """Return the seconds of an all-reduce with and without turns: threads are scheduled as the one that starts them."""
    x, policies = torch.ones(4096), (os.SCHED_BATCH, os.SCHED_OTHER)
    groups, seconds = {}, {policy: [] for policy in policies}
    for policy in policies:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        groups[policy] = dist.new_group()
        dist.all_reduce(x, group=groups[policy])
    for _ in range(REPEATS):
        for policy, group in groups.items():
            os.sched_setscheduler(0, policy, os.sched_param(0))
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(x, group=group)
            seconds[policy].append((time.perf_counter() - start) / CALLS)
    return [statistics.median(each) for each in seconds.values()]
