"""What a rank tells about itself when it is asked."""

import ctypes
import gc
import multiprocessing
import os
import socket
import struct
import subprocess
import threading
import time
import weakref
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from labkit.launch import Deadlock, World, launch, renewal, waiting_for
from labkit.launch.linux import bytes_received, may_wait_for_a_thread, waits_for_a_python_thread
from labkit.launch.probe import Probe


def probe() -> Probe:
    """A second probe, beside the one that watches the rank."""
    return Probe(timeout_seconds=60, directory="/nowhere")


def test_a_look_keeps_nothing_of_what_it_saw_alive():
    class Tensor:
        pass

    def hold():
        held = Tensor()
        look = threading.Thread(target=lambda: looked.append(probe().snapshot()))
        look.start()
        look.join()
        return weakref.ref(held)

    looked = []
    gc.disable()
    try:
        assert hold()() is None and looked
    finally:
        gc.enable()


def test_a_look_that_fails_hides_no_deadlock_and_no_call():
    """The thread that looks also takes the calls: it must go on."""

    def fail_once_and_wait_alone():
        snapshot = Probe.snapshot

        def fail(_):
            Probe.snapshot = snapshot
            raise RuntimeError("dictionary changed size during iteration")

        Probe.snapshot = fail
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    with World(2) as world:
        with pytest.raises(Deadlock, match="rank 0 waits"):
            world.run(fail_once_and_wait_alone)
        assert world.run(dist.get_rank) == [0, 1]


def test_connections_that_peers_have_closed_are_no_hindrance_when_a_rank_is_freed():
    def free_what_is_gone():
        listening = socket.create_server(("127.0.0.1", 0))
        caller = socket.create_connection(listening.getsockname())
        accepted = listening.accept()[0]
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()  # with a reset: nothing is left to shut
        renewal.free()
        return accepted.fileno() > 0

    assert launch(free_what_is_gone, world_size=1) == [True]


def test_a_snapshot_has_what_the_innermost_wait_is_for():
    def purpose() -> str:
        return probe().snapshot().threads[0].purpose

    with waiting_for("F3"):
        with waiting_for("B1"):
            assert purpose() == "B1"
        assert purpose() == "F3"
    assert purpose() == ""


def test_flight_recorder_shows_what_waits():
    """Pins the private reader that the watchdog depends on."""

    def look():
        before = probe().snapshot()
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
            pending = probe().snapshot()
            dist.send(torch.ones(1), 1)  # only now may the other rank join
        else:
            dist.recv(torch.ones(1), 0)
            pending = None
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
        work.wait()
        time.sleep(0.05)
        return before.collectives, pending and pending.collectives, probe().snapshot().collectives

    (before, pending, after), _ = launch(look, world_size=2)
    assert before == after == ()
    (call,) = pending
    assert (call.group, call.ranks, call.number, call.operation) == ("gloo 0", (0, 1), 1, "all_reduce")
    assert call.text == "all_reduce number 1 (float [2, 3]) of the world [0, 1]"


def test_a_snapshot_tells_groups_of_the_same_ranks_apart():
    def look():
        groups = [dist.new_group(), dist.new_group(), dist.new_group(group_desc="tp [0, 1]")]
        texts = []
        for group in groups if dist.get_rank() == 0 else ():
            work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
            texts += [call.text for call in probe().snapshot().collectives]
            dist.send(torch.ones(1), 1)
            work.wait()
        for group in groups if dist.get_rank() else ():
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(2), group=group)
        return texts

    texts, _ = launch(look, world_size=2)
    assert [text.partition(" of ")[2] for text in texts] == ['a group "1" [0, 1]', 'a group "2" [0, 1]', "tp [0, 1]"]


def test_a_snapshot_says_which_message_is_waited_for():
    def look():
        texts = []

        def take():
            while not texts or (dist.get_rank() and not texts[-1]):
                texts.append(probe().snapshot().threads[0].call)

        watcher = threading.Thread(target=take)
        watcher.start()
        if dist.get_rank() == 1:
            dist.recv(torch.empty(2, 3), 0, tag=7)
        else:
            time.sleep(0.5)
            dist.send(torch.ones(2, 3), 1, tag=7)
        watcher.join()
        return texts[-1]

    assert launch(look, world_size=2)[1] == "recv from rank 0 (float32 [2, 3], tag 7)"


def wait_for_a_thread():
    thread = threading.Thread(target=time.sleep, args=(0.6,))
    thread.start()
    thread.join()


def wait_in_a_thread():
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()


def wait_for_a_process():
    turn = multiprocessing.get_context("fork").Semaphore(0)
    if os.fork() == 0:
        time.sleep(0.6)
        turn.release()
        os._exit(0)
    turn.acquire()


def wait_beside_a_thread_of_c():
    """It could be one that reads files ahead, and wakes Python when it has something."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(thread), None, sleep, ctypes.c_void_p(2)) == 0
    wait_for_a_thread()
    time.sleep(1.5)


STATES = {  # what both ranks do -> the main thread of rank 1, then its other threads
    "sleeps": (lambda: time.sleep(0.6), ["runs"]),
    "waits for a command": (lambda: subprocess.run(["sleep", "0.6"]), ["runs"]),
    "waits for a process's semaphore": (wait_for_a_process, ["runs"]),
    "waits with a time-out": (lambda: threading.Event().wait(0.6), ["runs"]),
    "waits for a thread that sleeps": (wait_for_a_thread, ["locked", "runs"]),
    "waits for a thread, beside one of C that sleeps": (wait_beside_a_thread_of_c, ["runs", "runs"]),
    "waits in communication": (dist.barrier, ["waits"]),
    "waits for a thread in communication": (wait_in_a_thread, ["locked", "waits"]),
    "waits in communication, with a time-out of its own": (
        lambda: dist.irecv(torch.empty(1), 0).wait(timedelta(seconds=30)),
        ["runs"],
    ),
    "waits in a group that has a shorter time-out": (lambda: dist.barrier(short_lived), ["runs"]),
    "sets up": (dist.new_group, ["waits"]),
    "sets up, with a time-out of its own": (lambda: dist.new_group(timeout=timedelta(seconds=30)), ["runs"]),
}


@pytest.mark.alone
def test_snapshots_tell_waits_that_can_end_from_those_that_cannot():
    def look(wait):
        """Rank 0 comes 0.6 seconds late, and the irecv gets its message."""
        global short_lived
        short_lived = dist.new_group(timeout=timedelta(seconds=30))
        dist.barrier()
        seen = []

        def take():
            threads = probe().snapshot().threads
            seen.append([thread.state for thread in threads if "_answer" not in str(thread.stack)])  # labkit's own

        watcher = threading.Timer(0.3, take)
        watcher.start()
        if dist.get_rank() == 0:
            time.sleep(0.6)
            if "irecv" in wait.__code__.co_names:
                dist.send(torch.ones(1), 1)
                return seen[0]
        wait()
        watcher.join()
        return seen[0]

    with World(2) as world:
        assert {name: world.run(look, wait)[1] for name, (wait, _) in STATES.items()} == {
            name: states for name, (_, states) in STATES.items()
        }


def test_a_request_that_nobody_keeps_is_lost_and_one_that_is_kept_is_not():
    def work():
        watching = dist.isend.__closure__  # the probe of this rank is in there
        probe = next(cell.cell_contents for cell in watching if isinstance(cell.cell_contents, Probe))
        other, got = 1 - dist.get_rank(), torch.empty(1)
        kept, waited_for = dist.isend(torch.ones(1), other), dist.isend(torch.ones(1), other)
        dist.recv(got, other)
        dist.recv(got, other)
        waited_for.wait()
        before = probe.lost_request()
        dist.isend(torch.ones(1), other)
        lost = probe.lost_request()
        dist.recv(got, other)
        kept.wait()
        for work in list(probe.requests):
            work.wait()
        return before, lost.operation, lost.stack[-1][2]

    assert launch(work, world_size=2) == [(None, "send", "work")] * 2


@pytest.mark.alone
def test_a_snapshot_tells_a_rank_that_could_run_from_one_that_only_waits():
    def look(is_spinning):
        looking, end, data = probe(), time.monotonic() + 0.5, bytes(1 << 28)
        watcher = threading.Timer(0.2, lambda: seen.append(looking.snapshot().busy))
        seen = []
        watcher.start()
        while is_spinning and time.monotonic() < end:
            zlib.crc32(data)  # C code that leaves the GIL to others
        watcher.join()
        return seen[0]

    with World(2) as world:
        assert world.run(look, False) == [False, False]
        assert world.run(look, True) == [True, True]


@pytest.mark.parametrize("waits", [waits_for_a_python_thread, may_wait_for_a_thread])
def test_a_thread_that_takes_turns_with_others_does_not_wait_for_them(waits):
    """For a moment of each turn it is in a futex."""
    looks, ends = [], threading.Event()

    def takes_turns():
        while not ends.is_set():
            time.sleep(0.0005)

    def watch():
        try:
            looks.extend(waits(spinning) for _ in range(5000))
        finally:
            ends.set()

    spinning = threading.get_native_id()
    others = [threading.Thread(target=other) for other in (takes_turns, takes_turns, watch)]
    for other in others:
        other.start()
    while not ends.is_set():
        pass
    for other in others:
        other.join()
    assert looks.count(False) == 5000


def test_a_snapshot_counts_bytes_when_they_arrive():
    def look():
        counts = [bytes_received()]
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
            accepted, _ = server.accept()
            for times in (1, 2):
                peer.send(b"xy")
                counts.append(bytes_received())
                accepted.recv(times)
            counts.append(bytes_received())
            accepted.close()
        return counts, len(os.listdir("/proc/self/fd"))

    with World(1) as world:
        seen = [world.run(look)[0] for _ in range(3)]
    assert [counts for counts, _ in seen] == [[0, 2, 4, 4]] * 3
    assert len({num_open for _, num_open in seen}) == 1


def test_a_snapshot_leaves_out_bytes_of_other_processes():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.send(b"x")
            assert bytes_received() == 1
            assert launch(bytes_received, world_size=1) == [0]
