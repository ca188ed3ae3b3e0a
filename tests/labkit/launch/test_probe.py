"""What a rank tells about itself when it is asked."""

import socket
import subprocess
import threading
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from labkit.launch import World, launch, waiting_for
from labkit.launch.probe import Probe, _bytes_on_their_way


def test_a_snapshot_has_what_the_innermost_wait_is_for():
    def purpose() -> str:
        return Probe().snapshot().purpose

    with waiting_for("F3"):
        with waiting_for("B1"):
            assert purpose() == "B1"
        assert purpose() == "F3"
    assert purpose() == ""


def test_flight_recorder_shows_what_waits():
    """Pins the private reader that the watchdog depends on."""

    def look():
        before = Probe().snapshot()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
            pending = Probe().snapshot()
            dist.send(torch.ones(1), 1)  # only now may the other rank join
        else:
            dist.recv(torch.ones(1), 0)
            pending = None
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
        work.wait()
        time.sleep(0.05)
        return before.collectives, pending and pending.collectives, Probe().snapshot().collectives

    (before, pending, after), _ = launch(look, world_size=2)
    assert before == after == ()
    (call,) = pending
    assert (call.group, call.number, call.operation) == ("0", 1, "all_reduce")
    assert (call.shapes, call.dtypes) == ("[2, 3]", "float")


@pytest.mark.alone
def test_snapshots_tell_communication_from_other_waiting():
    """A rank with an asynchronous collective under way may wait for something else, and then goes on by itself."""

    def look(wait):
        seen, probe = [], Probe()
        watcher = threading.Timer(0.3, lambda: seen.append(probe.snapshot().elsewhere))
        watcher.start()
        wait()
        watcher.join()
        return seen[0]

    def wait_for_a_thread():
        thread = threading.Thread(target=time.sleep, args=(0.6,))
        thread.start()
        thread.join()

    def wait_in_communication():
        if dist.get_rank() == 0:
            time.sleep(0.6)
        dist.barrier()

    with World(2) as world:
        for wait in (lambda: time.sleep(0.6), lambda: subprocess.run(["sleep", "0.6"]), wait_for_a_thread):
            assert world.run(look, wait) == [True, True]
        assert world.run(look, wait_in_communication) == [True, False]


@pytest.mark.alone
def test_a_snapshot_tells_a_rank_that_could_run_from_one_that_only_waits():
    def look(is_spinning):
        probe, end, data = Probe(), time.monotonic() + 0.5, bytes(1 << 28)
        watcher = threading.Timer(0.2, lambda: seen.append(probe.snapshot().busy))
        seen = []
        watcher.start()
        while is_spinning and time.monotonic() < end:
            zlib.crc32(data)  # C code that leaves the GIL to others
        watcher.join()
        return seen[0]

    with World(2) as world:
        assert world.run(look, False) == [False, False]
        assert world.run(look, True) == [True, True]


def test_a_snapshot_sees_bytes_that_nobody_has_read():
    def look():
        ours, theirs = socket.socket(), socket.socket()
        ours.bind(("127.0.0.1", 0))
        ours.listen()
        theirs.connect(ours.getsockname())
        accepted, _ = ours.accept()
        before = _bytes_on_their_way()
        theirs.send(b"x")
        unread = _bytes_on_their_way()
        accepted.recv(1)
        return before, unread, _bytes_on_their_way()

    assert launch(look, world_size=1) == [(False, True, False)]


def test_a_snapshot_leaves_out_bytes_of_other_processes():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        sender.send(b"x")
        assert _bytes_on_their_way()
        assert launch(_bytes_on_their_way, world_size=1) == [False]
