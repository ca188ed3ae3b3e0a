"""The same run under torchrun as two nodes; and what is read from the variables of torchrun and other launchers."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from labkit.launch import World
from labtrain import train
from labtrain.world import (
    PROCESS,
    _machine,
    check_launcher,
    fresh,
    num_threads,
    silent_ranks,
)
from tests.labtrain.processes import SIX, environment, finish, losses, start
from tests.labtrain.tiny import TINY as TINY_CONFIG


@pytest.fixture
def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_run_outlives_a_rank(alone, tmp_path, free_port):
    """Ranks find each other again, although the store in which they meet still has the addresses of dead ones.

    That a run outlives a node too is shown in notebook 14, whose outputs are compared.
    """
    nodes = [sys.executable, "-m", "tests.labtrain.two_nodes", str(free_port), *SIX.split()]
    options = f"--tp 2 --checkpoint-dir {tmp_path} --save-interval 2 --resume"
    [(code, out, error)] = finish(start([*nodes, *options.split()]))
    assert code == 0, error
    first, none = "2 ranks (tp 2, pp 1, dp 1); gloo on the CPU, ", f"No checkpoint in {tmp_path}: starting with step 1"
    resuming, end = "Resuming after step 2, from step_00000002", alone[1].splitlines()[-1].split(";")[0]
    told = [out.count(text) for text in (first, none, resuming, end, "[0, 0]")]
    assert told == [4, 2, 2, 2, 1]  # each node says it: they may have a log each
    assert losses(out) == losses(alone[1])
    gone = "labtrain: a peer is gone (no answer from rank 1), so the other ranks end: with --resume, a restart goes on"
    assert error.count(f"{gone} after step_00000002\n") == 1
    assert "RuntimeError" not in error


def test_a_store_that_was_used_before():
    """By ranks that died at any moment: the first of all, and a ticket without an answer from each attempt."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        for attempt in range(50):
            parts = list(ranks.map(lambda rank: fresh(store, rank, 3), range(3)))
            assert not any(part.check(["address"]) for part in parts)
            parts[0].set("address", str(attempt))
            assert [int(part.get("address")) for part in parts] == [attempt] * 3
            store.set(f"ticket of {attempt % 3}", f"of a rank that died before attempt {attempt}")


def refusal(configs):
    """On a rank: what `train` says of this rank's own config."""
    try:
        train(configs[dist.get_rank()])
    except ValueError as error:
        return str(error)


def test_ranks_with_different_options_are_refused(tmp_path):
    texts = [tmp_path / str(rank) / "text" for rank in range(3)]
    for path in texts:
        path.parent.mkdir()
        path.write_text("to be or not to be " * (10 if path is texts[0] else 11))
    config = replace(TINY_CONFIG, steps=1, batch_size=12)
    where = ", ".join(f"{str(path)!r} on ranks [{rank}]" for rank, path in enumerate(texts))
    with World(3) as ranks:
        for options, message in [
            ([{"learning_rate": 0.02}, {}, {}], "learning_rate is 0.02 on ranks [0], 0.01 on ranks [1, 2]"),
            ([{}, {}, {"tp_size": 2}], "tp_size is 1 on ranks [0, 1], 2 on ranks [2]"),
            ([{"text": str(path)} for path in texts], f"text is {where}"),
        ]:
            said = ranks.run(refusal, [replace(config, **each) for each in options])
            assert said == [f"{message}: start every rank with the same options"] * 3


def test_only_who_is_gone_is_named(monkeypatch):
    """Not a rank that is slow to notice, as on a busy machine: its process is there."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    ended = subprocess.Popen(["true"])  # and not waited for: a zombie, as under torchrun
    for rank, pid in enumerate([os.getpid(), ended.pid, os.getpid(), os.getpid()]):
        store.set(f"{PROCESS} {rank}", f"{_machine() if rank < 3 else 'elsewhere'} {pid}")
    store.set("labtrain is gone 3", "")  # said by somebody on its machine
    slow = threading.Timer(1.5, lambda: store.set("labtrain is there 2", ""))
    slow.start()
    assert silent_ranks(store) == [1, 3]
    assert not slow.is_alive()
    ended.wait()


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "16", "PMI_SIZE": "16"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "16"}, "mpirun"),
        ({"PMI_SIZE": "16"}, "mpirun"),
    ],
)
def test_ranks_without_torchrun_are_refused(variables, launcher):
    """They would train alone, each for itself."""
    says = f"{launcher} has started 16 processes, but does not say where rank 0 is: let it start one torchrun on each"
    with pytest.raises(ValueError, match=says):
        check_launcher(variables)
    check_launcher(variables | {"RANK": "1"})  # torchrun below srun
    check_launcher(dict.fromkeys(variables, "1"))


def test_a_script_of_sbatch_is_a_process_alone():
    """sbatch itself has set the variables of a first task there, and no other task will come."""
    script = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "dgx[01-02]", "SLURM_TASKS_PER_NODE": "8(x2)"}
    check_launcher(script | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "16"})


def test_how_many_threads():
    assert num_threads(1, {}) == num_threads(4, {"OMP_NUM_THREADS": "9"})  # torch's own
    assert num_threads(1000, {}) == 1


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "1"}], ids=str)
def test_one_thread_is_torchruns_own_choice_or_the_users(monkeypatch, given):
    """It gives its ranks one thread if it was started without a number."""
    torchrun = subprocess.Popen(["sleep", "60"], env=environment(**given))
    while not Path(f"/proc/{torchrun.pid}/environ").read_bytes():  # the kernel fills it a moment after the start
        pass
    monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    threads = num_threads(4, {"TORCHELASTIC_RUN_ID": "lab", "OMP_NUM_THREADS": "1"})
    torchrun.kill()
    torchrun.wait()
    assert threads == (1 if given else 8)
