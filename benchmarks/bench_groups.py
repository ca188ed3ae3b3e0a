"""Making the process groups of a layout on real ranks, against PyTorch's init_device_mesh for as many kinds.

init_device_mesh makes the four axes of a mesh; where cp has ranks of its own, dp and cp together are a flattened part
of it. With experts it makes a second mesh, whose pipelines it makes again. The groups of the embedding, for which a
mesh has no word, are made by new_subgroups_by_enumeration where they are not the pipelines themselves.
"""

import statistics
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.grid import Grid
from labkit.groups import init_groups
from labkit.launch import World
from labkit.layout import ParallelLayout

LAYOUTS = [
    *[
        ParallelLayout(*sizes)
        for sizes in [(2, 2), (4, 4), (4, 2, 2), (8,), (8, 8), (8, 2, 2), (8, 2, 4), (8, 2, 1, 2)]
    ],
    ParallelLayout(8, tp_size=2, ep_size=4, expert_tp_size=1),
    ParallelLayout(8, pp_size=2, cp_size=2, ep_size=2),
]


def rows() -> Iterator[tuple[str, float, float]]:
    """Give the median of a few makings, each as long as its slowest rank's."""
    for layout in LAYOUTS:
        with World(layout.world_size) as world:
            ours, peer = zip(*world.run(seconds_of_both, layout, 9))
        sizes = " ".join(f"{axis[0]}={layout.size(axis)}" for axis in ("tp", "cp", "pp", "dp"))
        experts = f" ep={layout.ep_size}" if layout.ep_size > 1 else ""
        name = f"process groups, {layout.world_size} ranks, {sizes}{experts}, against init_device_mesh"
        yield name, slowest_rank(ours), slowest_rank(peer)


def slowest_rank(seconds_by_rank: tuple[list[float], ...]) -> float:
    return statistics.median(map(max, zip(*seconds_by_rank)))


def seconds_of_both(layout: ParallelLayout, times: int) -> tuple[list[float], list[float]]:
    """Make groups by init_groups and by init_device_mesh in turn, on a rank, and return the seconds of each making."""
    ours, peer = [], []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        groups = init_groups(layout)
        ours.append(time.perf_counter() - start)
        groups.close()
        dist.barrier()
        start = time.perf_counter()
        meshes, embedding = [mesh_of(layout.dense)], None
        if layout.cp_size > 1:
            meshes.append(meshes[0]["dp", "cp"]._flatten("dp_cp"))
        if layout.ep_size > 1:
            meshes.append(mesh_of(layout.expert))
        if layout.pp_size > 2:
            ends = [[pipeline[0], pipeline[-1]] for pipeline in layout.groups("pp")]
            embedding, _ = dist.new_subgroups_by_enumeration(ends)
        dist.barrier()  # init_groups too returns only when all ranks are connected
        peer.append(time.perf_counter() - start)
        made = {group for mesh in meshes for group in mesh.get_all_groups()} | {embedding}
        for group in made - {None, dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER}:
            dist.destroy_process_group(group)
        del meshes, embedding, made, group
    return ours, peer


def mesh_of(grid: Grid) -> DeviceMesh:
    axes = tuple(grid.sizes)[::-1]
    return init_device_mesh("cpu", tuple(grid.sizes[axis] for axis in axes), mesh_dim_names=axes)
