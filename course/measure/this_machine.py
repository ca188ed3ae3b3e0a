"""This machine as a `Hardware`: what its ranks reach when all of them work at once, measured.

Matrix products, memory and the ranks' own all-reduce, in 16 bits on GPUs and 32 on the CPU. What a data sheet promises
and a program reaches is not told apart here: so the efficiencies are 1.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from course.measure.bandwidth import measure
from course.measure.environment import this_machine
from course.sizing import Hardware
from labkit.groups import local_device
from labkit.launch import launch

REPEATS = 5


class Rates(NamedTuple):
    """What a rank reached while the others did the same."""

    product_flops: float
    memory_bytes_per_second: float
    bus_bytes_per_second: float
    memory_bytes: float
    device: str


def measured_hardware(num_ranks: int = 2) -> Hardware:
    """Run ``num_ranks`` ranks, and make a `Hardware` of the slowest one's rates.

    Links are those between these ranks: nothing here says how fast a network to another node would be, so that it is
    taken for as fast as the links.
    """
    ranks = launch(measure_rates, world_size=num_ranks, timeout_seconds=300)
    slowest = Rates(*(min(column) for column in zip(*ranks)))
    memory_bytes = slowest.memory_bytes
    if slowest.device == "CPU":
        memory_bytes = this_machine().free_memory_bytes / num_ranks
    return Hardware(
        name=f"this machine, {num_ranks} rank{'s' * (num_ranks > 1)} on {slowest.device}",
        peak_flops=slowest.product_flops,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=slowest.memory_bytes_per_second,
        node_bytes_per_second=slowest.bus_bytes_per_second,
        network_bytes_per_second=slowest.bus_bytes_per_second,
        gpus_per_node=num_ranks,
        product_efficiency=1.0,
        memory_efficiency=1.0,
        node_efficiency=1.0,
        network_efficiency=1.0,
        layer_overhead_seconds=0.0,
    )


def measure_rates() -> Rates:
    """On a rank: products of square matrices, copies of a large tensor, and all-reduces, with all other ranks."""
    on_gpu = local_device().type == "cuda"
    dtype, width, numbers = (torch.bfloat16, 8192, 1 << 29) if on_gpu else (torch.float32, 768, 1 << 23)
    matrix = torch.ones(width, width, dtype=dtype, device=local_device())
    source = torch.ones(numbers, dtype=dtype, device=local_device())
    target = torch.empty_like(source)
    copied_bytes = 2 * source.numel() * source.element_size()  # read and written
    message_bytes = (256 if on_gpu else 4) * 2**20
    bus = measure("all_reduce", [message_bytes], num_repeats=REPEATS)[0].bus_gb_per_second * 1e9
    return Rates(
        product_flops=2 * width**3 / _seconds(lambda: matrix @ matrix),
        memory_bytes_per_second=copied_bytes / _seconds(lambda: target.copy_(source)),
        bus_bytes_per_second=bus if dist.get_world_size() > 1 else float("inf"),
        memory_bytes=torch.cuda.get_device_properties(local_device()).total_memory if on_gpu else 0,
        device=torch.cuda.get_device_name(local_device()) if on_gpu else "CPU",
    )


def _seconds(call: Callable[[], object]) -> float:
    """The median of a few calls that start on all ranks together, after one to warm up."""
    call()
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        _wait_for_gpu()
        start = time.perf_counter()
        call()
        _wait_for_gpu()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _wait_for_gpu() -> None:
    if local_device().type == "cuda":
        torch.cuda.synchronize(local_device())
