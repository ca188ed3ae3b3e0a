"""Rows in which something goes wrong on ranks: what launch says, and after how long."""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from labkit.groups import local_device
from tools.gpu_rows.one_process import first_line
from tools.gpu_rows.row import Found, Where

TIMEOUT_SECONDS = 10


def meet() -> float:
    """On a rank: add up across all ranks, and look at the sum: until somebody looks, a GPU waits alone."""
    x = torch.ones(3, device=local_device())
    dist.all_reduce(x)
    return x.sum().item()


def one_raises() -> float:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 raises, as it was told")
    return meet()


def one_stays_away() -> float:
    return meet() if dist.get_rank() else 0.0


def one_gives_less() -> float:
    x = torch.ones(3 + dist.get_rank(), device=local_device())
    dist.all_reduce(x)
    return x.sum().item()


def one_dies() -> float:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return meet()


def sleep() -> None:
    time.sleep(600)


FAULTS: dict[str, Callable] = {
    "a rank raises": one_raises,
    "a rank stays away": one_stays_away,
    "sizes do not match": one_gives_less,
    "a rank is killed": one_dies,
}


def fault(where: Where, num_ranks: int, name: str) -> Found:
    """Make a fault happen: it must be reported, and new ranks must compute."""
    with where.world(num_ranks, TIMEOUT_SECONDS) as world:
        world.run(meet)
        start = time.monotonic()
        try:
            world.run(FAULTS[name])
        except Exception as error:
            said = first_line(error)
        else:
            said = ""
        seconds = time.monotonic() - start
    sums = where.run(num_ranks, meet)
    is_right = bool(said) and sums == [3.0 * num_ranks] * num_ranks
    expected = f"an error, within about {TIMEOUT_SECONDS} s and what NCCL adds; then the sum is {3 * num_ranks}"
    return Found(is_right, f"{said or 'nobody noticed'}, after {seconds:.1f} s; then {sums[0]:g}", expected)


def stopped(where: Where, num_ranks: int) -> Found:
    """Press stop while ranks run."""
    with where.world(num_ranks) as world:
        world.run(meet)
        main = threading.main_thread().ident
        timer = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            world.run(sleep)
        except KeyboardInterrupt:
            pass
        seconds = time.monotonic() - start
    return Found(seconds < 20, f"the call ended after {seconds:.1f} s", "a second, and what stopping takes")
