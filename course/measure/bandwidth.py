"""Measures on the ranks how fast a collective moves its bytes, and predicts it for a ring.

Both definitions are those of nccl-tests. Algorithm bandwidth is the message divided by the time. Bus bandwidth
multiplies that by the share of the message that each rank's link must carry, so it can be compared with the link's own
speed for any number of ranks. GB/s is 1e9 bytes per second.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from course.sizing.ring import RING_PASSES, bus_factor, ring_steps
from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.device import wait_for_gpu
from labkit.groups import local_device
from labkit.launch import progress


@dataclass(frozen=True)
class Measurement:
    """One collective at one message size: the median time of the slowest rank."""

    operation: str
    world_size: int
    message_bytes: int
    """The full buffer: for all-gather and reduce-scatter, the shards of all ranks together."""
    seconds: float

    @property
    def algorithm_gb_per_second(self) -> float:
        """The algbw of nccl-tests: message over time."""
        return self.message_bytes / self.seconds / 1e9

    @property
    def bus_gb_per_second(self) -> float:
        """The busbw of nccl-tests: what each link carried, over time."""
        return self.algorithm_gb_per_second * bus_factor(self.operation, self.world_size)


@dataclass(frozen=True)
class RingModel:
    """The time of a ring: each step costs a latency, and each byte costs its time on the link.

    >>> RingModel(latency_seconds=1e-5, link_bytes_per_second=1e9).seconds("all_reduce", 4, 1_000_000)
    0.00156
    """

    latency_seconds: float
    link_bytes_per_second: float

    def seconds(self, operation: str, world_size: int, message_bytes: int) -> float:
        """Return what the model predicts: steps * latency + bytes on the link / bandwidth of the link."""
        link_bytes = bus_factor(operation, world_size) * message_bytes
        return ring_steps(operation, world_size) * self.latency_seconds + link_bytes / self.link_bytes_per_second


def fit_ring(measurements: Sequence[Measurement]) -> RingModel:
    """Return the ring model that comes closest to these measurements, in relative error.

    Raises:
        ValueError: fewer than two message sizes.
    """
    if len({m.message_bytes for m in measurements}) < 2:
        raise ValueError("a fit needs at least two message sizes: one cannot tell latency from bandwidth")
    steps = np.array([ring_steps(m.operation, m.world_size) for m in measurements])
    link_bytes = np.array([bus_factor(m.operation, m.world_size) * m.message_bytes for m in measurements])
    per_second = 1 / np.array([m.seconds for m in measurements])  # each row divided by its time: relative errors
    columns = np.stack([steps * per_second, link_bytes * per_second], axis=1)
    latency, seconds_per_byte = np.linalg.lstsq(columns, np.ones(len(columns)), rcond=None)[0]
    return RingModel(max(float(latency), 0.0), 1 / float(seconds_per_byte))


def measure(operation: str, message_bytes: Sequence[int], num_repeats: int = 20) -> list[Measurement]:
    """Time a collective for each message size; call it on every rank, as in ``launch(measure, ...)``."""
    results, world_size = [], dist.get_world_size()
    for done, size in enumerate(message_bytes):
        progress(done, len(message_bytes), f"{world_size} ranks, {size:,} bytes")
        seconds = slowest_seconds(_prepare(operation, size), num_repeats)
        results.append(Measurement(operation, world_size, size, seconds))
    progress(len(message_bytes), len(message_bytes), f"{world_size} ranks")
    return results


def slowest_seconds(call: Callable[[], object], num_repeats: int) -> float:
    """Return the seconds that ``call`` takes the slowest rank: the median of repeats that each start at a barrier."""
    for _ in range(3):  # to warm up
        call()
    found = []
    for _ in range(num_repeats):
        dist.barrier()
        wait_for_gpu()
        start = time.perf_counter()
        call()
        wait_for_gpu()
        found.append(time.perf_counter() - start)
    seconds = torch.tensor(found, device=local_device())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.median().item()


def _prepare(operation: str, message_bytes: int) -> Callable[[], object]:
    """Return the collective as a call without arguments, on float32 buffers that are made once."""
    world_size, device = dist.get_world_size(), local_device()
    if operation not in RING_PASSES:
        raise ValueError(f"operation={operation!r} cannot be measured: use {', '.join(RING_PASSES)}")
    if message_bytes <= 0 or message_bytes % (4 * world_size):
        rule = "must hold equally many float32 numbers for each rank"
        raise ValueError(f"message_bytes={message_bytes} {rule}: use a multiple of {4 * world_size}")
    full = torch.ones(message_bytes // 4, device=device)
    shard = torch.ones(message_bytes // 4 // world_size, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(full, op=dist.ReduceOp.MAX)  # MAX does not overflow when repeated
    if operation == "all_gather":
        return lambda: all_gather_single(full, shard)
    return lambda: reduce_scatter_single(shard, full)
