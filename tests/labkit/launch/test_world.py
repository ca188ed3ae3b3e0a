"""What launch and World promise when all goes well, and what they refuse before any process starts."""

import os
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.attention import SDPBackend

from labkit.device import choose_backend
from labkit.launch import RankFailed, World, launch


def sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def test_results_come_in_rank_order():
    assert launch(lambda: dist.get_rank(), world_size=3) == [0, 1, 2]
    assert launch(sum_of_ranks, world_size=4) == [6.0] * 4


def test_a_world_of_one():
    assert launch(sum_of_ranks, world_size=1) == [0.0]


def test_anything_made_in_a_cell_travels():
    scale = 3

    class Pair:
        def __init__(self, x):
            self.x = x * scale

    results = launch(lambda x, *, y: (Pair(x), y + 1, {x}), 2, y=np.ones(2), world_size=2)
    assert all(isinstance(pair, Pair) and pair.x == 6 for pair, _, _ in results)
    assert all((y == 2).all() and z == {2} for _, y, z in results)


def test_tensors_and_their_gradients_travel():
    weight = torch.arange(4.0, requires_grad=True)

    def gradient(weight):
        (weight * dist.get_rank()).sum().backward()
        return weight.grad

    zeros, ones = launch(gradient, weight, world_size=2)
    assert torch.equal(zeros, torch.zeros(4)) and torch.equal(ones, torch.ones(4))


def test_a_functional_collective_that_nobody_waited_for_arrives_complete():
    """Rank 0 returns half a second before rank 1 starts to send."""

    def nobody_waits(change):
        world = dist.group.WORLD
        assert world is not None
        x = torch.full((2, 3), dist.get_rank() + 1.0)
        funcol.all_reduce(x, "sum", world).sum()  # the first takes a second
        dist.barrier()
        time.sleep(0.5 * dist.get_rank())
        return {"sums": [change(funcol.all_reduce(x, "sum", world))]}

    for change in (lambda x: x, torch.detach, torch.t):
        for result in launch(nobody_waits, change, world_size=2):
            [found] = result["sums"]
            assert type(found) is torch.Tensor and found.tolist() == change(torch.full((2, 3), 3.0)).tolist()


def test_names_of_torch_travel_that_cloudpickle_cannot_send():
    """A class of C++ under a name of Python's; and torch.ops, which it sends with any function that has the word."""
    counts = SimpleNamespace(ops=3)
    used = lambda: (SDPBackend.MATH, torch.ones(1).item() * counts.ops)  # noqa: E731
    assert launch(used, world_size=1) == [(SDPBackend.MATH, 3.0)]
    assert launch(lambda: torch.ops.aten.add(torch.ones(1), 2).item(), world_size=1) == [3.0]


def test_large_arguments_and_results_travel():
    big = torch.arange(1_500_000)
    with World(2) as world:
        assert torch.equal(world.run(lambda x: x + dist.get_rank(), big)[1], big + 1)
        assert not os.path.exists(f"{world._ranks.directory}/payload")  # memory that nobody needs any more


def test_a_world_keeps_its_ranks_between_calls():
    with World(2) as world:
        assert world.run(os.getpid) == world.run(os.getpid)
        assert world.run(sum_of_ranks) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="this world has ended \\(it was closed\\)"):
        world.run(os.getpid)


def test_a_world_outlives_an_exception_after_which_nothing_is_on_its_way():
    def raises(everywhere):
        dist.barrier()
        if everywhere or dist.get_rank():
            raise KeyError("k")
        return torch.zeros(100_000)

    with World(2) as world:
        pids, files = world.run(os.getpid), os.listdir(world._ranks.directory)
        for everywhere in (True, False):
            with pytest.raises(RankFailed, match="raised KeyError: 'k'"):
                world.run(raises, everywhere)
            assert not world.ended and world.run(os.getpid) == pids and world.run(sum_of_ranks) == [1.0, 1.0]
        assert os.listdir(world._ranks.directory) == files  # the result that nobody took is gone


def test_a_stop_that_comes_after_the_call_is_ignored():
    with World(2) as world:
        pids = world.run(os.getpid)
        world._ranks.send(0, "stop", "now")
        assert world.run(sum_of_ranks) == [1.0, 1.0]
        assert world.run(os.getpid) == pids


def test_two_worlds_at_once():
    with World(2) as one, World(3) as other:
        assert one.run(sum_of_ranks) == [1.0, 1.0]
        assert other.run(sum_of_ranks) == [3.0] * 3
        assert one.run(sum_of_ranks) == [1.0, 1.0]


def test_calls_of_one_world_from_two_threads_take_turns():
    results = []
    with World(2) as world:
        threads = [threading.Thread(target=lambda: results.append(world.run(sum_of_ranks))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[1.0, 1.0]] * 4


REFUSED = {  # without a GPU; an option of launch, and what is said
    **{f"timeout_seconds=float('{seconds}')": f"timeout_seconds={seconds} must be a number above 0, and at most a mill"
       for seconds in ("0.0", "-1.0", "nan", "inf")},
    **{f"world_size={size}": f"world_size={size} must be a whole number from 1 to 128"
       for size in ("0", "-1", "2.0", "True", "'4'", "None", "1000000000")},
    "backend='mpi'": "backend='mpi' is unknown: use 'auto', 'gloo' or 'nccl'",
}  # fmt: skip


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_cannot_be_is_refused_before_any_rank_starts(option, launches):
    with pytest.raises(ValueError, match=re.escape(REFUSED[option])):
        launch(os.getpid, **{"world_size": 1} | eval(f"dict({option})"))
    assert not launches


def test_a_call_that_cannot_be_sent_starts_no_rank_and_ends_no_world(launches):
    calls = {"argument 1 (a lock) cannot be sent to the ranks": (print, 1, threading.Lock()), "fn=3 cannot be": (3,)}
    with World(1) as world:
        for said, call in calls.items():
            for run in (world.run, partial(launch, world_size=2)):
                with pytest.raises(ValueError, match=re.escape(said)):
                    run(*call)
        assert len(world.run(os.getpid)) == len(launches) == 1


def test_a_working_directory_that_was_deleted_is_named(tmp_path, monkeypatch, launches):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match=r"the working directory is gone, .*/gone .*: choose a different .* os.chdir"):
        launch(os.getpid, world_size=2)
    assert not launches


@pytest.mark.parametrize(("gpus", "size", "chosen"), [(0, 2, "gloo"), (8, 8, "nccl"), (4, 8, "gloo"), (1, 1, "nccl")])
def test_backend_is_chosen_by_the_gpus_there_are(gpus, size, chosen, capsys):
    from labkit.launch import world

    world._say_if_new.cache_clear()
    backend, why = choose_backend("auto", size, gpus)
    assert backend == chosen
    world._say_if_new(why)
    said = capsys.readouterr().out
    assert said.count(".") == 1
    assert ("NCCL" in said) == (chosen == "nccl")
    assert ("too few for 8 ranks" in said) == (gpus == 4)
    world._say_if_new(why)
    assert capsys.readouterr().out == ""  # said once


def test_the_first_line_names_the_gpus_that_ranks_take(monkeypatch):
    """On a machine that several people share, each looks whether these are their own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "Ranks run on GPUs 0, 1, one each, and talk through NCCL" in choose_backend("auto", 2, 8)[1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert "Ranks run on GPUs 4, 5 of CUDA_VISIBLE_DEVICES=4,5,6, one each" in choose_backend("auto", 2, 3)[1]
    assert "Ranks run on GPU 4 of" in choose_backend("auto", 1, 3)[1]
