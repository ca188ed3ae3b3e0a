"""The same run under torchrun as two nodes and under Slurm; and what is read from their variables."""

import pytest

from labkit.train.world import has_gpu, num_threads, slurm_as_torchrun
from tests.labkit.train.processes import TINY, TORCHRUN, TRAIN, finish, same_end, start


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_agents_as_two_nodes(alone, tmp_path, free_port):
    rendezvous = f"--rdzv-backend c10d --rdzv-endpoint localhost:{free_port} --rdzv-id lab --local-addr localhost"
    rendezvous += " --nnodes 2 --nproc-per-node 2"
    options = f"--tp 2 --sharded-optimizer --checkpoint-dir {tmp_path}"
    command = [*TORCHRUN, *rendezvous.split(), *TRAIN[1:], *TINY.split(), *options.split()]
    results = finish(start(command), start(command))
    assert [code for code, _, _ in results] == [0, 0], results
    (out,) = [out for _, out, _ in results if out]  # of the node that has rank 0
    assert out.startswith("4 ranks (tp 2, pp 1, dp 2); gloo on the CPU, 1 thread per rank; ")
    assert out.count("\n") == 2
    same_end(out, alone)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000003"]


def slurm(task, port, num_tasks=4, **more):
    """What srun sets for a task; on a machine outside a cluster, rank 0 waits at localhost."""
    variables = {
        "SLURM_PROCID": task, "SLURM_NTASKS": 16, "SLURM_LOCALID": task % 2, "SLURM_JOB_ID": 4242,
        "SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_STEP_NODELIST": "dgx[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in (variables | more).items()}


def test_slurm_starts_every_rank_by_itself(alone, free_port):
    command = [*TRAIN, *TINY.split(), "--pp", "2"]
    results = finish(*[start(command, **slurm(task, free_port, num_tasks=2)) for task in range(2)])
    assert [code for code, _, _ in results] == [0, 0], results
    assert [bool(out) for _, out, _ in results] == [True, False]
    out = results[0][1]
    assert out.startswith("2 ranks (tp 1, pp 2, dp 1); gloo on the CPU, 1 thread per rank")
    same_end(out, alone)


def test_slurm_says_it_once_too(free_port):
    """Also of options that cannot be read, before any world is up."""
    command = [*TRAIN, "--stepz", "6"]
    results = finish(*[start(command, **slurm(task, free_port, num_tasks=2)) for task in range(2)])
    assert [code for code, _, _ in results] == [2, 2]
    said = "".join(out + error for _, out, error in results)
    assert said.count("Unrecognized options: --stepz") == 1


def test_slurms_variables_are_read():
    task = slurm(3, 1)
    del task["MASTER_ADDR"], task["MASTER_PORT"]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "dgx01"}
    assert slurm_as_torchrun(task) == expected | {"MASTER_PORT": "24242"}
    for nodes, first in (("dgx[07-08,11]", "dgx07"), ("a1,a2", "a1"), ("rack2-[3,5]", "rack2-3")):
        assert slurm_as_torchrun(task | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first
    assert slurm_as_torchrun(task | {"RANK": "0"}) == {}  # torchrun inside a Slurm job
    assert slurm_as_torchrun(task | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert slurm_as_torchrun({}) == {}


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
    assert num_threads(1, {}) == num_threads(4, {"OMP_NUM_THREADS": "9"})  # torch's own
    assert num_threads(1000, {}) == 1
    assert num_threads(8, {"SLURM_CPUS_PER_TASK": "5"}) == 5
