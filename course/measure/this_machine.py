"""This machine as a `Hardware`: what its ranks reach when all of them work at once, measured.

Matrix products, memory and the ranks' own all-reduce are measured, in 16 bits on GPUs and in 32 on the CPU. These are
the rates that a program reaches, so all efficiencies are 1.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from course.measure.bandwidth import measure, slowest_seconds
from course.measure.environment import look_at_machine
from course.sizing import Hardware
from labkit.groups import local_device
from labkit.launch import launch
from labkit.sizes import counted

NUM_REPEATS = 5


def measured_hardware(num_ranks: int = 2) -> Hardware:
    """Run ``num_ranks`` ranks, and make a `Hardware` of the rates that the slowest one reaches.

    The link is the one between these ranks. Nothing here tells how fast a network to a different node would be, so the
    network gets the same rate.
    """
    ranks = launch(hardware_of_ranks, world_size=num_ranks, timeout_seconds=300)
    smallest = min(ranks, key=lambda rank: rank.memory_bytes)
    if smallest.memory_bytes < math.inf:
        return smallest
    return replace(smallest, memory_bytes=look_at_machine().free_memory_bytes / num_ranks)


def hardware_of_ranks() -> Hardware:
    """On a rank: time products of square matrices, copies of a large tensor, and all-reduces, with all other ranks.

    On the CPU the memory is infinite: ranks share it, and none of them can say what is its own.
    """
    device = local_device()
    sizes = large_sizes(device)
    matrix = torch.ones(sizes.width, sizes.width, dtype=sizes.dtype, device=device)
    source = torch.ones(sizes.num_copied, dtype=sizes.dtype, device=device)
    target = torch.empty_like(source)
    copied_bytes = 2 * source.numel() * source.element_size()  # read and written
    bus = measure("all_reduce", [sizes.message_bytes], NUM_REPEATS)[0].bus_gb_per_second * 1e9
    peak = 2 * sizes.width**3 / slowest_seconds(lambda: matrix @ matrix, NUM_REPEATS)
    memory_rate = copied_bytes / slowest_seconds(lambda: target.copy_(source), NUM_REPEATS)
    return reached(peak, memory_rate, bus if dist.get_world_size() > 1 else math.inf)


@dataclass(frozen=True)
class LargeSizes:
    """What is large enough to show a rank's rates: a square matrix, a copy, a message; and the numbers in them."""

    dtype: torch.dtype
    width: int
    num_copied: int
    message_bytes: int


def large_sizes(device: torch.device) -> LargeSizes:
    """Return what fills a GPU for milliseconds, or what a core works on for as long."""
    if device.type == "cuda":
        return LargeSizes(torch.bfloat16, width=8192, num_copied=2**29, message_bytes=256 * 2**20)
    return LargeSizes(torch.float32, width=1024, num_copied=2**24, message_bytes=4 * 2**20)


def reached(peak_flops: float, memory_bytes_per_second: float, link_bytes_per_second: float = math.inf) -> Hardware:
    """On a rank: make a `Hardware` of rates that were measured here."""
    device, num_ranks = local_device(), dist.get_world_size()
    on_gpu = device.type == "cuda"
    return Hardware(
        name=f"this machine, {counted(num_ranks, 'rank')} on {torch.cuda.get_device_name(device) if on_gpu else 'CPU'}",
        peak_flops=peak_flops,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else math.inf,
        memory_bytes_per_second=memory_bytes_per_second,
        node_bytes_per_second=link_bytes_per_second,
        network_bytes_per_second=link_bytes_per_second,
        gpus_per_node=num_ranks,
        product_efficiency=1.0,
        memory_efficiency=1.0,
        node_efficiency=1.0,
        network_efficiency=1.0,
        layer_overhead_seconds=0.0,
    )
