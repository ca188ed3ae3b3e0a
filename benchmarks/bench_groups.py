"""Making the process groups of a layout on real ranks, against PyTorch's init_device_mesh.

Of the six kinds of init_groups, init_device_mesh makes the four axes. The model replicas are a flattened part of its
mesh. What it has no word for, the groups of the embedding, its row leaves out.
"""

import statistics
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labkit.groups import init_groups
from labkit.launch import World
from labkit.layout import ParallelLayout

LAYOUTS = [ParallelLayout(*sizes) for sizes in [(2, 2), (4, 4), (4, 2, 2), (8,), (8, 8), (8, 2, 2), (8, 2, 4)]]


def rows() -> Iterator[tuple[str, float, float]]:
    """Give the median of a few makings, each as long as its slowest rank's."""
    for layout in LAYOUTS:
        with World(layout.world_size) as world:
            ours, peer = zip(*world.run(seconds_of_both, layout, 9))
        t, p, d = layout.tp_size, layout.pp_size, layout.dp_size
        name = f"process groups, {layout.world_size} ranks, t={t} p={p} d={d} (6 kinds), against init_device_mesh (5)"
        yield name, slowest_rank(ours), slowest_rank(peer)


def slowest_rank(seconds_by_rank: tuple[list[float], ...]) -> float:
    return statistics.median(map(max, zip(*seconds_by_rank)))


def seconds_of_both(layout: ParallelLayout, times: int) -> tuple[list[float], list[float]]:
    """Make groups by init_groups and by init_device_mesh in turn, on a rank, and return the seconds of each making."""
    axes = layout.axes[::-1]
    ours, peer = [], []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        groups = init_groups(layout)
        ours.append(time.perf_counter() - start)
        groups.close()
        dist.barrier()
        start = time.perf_counter()
        mesh = init_device_mesh("cpu", tuple(map(layout.size, axes)), mesh_dim_names=axes)
        replica = mesh["pp", "cp", "tp"]._flatten("model")
        dist.barrier()  # init_groups too returns only when all ranks are connected
        peer.append(time.perf_counter() - start)
        for group in {*map(mesh.get_group, axes), replica.get_group()} - {dist.group.WORLD}:
            dist.destroy_process_group(group)
        del mesh, replica, group
    return ours, peer
