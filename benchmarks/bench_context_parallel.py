"""Attention on a sequence that is cut: consecutive tokens against zigzag chunks, and the ways against each other.

Paced, a block of attention sleeps in proportion to its (query, key) pairs, so that the ring's forward shows who waits
for whom, whatever the cores do. The row says how much of the ratio that theory gives was measured, and by how much the
zigzag ring is slower than predicted.

Computed, ranks share this machine's cores, one thread each. All ways take turns in one world; the result is the median
round of the slowest rank, forward and backward. The rows name the most memory that a rank had beyond what it holds
before and after, also measured. One process has as many threads as there are ranks.
"""

import ctypes
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.sizing.context import attention_pairs
from labkit.context_parallel import all_gather_attention, positions, ring_attention, ulysses_attention
from labkit.context_parallel.blockwise import OnlineSoftmax
from labkit.launch import launch

BATCH, HEADS, KV_HEADS, HEAD_SIZE, SEQUENCE = 1, 8, 4, 64, 4096
SECONDS_OF_A_BLOCK = 0.2  # paced: all queries of a rank with all keys of a rank
NUM_ROUNDS = 7
WAYS = {"Ulysses": ulysses_attention, "all_gather": all_gather_attention}


def rows() -> Iterator[tuple[str, float, float]]:
    options = dict(backend="gloo", timeout_seconds=300)
    for c in (4, 8):
        measured, predicted = [], []
        for zigzag in (True, False):
            measured.append(max(launch(paced, zigzag, world_size=c, **options)))
            predicted.append(paced_makespan(c, zigzag))
        of_theory = measured[1] / measured[0] / (predicted[1] / predicted[0])
        text = f"{of_theory:.3f} of theory's ratio, {measured[0] / predicted[0]:.3f} of its time"
        yield f"paced ring, c = {c}, {text}; against consecutive tokens", *measured
    for c in (2, 4):
        [[alone, alone_peak]] = launch(on_one_process, c, world_size=1, **options)
        ring, *others = slowest(launch(all_ways, world_size=c, **options))
        for name, (seconds, peak) in zip([*WAYS, "one process"], [*others, (alone, alone_peak)], strict=True):
            text = f"ring attention, {c} ranks, peak {ring[1]:.0f} MB; against {name}, {peak:.0f} MB"
            yield text, ring[0], seconds


# -- paced ----------------------------------------------------------------------------------------------------------


def paced_makespan(c: int, zigzag: bool) -> float:
    """Return the seconds of a ring whose ranks wait for the slowest at each step."""
    seq_length = 2**16
    pairs, block = attention_pairs(seq_length, c, zigzag), (seq_length / c) ** 2
    slowest = [max(pairs[rank][(rank - step) % c] for rank in range(c)) for step in range(c)]
    return SECONDS_OF_A_BLOCK * sum(slowest) / block


def paced(zigzag: bool) -> float:
    """Return this rank's median seconds for the ring's forward with blocks that sleep."""

    def sleep_instead(softmax, q, kv, part):
        pairs = q[..., part.queries, :].size(-2) * kv[..., part.keys, :].size(-2) / (2 if part.causal else 1)
        time.sleep(SECONDS_OF_A_BLOCK * pairs / q.size(-2) ** 2)

    x = torch.zeros(1, 1, 16, 4)
    with patch.object(OnlineSoftmax, "add", sleep_instead):
        return median(lambda: ring_attention(x, x, x, dist.group.WORLD, zigzag=zigzag))


# -- computed -------------------------------------------------------------------------------------------------------


def all_ways() -> list[tuple[float, float]]:
    """Return this rank's seconds and megabytes for the ring and for the other ways."""
    torch.set_num_threads(1)
    held = positions(SEQUENCE, dist.get_world_size(), dist.get_rank())
    tensors = [x[:, :, held].contiguous() for x in whole()]
    return [measure(partial(way, group=dist.group.WORLD), tensors) for way in (ring_attention, *WAYS.values())]


def on_one_process(num_threads: int) -> tuple[float, float]:
    """Return the seconds and megabytes of torch's attention on the whole sequence."""
    torch.set_num_threads(num_threads)
    return measure(partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True), whole())


def whole() -> list[torch.Tensor]:
    """Return q, k and v of the whole sequence."""
    torch.manual_seed(0)
    return [torch.randn(BATCH, heads, SEQUENCE, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def measure(attention: Callable, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the median seconds of forward and backward, and the peak in MB beyond inputs, output and gradients."""
    q, k, v = (x.requires_grad_() for x in tensors)

    def step() -> torch.Tensor:
        out = attention(q, k, v)
        out.sum().backward()
        return out

    step()  # also makes the gradients, to which later steps add
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that it shows when it is taken again
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    out = step()
    return median(step), (resident("VmHWM") - before - out.nbytes) / 1e6


def median(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def resident(name: str) -> int:
    """Return this process's resident bytes now ("VmRSS"), or the most since the mark ("VmHWM")."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def slowest(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return each way's most seconds and megabytes over the ranks."""
    return [(max(each[0] for each in way), max(each[1] for each in way)) for way in zip(*ranks)]
