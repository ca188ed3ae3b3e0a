"""One call: when it asks ranks where they are, and when it gives up."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from labkit.launch import RankFailed, World, launch
from labkit.launch.call import Call
from labkit.launch.client import DeferredInterrupt
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


def test_collectives_time_out_after_timeout_seconds():
    def work():
        if dist.get_rank() == 1:
            end = time.time() + 6
            while time.time() < end:
                pass
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0: gave up after timeout_seconds") as failed:
        launch(work, world_size=2, timeout_seconds=1.0)
    assert failed.value.rank == 1 and "rank 1 of 2 did not come where others waited: it runs at" in str(failed.value)
    assert time.monotonic() - start < 5
