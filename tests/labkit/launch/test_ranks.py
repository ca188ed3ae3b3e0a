"""The processes of a world: what they hold, and that all of it is given back."""

import os
import resource
import threading

import pytest
import torch.distributed as dist

from labkit.launch import World, client, launch

pytestmark = pytest.mark.alone


def test_too_many_open_files_leave_nothing():
    launch(os.getpid, world_size=1)
    before, limits = _held(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before[0]) + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            launch(os.getpid, world_size=16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert _held() == before


def _held() -> tuple[list[str], list[str]]:
    return os.listdir("/proc/self/fd"), os.listdir(client.current_server().directory)


def test_a_fork_of_the_kernel_does_not_end_its_ranks():
    with World(2) as world:
        pids = world.run(os.getpid)
        if (child := os.fork()) == 0:
            world.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert world.run(os.getpid) == pids


def test_nothing_accumulates_over_ten_launches():
    def state():
        pid, server = os.getpid(), client.current_server()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{server.pid}/fd")),
            open(f"/proc/{pid}/task/{pid}/children").read(),
            threading.active_count(),
            os.listdir(server.directory),
            [name for name in os.listdir("/dev/shm") if not name.startswith("labkit-")],
        )

    launch(os.getpid, world_size=2)
    before = state()
    for _ in range(10):
        assert launch(dist.get_rank, world_size=2) == [0, 1]
    assert state() == before
    server = client.current_server().pid
    with open(f"/proc/{server}/task/{server}/children") as children:
        assert children.read() == ""
