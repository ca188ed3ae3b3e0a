"""Frees ranks that wait for each other, and connects their groups anew, so that a world outlives a
deadlock.

A wait of gloo ends only when its connections do. Groups stay, as layers and names hold them: each
gets a new backend.
"""

import contextlib
import itertools
import json
import socket

from labkit.launch import linux

_LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
# The numbers of renewals. They are the same on all ranks, and above torch's own types of backends.
_numbers = itertools.count(32)


def free() -> None:
    """Shut the connections that this rank has accepted.

    When all ranks do so, every wait of gloo raises.
    """
    ports = set()
    for connection in linux.tcp_sockets():
        if connection.getsockopt(*_LISTENS):
            ports.add(_port(connection))
    for connection in linux.tcp_sockets():
        if not connection.getsockopt(*_LISTENS) and _port(connection) in ports:
            with contextlib.suppress(OSError):  # its peer has hung up already
                connection.shutdown(socket.SHUT_RDWR)


def _port(connection: socket.socket) -> int:
    return connection.getsockname()[1]


def connect_anew() -> bool:
    """Give each group new connections, on all ranks at once.

    Return False where there is more than gloo.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    number = next(_numbers)
    groups = sorted(world.pg_names.items(), key=lambda item: item[1])  # in one order on all ranks
    backends = set()
    for group, _ in groups:
        backends |= {type(group._get_backend(device)) for device in group._device_types}
    if backends != {dist.ProcessGroupGloo}:
        return False
    free()  # what is still on its way arrives nowhere
    default_store = distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"renewal{number}", default_store)  # pyright: ignore - private
    # Each rank tells the others how many groups it has made, and the names of those it has.
    store.set(str(dist.get_rank()), json.dumps([world.group_count, *(name for _, name in groups)]))
    told = [json.loads(store.get(str(rank))) for rank in range(dist.get_world_size())]
    world.group_count = max(count for count, *_ in told)  # the next group is called by it
    for group, name in groups:
        if all(name in told[rank] for rank in world.pg_group_ranks[group]):
            options = group._get_backend(next(iter(group._device_types))).options
            group_store = dist.PrefixStore(name, store)  # pyright: ignore - private
            arguments = (group_store, group.rank(), group.size(), options)
            backend = dist.ProcessGroupGloo(*arguments)  # pyright: ignore - private
            backend._set_sequence_number_for_group()
            # Registered under a new type: a group keeps the first backend of each type.
            for device in group._device_types:
                group._register_backend(device, dist.ProcessGroup.BackendType(number), backend)
            group._set_group_name(group.group_name)
            group._set_group_desc(group.group_desc)
        else:  # a fault came first
            ranks = [*world.pg_group_ranks[group]]
            print(f"Not all of the ranks {ranks} have their group: make it again.")
            dist.destroy_process_group(group)
    return True
