"""One call: when it asks ranks where they are, and when it gives up."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from labkit.launch import RankFailed, World, launch
from labkit.launch.call import Call
from labkit.launch.client import DeferredInterrupt
from labkit.launch.linux import read_text
from labkit.launch.output import Output

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


def test_asking_a_busy_rank_for_its_stack_does_not_harm_it():
    """Its threads give back memory of their stacks all the time, which nobody else may read meanwhile."""
    asked = 0

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
        time.sleep(2)
        done.set()
        for thread in threads:
            thread.join()
        return "alive"

    def ask_again_and_again(world):
        nonlocal asked
        while running.is_set():
            world._ranks.ask_for_stack(0)
            asked += 1
            time.sleep(0.001)

    running = threading.Event()
    running.set()
    with World(1) as world:
        asker = threading.Thread(target=ask_again_and_again, args=(world,))
        asker.start()
        try:
            assert world.run(churn) == ["alive"]
        finally:
            running.clear()
            asker.join()
        written = read_text(f"{world._ranks.directory}/stack0")
    assert asked > 100 and "in churn" in written and "in recurse_for_ever" not in written  # only its main thread's


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
