"""The check of a machine with GPUs: on CPU ranks all is right, a fault is found, and none ends the check."""

import os
import signal
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.launch import launch
from labkit.tensor_parallel import operators
from labkit.train.config import SCHEDULES
from tests import gpu_check


@pytest.fixture(scope="module")
def ranks():
    ranks = gpu_check.Ranks(2, "gloo")
    yield ranks
    if ranks.world:
        ranks.world.close()


def test_on_cpu_ranks_every_row_is_right_and_the_report_says_where_it_ran(tmp_path):
    report = tmp_path / "build" / "report.md"
    verdicts = [verdict for verdict, _ in gpu_check.check(2, "gloo", report)]
    text = report.read_text()
    assert verdicts == ["right"] * len(gpu_check.Ranks(2, "gloo").rows()), text
    assert text.splitlines()[2:4] == [
        "Ran on 2 CPU ranks over gloo. This says nothing about GPUs.",
        f"{len(verdicts)} of {len(verdicts)} rows are right.",
    ]
    assert "failed to run" not in text  # where there is no nvidia-smi
    assert "CPU cores" in text and "Deadlock: no rank can go on" in text and "GB/s" in text
    assert sum(line.startswith("| schedule: ") for line in text.splitlines()) == len(SCHEDULES)


def faulty(fn, name):
    """On a rank, for this call: sums are not sums, and what arrives is one's own."""

    def own_piece(mine, pieces, **_):
        mine.copy_(pieces[: len(mine)])
        return dist.barrier(async_op=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, *args, **options: None)
        patch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        patch.setattr(operators, "reduce_scatter_single", own_piece)
        return getattr(gpu_check, fn)(name)


@pytest.mark.parametrize(
    ("fn", "name"),
    [("layer", name) for name in gpu_check.LAYERS]
    + [("attention", "ring"), ("collective", "all-reduce"), ("collective", "send and receive")],
)
def test_a_wrong_sum_is_found(ranks, fn, name):
    verdict, line, _ = gpu_check.judge(name, lambda: ranks.compared(faulty, fn, name))
    assert verdict == "WRONG" and "see below" not in line, line  # by its numbers, not by an exception


def test_a_run_that_differs_is_found(ranks, monkeypatch):
    config = gpu_check.layouts(2)["t = 2, sequence parallel"]
    alone = launch(gpu_check.training, replace(config, tp_size=1, sequence_parallel=False), world_size=1)
    alone[0]["losses"][1] += 1e-6
    monkeypatch.setattr(gpu_check, "launch", lambda *args, **options: alone)
    verdict, line, _ = gpu_check.judge("trainer", lambda: ranks.trained(config))
    assert verdict == "WRONG" and "rank 0, losses" in line


def die():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_an_error_ends_its_row_only(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_check.Ranks,
        "rows",
        lambda self: {
            "dies": lambda: self.compared(die),
            "raises": lambda: self.compared(gpu_check.collective, "no such operation"),
            "goes on": lambda: self.compared(gpu_check.collective, "broadcast"),
        },
    )
    verdicts = [verdict for verdict, _ in gpu_check.check(2, "gloo", tmp_path / "report.md")]
    assert verdicts == ["WRONG", "WRONG", "right"]
    text = (tmp_path / "report.md").read_text()
    assert "1 of 3 rows are right" in text and "killed by SIGKILL" in text and "KeyError: 'no such operation'" in text


def test_a_deadlock_that_nobody_notices_is_wrong(ranks, monkeypatch):
    monkeypatch.setattr(gpu_check, "stay_away", gpu_check.meet)
    verdict, _, said = gpu_check.judge("deadlock", ranks.deadlock)
    assert verdict == "WRONG" and "nobody noticed" in said


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 16])
def test_its_layouts_fit_every_number_of_gpus(n):
    layouts = gpu_check.layouts(n)
    assert len(layouts) == 8
    for config in layouts.values():
        config.make_schedule(n)
    needs_two = {"collective: send and receive", "deadlock, reported or stopped"}
    assert needs_two.isdisjoint(gpu_check.Ranks(n, "gloo").rows()) == (n == 1)


def test_without_gpus_it_says_how_to_run_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    monkeypatch.setattr(gpu_check.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "--backend gloo --world-size 4" in capsys.readouterr().err
