"""One call: when it asks ranks where they are, and when it gives up."""

import ctypes
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from labkit.launch import RankFailed, World, launch
from labkit.launch.call import Call
from labkit.launch.client import DeferredInterrupt
from labkit.launch.linux import main_thread, read_text
from labkit.launch.output import Output
from labkit.launch.payload import dump
from labkit.launch.world import _pickled_call

pytestmark = pytest.mark.alone


def test_questions_to_a_stopped_rank_do_not_block_the_kernel(monkeypatch):
    monkeypatch.setattr(Call, "_with_stacks", lambda self, look: look)  # quicker
    with World(1) as world:
        (pid,) = world.run(os.getpid)
        os.kill(pid, signal.SIGSTOP)
        call = Call(world._ranks, Output(1, live=False), DeferredInterrupt())
        for _ in range(1000):  # more than fit its socket
            call._ask(0.0)
        os.kill(pid, signal.SIGCONT)
        assert call._ask(5.0).snapshots.keys() == {0}


def test_only_a_rank_that_is_in_c_code_is_asked_for_its_stack():
    """One that runs Python, and lacks a core to say so, may be making or leaving a frame."""

    def in_c():
        ctypes.PyDLL(None).usleep(1_500_000)  # which keeps the GIL

    def in_python():
        end = time.time() + 1.5
        while time.time() < end:
            pass

    for work, is_in_c in ((in_c, True), (in_python, False)):
        with World(1) as world:
            call = Call(world._ranks, Output(1, live=False), DeferredInterrupt())
            running = threading.Thread(target=world.run, args=(work,))
            running.start()
            time.sleep(0.5)
            call.asked[0] = main_thread(world._ranks.pids[0])[1]
            assert call._is_in_c(0) == is_in_c
            running.join()


def test_a_stack_that_comes_late_is_not_mistaken_for_the_one_before(monkeypatch):
    def first():
        ctypes.PyDLL(None).usleep(3_000_000)  # which a question for its stack cuts short

    def second():
        ctypes.PyDLL(None).usleep(3_000_000)

    def stacks(work):
        call = Call(world._ranks, Output(1, live=False), DeferredInterrupt())
        payload = dump(f"{world._ranks.directory}/payload", _pickled_call(work, (), {}))
        world._ranks.send(None, "call", payload)
        call._pump_until(lambda: False, 0.5)  # and read the answer that the call before did not wait for
        found = call._with_stacks(call._ask(0.1)).stacks
        call._pump_until(lambda: not call._unfinished(), 60)
        return found

    with World(1) as world:
        assert "in first" in stacks(first)[0]
        monkeypatch.setattr(world._ranks, "ask_for_stack", lambda rank: None)  # as if it did not come in time
        assert stacks(second) == {0: ""}


def test_asking_a_busy_rank_for_its_stack_does_not_harm_it(tmp_path):
    """Its threads give back memory of their stacks all the time, which nobody else may read meanwhile."""
    enough = tmp_path / "enough"

    def churn():
        def recurse_for_ever():
            while not done.is_set():
                names = {}
                exec("def f(n):\n    return 0 if n == 0 else f(n - 1) + 1\n", names)
                names["f"](400)

        done = threading.Event()
        threads = [threading.Thread(target=recurse_for_ever) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not os.path.exists(enough):
            time.sleep(0.1)
        done.set()
        for thread in threads:
            thread.join()
        return "alive"

    def ask_a_hundred_times(world):
        for _ in range(100):
            world._ranks.ask_for_stack(0)
            time.sleep(0.01)
        enough.touch()

    with World(1) as world:
        asker = threading.Thread(target=ask_a_hundred_times, args=(world,))
        asker.start()
        try:
            assert world.run(churn) == ["alive"]
        finally:
            asker.join()
        written = read_text(f"{world._ranks.directory}/stack0")
    assert "in churn" in written and "in recurse_for_ever" not in written  # only its main thread's


def in_the_world(group):
    dist.barrier()


def in_a_group_of_their_own(group):
    dist.barrier(group)


def in_making_a_group(group):
    dist.new_group([0, 1])


@pytest.mark.parametrize("wait", [in_the_world, in_a_group_of_their_own, in_making_a_group])
def test_who_waits_gives_up_after_timeout_seconds_and_who_never_came_is_named(wait):
    def work():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            end = time.time() + 6
            while time.time() < end:
                pass
        wait(group)

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0: gave up after timeout_seconds") as failed:
        launch(work, world_size=2, timeout_seconds=1.0)
    assert failed.value.rank == 1 and "rank 1 of 2 did not come where others waited: it runs at" in str(failed.value)
    assert time.monotonic() - start < 5
