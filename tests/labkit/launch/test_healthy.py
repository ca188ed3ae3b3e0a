"""Heavy but healthy work, which the watchdog must leave alone: long transfers, uneven compute, a rank that loads.

`make test` runs it once, on two ranks, beside the others: a busy machine is no reason for an alarm either. A deadlock
would be called after 2 s here (tests/conftest.py), and most of the work takes longer. A sweep has four ranks, too.
"""

import itertools
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from labkit.launch import launch
from tests.support.sweep import IS_SWEEP

WORLDS = (2, 4) if IS_SWEEP else (2,)
HALF_GIB = 2**27  # elements of float32


def send_of_half_a_gib():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.ones(HALF_GIB)
    if rank == 0:
        dist.send(x, last)
    elif rank == last:
        dist.recv(x, 0)


def uneven_compute():
    for step in range(dist.get_world_size() // 2):
        end = time.time() + (2.5 if step == dist.get_rank() else 0.1)
        while time.time() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
        dist.all_reduce(torch.ones(10))


def rank_0_loads():
    if dist.get_rank() == 0:
        time.sleep(3)
        torch.rand(10**7).sort()
    dist.barrier()


def broadcast_whose_root_leaves():
    dist.broadcast(torch.ones(HALF_GIB), 0)


def sleep_beside_an_asynchronous_collective():
    rank = dist.get_rank()
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        time.sleep(3)
        dist.send(torch.ones(1), 1)
        work.wait()
        return
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.ones(10))


def many_groups():
    size = dist.get_world_size()
    for _ in range(3):
        for rank in range(size):
            dist.new_group([rank, (rank + 1) % size])
    for _ in range(1500):
        dist.all_reduce(torch.ones(100))


def pipeline():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for _ in range(4):
        x = torch.ones(10**6)
        if rank > 0:
            dist.recv(x, rank - 1)
        time.sleep(0.8)
        if rank < last:
            dist.send(x, rank + 1)


def pipeline_of_torch_with_a_slow_stage():
    """The learner's forward runs inside torch.distributed's frames."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Stage(torch.nn.Linear):
        def forward(self, input):
            time.sleep(3 if dist.get_rank() == 0 else 0)
            return super().forward(input)

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Stage(4, 4), rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=torch.nn.functional.mse_loss)
    schedule.step(*[torch.ones(2, 4)] * (rank == 0), target=torch.ones(2, 4) if rank == size - 1 else None)


def checkpoint_on_a_slow_disk():
    import torch.distributed.checkpoint as checkpoint

    class Writer(checkpoint.FileSystemWriter):
        def write_data(self, *args):
            subprocess.run(["sleep", "3" if dist.get_rank() == 0 else "0"])
            return super().write_data(*args)

    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save({"x": torch.ones(4)}, storage_writer=Writer(f"{directory}/{os.environ['LABKIT_WORLD']}"))
        dist.barrier()


def holds_the_gil():
    if dist.get_rank() == 0:
        sum(range(10**8))
    dist.barrier()


WORK = [
    send_of_half_a_gib,
    uneven_compute,
    rank_0_loads,
    broadcast_whose_root_leaves,
    sleep_beside_an_asynchronous_collective,
    many_groups,
    pipeline,
    pipeline_of_torch_with_a_slow_stage,
    checkpoint_on_a_slow_disk,
    holds_the_gil,
]


@pytest.fixture(scope="module")
def runs():
    """All work, four pieces at a time: most of it waits."""
    everything = itertools.product(WORK, WORLDS)
    with ThreadPoolExecutor(4) as pool:
        yield {run: pool.submit(launch, run[0], world_size=run[1], timeout_seconds=120) for run in everything}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_no_false_alarm(runs, work, world_size):
    assert runs[work, world_size].result() == [None] * world_size
