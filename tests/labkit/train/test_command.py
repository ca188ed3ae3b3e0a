"""``python -m labkit.train``: alone, under torchrun, as two nodes, under Slurm's variables; and what it says."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import labkit.train
from labkit.data import InventedText
from labkit.train import TrainConfig, train
from labkit.train.__main__ import main
from labkit.train.world import has_gpu, is_first_rank, num_threads, slurm_as_torchrun

ROOT = Path(__file__).parents[3]
TINY = "--steps 3 --seq-length 8 --hidden-size 16 --num-layers 2 --batch-size 8 --micro-batch-size 2 --warmup-steps 2"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
COMMAND = ["-m", "labkit.train"]


def environment(**more):
    """A clean one: as in a fresh terminal."""
    ours = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC|OMP_|GOMP_|COLUMNS")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | {"COLUMNS": "100"} | more


def start(command, **more):
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*processes):
    """(exit code, stdout, stderr) of each, when all have ended."""
    results = [(*process.communicate(timeout=240), process.returncode) for process in processes]
    return [(code, out, error) for out, error, code in results]


def losses_in(stderr):
    """The losses that the bar has shown."""
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", stderr)]


@pytest.fixture(scope="module")
def alone():
    return finish(start([sys.executable, *COMMAND, *TINY.split()]))[0]


def test_alone(alone):
    code, out, error = alone
    assert code == 0, error
    first, last = out.splitlines()
    floor = InventedText().floor_nats
    threads = f"{len(os.sched_getaffinity(0))} thread"
    assert first.startswith(f"1 rank (tp 1, pp 1, dp 1); gloo on the CPU, {threads}")
    assert f"parameters in float32; 64 tokens a step; the text's floor is {floor:.4f}" in first
    config = TrainConfig(seq_length=8, hidden_size=16, num_layers=2)
    assert f"{config.shape.num_parameters:,} parameters" in first
    loss, above = map(float, re.fullmatch(r"Step 3: loss (\S+), (\S+) above the text's floor", last).groups())
    assert loss == pytest.approx(above + floor, abs=2e-4)
    assert losses_in(error)[-1] == loss
    assert "3/3" in error
    assert "tokens/s" in error


def same_end(out, alone):
    """The last line is the one of a process alone, to the last digit shown."""
    assert out.splitlines()[-1] == alone[1].splitlines()[-1]


def test_torchrun_with_four_ranks(alone):
    options = "--tp 2 --pp 2 --sequence-parallel"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", *COMMAND, *TINY.split(), *options.split()]
    code, out, error = finish(start(command))[0]
    assert code == 0, error
    assert out.count("\n") == 2
    assert out.startswith("4 ranks (tp 2, pp 2, dp 1); gloo on the CPU, 1 thread a rank; ")
    same_end(out, alone)


def test_two_agents_as_two_nodes(alone, tmp_path, free_port):
    rendezvous = (
        f"--rdzv-backend c10d --rdzv-endpoint localhost:{free_port} --rdzv-id lab --nnodes 2 --nproc-per-node 2"
    )
    options = f"--tp 2 --sharded-optimizer --checkpoint-dir {tmp_path}"
    command = [*TORCHRUN, *rendezvous.split(), "--local-addr", "localhost", *COMMAND, *TINY.split(), *options.split()]
    results = finish(start(command), start(command))
    assert [code for code, _, _ in results] == [0, 0], results
    (out,) = [out for _, out, _ in results if out]  # of the node that has rank 0
    assert out.startswith("4 ranks (tp 2, pp 1, dp 2)")
    same_end(out, alone)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000003"]


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def slurm(task, port, num_tasks=4, **more):
    """What srun sets for a task; on a machine that is no cluster, rank 0 waits at localhost."""
    variables = {
        "SLURM_PROCID": task, "SLURM_NTASKS": 16, "SLURM_LOCALID": task % 2, "SLURM_JOB_ID": 4242,
        "SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_STEP_NODELIST": "dgx[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip
    return {name: str(value) for name, value in (variables | more).items()}


def test_slurm_starts_every_rank_by_itself(alone, free_port):
    command = [sys.executable, *COMMAND, *TINY.split(), "--pp", "2"]
    results = finish(*[start(command, **slurm(task, free_port)) for task in range(4)])
    assert [code for code, _, _ in results] == [0, 0, 0, 0], results
    assert [bool(out) for _, out, _ in results] == [True, False, False, False]
    out = results[0][1]
    assert out.startswith("4 ranks (tp 1, pp 2, dp 2); gloo on the CPU, 1 thread a rank")
    same_end(out, alone)


def test_slurms_variables_are_read():
    task = slurm(3, 1)
    del task["MASTER_ADDR"], task["MASTER_PORT"]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "dgx01"}
    assert slurm_as_torchrun(task) == expected | {"MASTER_PORT": "24242"}
    assert slurm_as_torchrun(task | {"RANK": "0"}) == {}  # torchrun inside a Slurm job
    assert slurm_as_torchrun(task | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert slurm_as_torchrun({}) == {}
    assert not is_first_rank(task)
    assert is_first_rank(task | {"RANK": "0"})
    assert is_first_rank({})


def test_a_script_of_sbatch_is_a_process_alone():
    """There sbatch itself has set the variables of a first task; nobody else will come."""
    script = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "dgx[01-02]", "SLURM_TASKS_PER_NODE": "8(x2)"}
    script |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "16"}
    assert slurm_as_torchrun(script) == {}
    assert is_first_rank(script)


def test_who_gets_a_gpu_and_how_many_threads():
    assert has_gpu(8, 8, {})
    assert not has_gpu(4, 1, {})
    assert has_gpu(8, 1, {"SLURM_GPUS_PER_TASK": "1"})  # each task sees its own only
    assert not has_gpu(8, 0, {"SLURM_GPUS_PER_TASK": "1"})
    assert num_threads(1, {}) == num_threads(4, {"OMP_NUM_THREADS": "9"})  # torch's own
    assert num_threads(1000, {}) == 1
    assert num_threads(8, {"SLURM_CPUS_PER_TASK": "5"}) == 5


# -- what it says when something does not fit --------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls `main` in this process, as a process alone; gives exit code, stdout and stderr without boxes and breaks."""

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["labkit.train", *map(str, options)])
        monkeypatch.setenv("COLUMNS", "100")
        code = main()
        out, error = capsys.readouterr()
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", error)

    return call


def explanations():
    """Of each option, from the source of `TrainConfig`."""
    body = ast.parse((ROOT / "labkit/train/config.py").read_text()).body
    (config,) = [node for node in body if isinstance(node, ast.ClassDef)]
    pairs = zip(config.body, config.body[1:])
    return {a.target.id: b.value.value for a, b in pairs if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)}


def test_help_explains_every_option(command):
    code, out, error = command("--help")
    assert (code, error) == (0, "")
    explained = explanations()
    assert set(explained) == {field.name for field in dataclasses.fields(TrainConfig)}
    letters = re.sub(r"\W", "", out)
    for name, text in explained.items():
        assert f"--{name.replace('_', '-')}" in out
        assert re.sub(r"\W", "", text) in letters, f"--help does not explain {name}"
    assert "--tp" in out
    assert "--pp" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stepz", "3"], "Perhaps you meant: --steps INT"),
        (["--tp", "x"], "Error parsing --tp"),
        (["--schedule", "2f2b"], "gpipe"),
        (["--steps", "0"], "steps=0: use a whole number from 1 up"),
        (["--tp", "3"], "tp_size=3 does not divide num_attention_heads=4: use 1, 2, 4, or another num_attention_heads"),
        (["--text", "nowhere.txt"], "the text nowhere.txt cannot be read (No such file or directory): name a file"),
        (["--tp", "2"], "tp_size=2 * pp_size=1 = 2 does not divide world_size=1: use tp_size 1, or world_size 2"),
        (["--batch-size", "6"], "dp_size=1 * micro_batch_size=4 does not divide batch_size=6: use batch_size 4 or 8"),
        (["--resume"], "resume and save_interval need a checkpoint_dir: name a folder"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_once(command, options, message):
    code, out, error = command(*options)
    assert (code, out) == (2, "")
    assert error.count(message) == 1


def test_numbers_that_run_away(command):
    code, out, error = command(*TINY.split(), "--learning-rate", 1e30, "--clip-norm", 0)
    assert code == 1
    assert re.search(r"labkit.train: step 2: the loss is nan, the gradient norm nan. First on rank 0: ", error)
    assert out.startswith("1 rank")
    assert "Step" not in out


def test_memory_that_runs_out(command, monkeypatch):
    monkeypatch.setattr(labkit.train.__main__, "train", lambda config: torch.empty(1 << 50))
    code, _, error = command(*TINY.split())
    assert code == 1
    assert re.search(r"labkit.train: out of memory \(.* can't allocate memory: .*\): use a smaller model or", error)
    monkeypatch.setattr(labkit.train.__main__, "train", lambda config: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):  # any other error keeps its traceback
        command(*TINY.split())


def test_an_interrupted_run(command, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(labkit.train.__main__, "train", stop)
    code, out, error = command(*TINY.split())
    assert (code, error) == (130, "labkit.train: interrupted ")
    assert out.startswith("1 rank")


@pytest.mark.parametrize("options", [TINY.split(), ["--stepz", "3"]], ids=str)
def test_a_rank_of_a_world_that_is_nowhere(command, monkeypatch, options):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, out, error = command(*options)
    assert (code, out) == (2, "")
    assert error == (
        "labkit.train: RANK=3 is set, but not MASTER_ADDR and MASTER_PORT: start the ranks by torchrun or srun, "
        "or unset RANK to train alone "
    )


def test_a_text_file_and_a_resumed_run(command, tmp_path):
    options = [*TINY.split(), "--text", ROOT / "README.md", "--checkpoint-dir", tmp_path]
    code, out, _ = command(*options)
    assert code == 0
    assert "no floor is known for" in out
    assert "README.md Step 3: loss" in out
    assert "floor" not in out.partition("Step 3")[2]
    code, out, error = command(*options)
    assert code == 2
    assert "has step_00000003 already: resume it, or name another folder" in error
    code, out, _ = command(*options, "--resume")
    assert code == 0
    assert f"Resuming behind step 3, from {tmp_path}/step_00000003" in out
    assert "Nothing to do: the checkpoint has 3 steps or more. Give more --steps" in out


def test_a_text_that_goes_while_the_run_lasts(command, tmp_path, monkeypatch):
    """It was read when the run began."""
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be " * 10)

    def train_and_remove(config):
        steps = train(config)
        file.unlink()
        return steps

    monkeypatch.setattr(labkit.train.__main__, "train", train_and_remove)
    code, out, _ = command(*TINY.split(), "--text", file)
    assert code == 0
    assert "Step 3: loss" in out


def test_torchrun_does_not_drown_the_message():
    """It comes first, once for all ranks; and once more at the very end, as the cause that torchrun reports."""
    message = "labkit.train: dp_size=2 * micro_batch_size=4 does not divide batch_size=6: use batch_size 8"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *COMMAND, "--batch-size", "6"]
    code, _, error = finish(start(command, OMP_NUM_THREADS="1"))[0]
    assert code == 1
    assert error.startswith(message)
    before, _, report = error.partition("Traceback (most recent call last)")
    assert before.count(message) == 1
    others, _, cause = report.partition("Root Cause")
    assert message not in others
    assert message in cause


def test_slurm_says_it_once_too(free_port):
    """Also of options that cannot be read, before any world is up."""
    command = [sys.executable, *COMMAND, "--stepz", "6"]
    results = finish(*[start(command, **slurm(task, free_port, num_tasks=2)) for task in range(2)])
    assert [code for code, _, _ in results] == [2, 2]
    said = "".join(out + error for _, out, error in results)
    assert said.count("Unrecognized options: --stepz") == 1


def test_the_template_for_slurm():
    """It is part of the package, bash can read it, and labkit.train takes its options."""
    template = Path(labkit.train.__file__).with_name("train.sbatch")
    subprocess.run(["bash", "-n", template], check=True)
    text = template.read_text().replace("\\\n", " ")
    options = re.search(r"-m labkit.train (.*)", text)[1].replace('"$CHECKPOINTS"', "folder").split()
    import tyro

    config = tyro.cli(TrainConfig, args=options, config=(tyro.conf.FlagCreatePairsOff,))
    num_ranks = int(re.search(r"--nodes=(\d+)", text)[1]) * int(re.search(r"--ntasks-per-node=(\d+)", text)[1])
    assert config.layout(num_ranks).world_size == 16
    assert "train.sbatch" in (ROOT / "pyproject.toml").read_text()
