"""The same run under torchrun as two nodes and under Slurm; and what is read from their variables."""

import json
import os
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
    fresh,
    has_gpu,
    meet,
    num_threads,
    silent_ranks,
    slurm_as_torchrun,
    world,
)
from tests.labtrain.processes import SIX, environment, finish, losses, start
from tests.labtrain.tiny import TINY as TINY_CONFIG


@pytest.fixture
def free_port():
    import socket

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
    with World(3) as ranks:
        for options, message in [
            ([{"learning_rate": 0.02}, {}, {}], "learning_rate is 0.02 on ranks [0], 0.01 on ranks [1, 2]"),
            ([{}, {}, {"tp_size": 2}], "tp_size is 1 on ranks [0, 1], 2 on ranks [2]"),
            (
                [{"text": text} for text in texts],
                f"text is {texts[0]!r} on ranks [0], {texts[1]!r} on ranks [1], {texts[2]!r} on ranks [2]",
            ),
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


def slurm(task, port, num_tasks=4, **more):
    """What srun sets for a task; on a machine outside a cluster, rank 0 waits at localhost."""
    variables = {
        "SLURM_PROCID": task, "SLURM_NTASKS": 16, "SLURM_LOCALID": task % 2, "SLURM_JOB_ID": 4242, "SLURM_STEP_ID": 3,
        "SLURM_NODEID": task // 2,
        "SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_STEP_NODELIST": "dgx[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in (variables | more).items()}


def test_slurm_starts_every_rank_by_itself(alone, free_port):
    tasks = json.dumps([slurm(task, free_port, num_tasks=2) for task in range(2)])
    command = [sys.executable, "-m", "tests.labtrain.srun", tasks, *SIX.split(), "--pp", "2"]
    [(_, out, error)] = finish(start(command))
    first, *_, last, exit_codes = out.splitlines()
    assert exit_codes == "[0, 0]", error
    assert first.startswith("2 ranks (tp 1, pp 2, dp 1); gloo on the CPU, 1 thread per rank")
    assert last.startswith(alone[1].splitlines()[-1].split(";")[0])
    assert losses(out) == losses(alone[1])


def test_slurms_variables_are_read():
    task = slurm(3, 1)
    del task["MASTER_ADDR"], task["MASTER_PORT"]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "dgx01"}
    assert slurm_as_torchrun(task) == expected | {"MASTER_PORT": str(20000 + (16 * 4242 + 3) % 20000)}
    assert slurm_as_torchrun(task)["MASTER_PORT"] != slurm_as_torchrun(task | {"SLURM_STEP_ID": "4"})["MASTER_PORT"]
    for nodes, first in (("dgx[07-08,11]", "dgx07"), ("a1,a2", "a1"), ("rack[2-3]-[3,5],x", "rack2-3")):
        assert slurm_as_torchrun(task | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first
    for node, number in enumerate("3221"):
        uneven = {"SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1", "SLURM_NODEID": str(node)}
        assert slurm_as_torchrun(task | uneven)["LOCAL_WORLD_SIZE"] == number
    assert slurm_as_torchrun(task | {"RANK": "0"}) == {}  # torchrun inside a Slurm job
    assert slurm_as_torchrun(task | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert slurm_as_torchrun({}) == {}


def test_two_steps_of_a_job_do_not_mix(monkeypatch, free_port):
    """Not even if they are given the same port, as two jobs on one node may be."""
    stores = []
    for step in range(2):
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}.items():
            monkeypatch.setenv(name, str(value))
        store, _, _ = meet(os.environ | {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": str(step)})
        stores.append(store)
    stores[0].set("address", "of step 0")
    assert stores[0].check(["address"])
    assert not stores[1].check(["address"])


def test_a_script_of_sbatch_is_a_process_alone():
    """sbatch itself has set the variables of a first task there, and no other task will come."""
    script = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "dgx[01-02]", "SLURM_TASKS_PER_NODE": "8(x2)"}
    script |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "16"}
    assert slurm_as_torchrun(script) == {}


def test_who_gets_a_gpu_and_how_many_threads():
    assert has_gpu(8, 8, {})
    assert not has_gpu(4, 1, {})
    assert has_gpu(8, 1, {"SLURM_GPUS_PER_TASK": "1"})  # each task sees its own only
    assert not has_gpu(8, 0, {"SLURM_GPUS_PER_TASK": "1"})
    with pytest.raises(
        ValueError, match=r"each of 8 ranks of a node sees 1 of its GPUs, perhaps the same: give srun --gp"
    ):
        has_gpu(8, 1, {"SLURM_STEP_NUM_TASKS": "8"})  # as with --gpu-bind=single:1
    assert num_threads(1, {}) == num_threads(4, {"OMP_NUM_THREADS": "9"})  # torch's own
    assert num_threads(1000, {}) == 1
    assert num_threads(8, {"SLURM_CPUS_PER_TASK": "5"}) == 5


def test_cuda_finds_its_settings_when_it_is_first_asked(monkeypatch):
    """It reads them once, and to be asked how many GPUs there are may be what starts it."""

    def device_count():
        seen.append([os.environ.get(f"CUDA_{name}") for name in ("MODULE_LOADING", "DEVICE_MAX_CONNECTIONS")])
        return 0

    seen = []
    monkeypatch.setattr("torch.cuda.device_count", device_count)
    for options in ({"one_queue": True}, {"posts_receives": False}):
        monkeypatch.setattr(os, "environ", environment())
        with world(**options):
            pass
    assert seen == [["EAGER", "1"], [None, None]]


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
