"""Frees ranks that wait for each other, and connects their groups anew, so that a world outlives a deadlock.

A wait of gloo ends only when its connections do. The process groups themselves stay, and with them whatever holds them,
such as a layer, a DeviceMesh or a name in a cell: each gets a new backend.
"""

import itertools
import json
import socket

from labkit.launch import linux

_numbers = itertools.count()  # of renewals: the same on all ranks
_FIRST_TYPE = 32  # of a new backend, above torch's own types: a group keeps the first backend of each type


def free() -> None:
    """Shut the connections that this rank has accepted. When all ranks do so, every wait of gloo raises."""
    ports = {each.getsockname()[1] for each in linux.tcp_sockets() if _listens(each)}
    for each in linux.tcp_sockets():
        if not _listens(each) and each.getsockname()[1] in ports:
            each.shutdown(socket.SHUT_RDWR)


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def connect_anew() -> list[list[int]]:
    """Give this rank's groups new connections; all ranks call this at once.

    Return the ranks of groups that not all of these have, as a fault has come before: such groups are destroyed.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    free()  # what is still on its way arrives nowhere
    world, store, number = distributed_c10d._world, distributed_c10d._get_default_store(), next(_numbers)
    store.set(f"renewal{number}/{dist.get_rank()}", json.dumps([world.group_count, [*world.pg_names.values()]]))
    told = [json.loads(store.get(f"renewal{number}/{rank}")) for rank in range(dist.get_world_size())]
    world.group_count = max(count for count, _ in told)  # the next group is called by it
    lost = []
    for group, name in sorted(world.pg_names.items(), key=lambda item: item[1]):  # in one order on all ranks
        ranks = [*world.pg_group_ranks[group]]
        if all(name in told[rank][1] for rank in ranks):
            _connect(group, dist.PrefixStore(f"renewal{number}/{name}", store), _FIRST_TYPE + number)
        else:
            lost.append(ranks)
            dist.destroy_process_group(group)
    return lost


def _connect(group, store, backend_type: int) -> None:
    import torch.distributed as dist

    backends = {group._get_backend(device) for device in group._device_types}
    if {type(each) for each in backends} != {dist.ProcessGroupGloo}:
        raise RuntimeError("only groups of gloo can be connected anew")
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), backends.pop().options)
    backend._set_sequence_number_for_group()
    for device in group._device_types:
        group._register_backend(device, dist.ProcessGroup.BackendType(backend_type), backend)
    group._set_group_name(group.group_name)
    group._set_group_desc(group.group_desc)
