"""The table in labkit/launch/faults.md is what happens: each fault is made on gloo, and again by NCCL's rules."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labkit.launch
from course.nccl_rules import Under
from labkit.launch import RankFailed, World, watchdog

NUM_RANKS = 3


def a_rank_raises():
    if dist.get_rank() == 1:
        raise ValueError("a bad thing")
    dist.barrier()


def sys_exit_on_a_rank():
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()


def a_rank_is_killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def a_rank_skips_a_collective():
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2))


def a_rank_skips_the_first_use_of_a_group():
    group = dist.new_group([0, 1], group_desc="tp [0, 1]")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)


def a_rank_comes_to_the_first_use_of_a_group_too_late():
    group = dist.new_group([0, 1], group_desc="tp [0, 1]")
    if dist.get_rank() == 1:
        time.sleep(60)
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(2), group=group)


def different_operations_meet():
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))


def a_receive_without_a_send():
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 1)


def a_message_that_nobody_receives():
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)


def a_ring_of_messages_without_a_batch():
    rank = dist.get_rank()
    works = [
        dist.isend(torch.ones(2), (rank + 1) % NUM_RANKS),
        dist.irecv(torch.ones(2), (rank - 1) % NUM_RANKS),
    ]
    for work in works:
        work.wait()


def the_request_of_an_isend_is_lost():
    dist.isend(torch.ones(2), (dist.get_rank() + 1) % NUM_RANKS)


def a_kernel_on_the_gpu_fails():
    """As on a GPU: the function returns before anybody knows, and from then on CUDA refuses every call."""

    def refuse(*_):
        raise RuntimeError("device-side assert triggered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.cuda.current_stream = refuse


FAULTS: dict[str, Callable] = {
    "a rank raises": a_rank_raises,
    "`sys.exit` on a rank": sys_exit_on_a_rank,
    "a rank is killed": a_rank_is_killed,
    "a rank skips a collective": a_rank_skips_a_collective,
    "a rank skips the first use of a group": a_rank_skips_the_first_use_of_a_group,
    "a rank comes to the first use of a group too late": a_rank_comes_to_the_first_use_of_a_group_too_late,
    "different operations meet": different_operations_meet,
    "a receive without a send": a_receive_without_a_send,
    "a message that nobody receives": a_message_that_nobody_receives,
    "a ring of messages without a batch": a_ring_of_messages_without_a_batch,
    "the request of an `isend` is lost": the_request_of_an_isend_is_lost,
    "a kernel on the GPU fails": a_kernel_on_the_gpu_fails,
}


def use_the_world():
    """NCCL connects the world at its first use: this is no fault of the call that follows."""
    dist.all_reduce(torch.ones(1))


def outcome(function: Callable, under: Callable) -> tuple[str, str]:
    """Return the report, and whether the ranks and their names outlive the fault."""
    timeout_seconds = 3.0 if "too_late" in function.__name__ else 8.0  # a deadlock is told before
    with World(NUM_RANKS, timeout_seconds=timeout_seconds) as world:
        world.run(under(use_the_world))
        try:
            world.run(under(function))
        except RankFailed as error:
            return f"{type(error).__name__}: {error}", "lost" if world.ended else "kept"
        return "it runs", "kept"


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the table by fault and column, without those that were not tried."""
    text = Path(labkit.launch.__file__).with_name("faults.md").read_text()
    cells = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| fault |"):
            fault, on_gloo, on_nccl = (cell.strip() for cell in line.strip("| ").split(" | "))
            cells |= {(fault, "gloo"): on_gloo, (fault, "NCCL"): on_nccl}
    return {where: cell for where, cell in cells.items() if cell != "not tried"}


CELLS = table()


def test_the_table_has_each_fault():
    assert {fault for fault, _ in CELLS} == FAULTS.keys()


@pytest.mark.alone
@pytest.mark.parametrize(("fault", "column"), CELLS, ids=map(" on ".join, CELLS))
def test_a_learner_sees_what_the_table_says(fault, column, monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.5)
    said, names = outcome(FAULTS[fault], Under if column == "NCCL" else lambda function: function)
    cell = CELLS[fault, column]
    for quoted in re.findall(r"`(.+?)`", cell):
        assert quoted in said
    assert cell.endswith(names) or said == cell == "it runs"
