"""``python -m labtrain``: what it says, and its exit codes."""

import asyncio
import dataclasses
import inspect
import io
import os
import re
import signal
import sys
from contextlib import closing, redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import labtrain
from labkit.data_parallel.flat_parameter import FlatParameter
from labkit.launch import World
from labtrain import TrainConfig
from labtrain.__main__ import main
from labtrain.data import InventedText
from labtrain.spelling import options, switch
from tests.labtrain.processes import ROOT, TINY, TORCHRUN, TRAIN_IN_FORKS, environment, finish, losses, start

LINE = r"step [1-6]/6: loss \d\.\d{4}, norm \S+, lr \S+, \S+ ms, \S+ tokens/s per rank, peak \S+ GiB, 00:\d\d left\n"
TOTALS = r"6 steps and 384 tokens in 00:\d\d"


def test_alone(alone):
    code, out, error = alone
    assert code == 0, error
    first, *steps, last = out.splitlines(keepends=True)
    floor = InventedText().floor_nats
    threads = f"{torch.get_num_threads()} thread"  # of this process, in which it ran
    assert first.startswith(f"1 rank (tp 1, pp 1, dp 1); gloo on the CPU, {threads}")
    assert f"parameters in float32; 64 tokens per step; the text's floor is {floor:.4f}" in first
    config = TrainConfig(seq_length=8, hidden_size=16, num_layers=2)
    assert f"{config.shape.num_parameters:,} parameters" in first
    loss, above = map(
        float, re.fullmatch(rf"Step 6: loss (\S+), (\S+) above the text's floor; {TOTALS}\n", last).groups()
    )
    assert loss == pytest.approx(above + floor, abs=2e-4)
    assert loss < 3.3
    assert re.fullmatch(LINE * 6, "".join(steps))  # a log, not a terminal
    assert error == ""
    assert losses(out)[0] == ("1", "3.3214")


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls `main` in this process, as a process alone; gives exit code, stdout and stderr without boxes and breaks."""

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["labtrain", *map(str, options)])
        monkeypatch.setenv("COLUMNS", "100")
        before = signal.getsignal(signal.SIGTERM)
        code = main()
        signal.signal(signal.SIGTERM, before)  # a rank that has lost a peer ignores it until it ends
        out, error = capsys.readouterr()
        return code, re.sub(r"\s+", " ", out), re.sub(r"\s+", " ", error)

    return call


def explanations():
    """What the sources of `TrainConfig` say about each option: the comment beside it, or else the lines above it."""
    field = r"((?:^    # .+\n)*)^    (\w+): [^#\n]+?(?:  # (.+))?$"
    explained = {}
    for kind in reversed(TrainConfig.__mro__[:-1]):  # a section may say more of a field than labkit does
        found = re.findall(field, inspect.getsource(kind), re.MULTILINE)
        explained |= {name: beside or above for above, name, beside in found if beside or above}
    return explained


def test_help_explains_every_option(command):
    code, out, error = command("--help")
    assert (code, error) == (0, "")
    explained = explanations()
    assert set(explained) == {field.name for field in dataclasses.fields(TrainConfig)}
    letters = re.sub(r"\W", "", out)
    for name, text in explained.items():
        default = getattr(TrainConfig, name)
        option = switch(name, not default) if isinstance(default, bool) else options()[name]
        assert re.search(rf"{option}\b", out)  # so messages speak of options that there are
        assert re.sub(r"\W", "", text) in letters, f"--help does not explain {name}"
    assert "--tp" in out
    assert "--pp" in out


REFUSED = {  # once, in the words of the command line
    "--stepz 3": "Perhaps you meant: --steps INT",
    "--tp x": "Error parsing --tp",
    "--schedule 2f2b": "gpipe",
    "--steps 0": "labtrain: --steps 0 must be at least 1",
    "--tp 3": "--tp 3 does not divide --num-attention-heads 4: use --tp 1, 2 or 4, or --num-attention-heads 3 or 6",
    "--text nowhere.txt": "the text nowhere.txt cannot be read (No such file or directory): name a file",
    "--tp 2": "--tp 2 * --pp 1 = 2 does not divide world_size=1: use --tp 1, or world_size 2",
    "--batch-size 6": "dp_size=1 * --micro-batch-size 4 = 4 does not divide --batch-size 6: use --batch-size 4 or 8",
    "--resume": "labtrain: --resume needs a --checkpoint-dir: name a folder",
    "--cp 64": "does not divide --seq-length 64: use --seq-length 128, or --no-zigzag",
    "--vocab-size 9": "--vocab-size 9 is for a file of tokens: name one by --tokens, or leave out --vocab-size",
    "--tokens a.bin": "--tokens a.bin needs the --vocab-size of its tokenizer",
    "--hidden-size 100000000": "GB of memory: use a smaller",  # before the model is made
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_does_not_fit_is_said_once(command, options):
    code, _, error = command(*options.split())
    assert code == 2
    assert error.count(REFUSED[options]) == 1


CHECKED = {  # what a check of so many ranks says, without training
    "8 --tp 2 --pp 2": (0, r"^8 ranks = tp 2 x dp 2 x pp 2, .*This fits this machine, with all 8 ranks on it"),
    "4 --hidden-size 16384 --num-layers 64": (
        2,
        r"This does not fit this machine.*say how much memory it has: --gpu-memory-gib 80\.",
    ),
    "4 --gpu-memory-gib 80": (0, "This fits a GPU of 80 GiB: "),
    "7 --tp 2": (2, "does not divide world_size=7"),
}


@pytest.mark.parametrize("options", CHECKED)
def test_a_check_trains_nothing(command, monkeypatch, options):
    monkeypatch.setattr(labtrain.__main__, "train", None)
    expected, said = CHECKED[options]
    code, out, error = command("--check", *options.split())
    assert code == expected
    assert re.search(said, out + error)


def test_numbers_that_run_away(command):
    code, out, error = command(
        *TINY.split(), "--learning-rate", 100, "--weight-decay", 1000, "--clip-norm", 0, "--steps", 9
    )
    assert code == 1
    assert re.search(
        r"labtrain: step [34]: the loss is nan, the gradient norm nan. Not finite: the loss on ranks \[0\]", error
    )
    assert out.startswith("1 rank")
    assert "Step" not in out


def wait_in_c():
    """Wait as in C code: the innermost line is labkit's, not torch's."""
    with closing(asyncio.new_event_loop()) as loop:
        future = loop.create_future()
        future.set_exception(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:40168"))
        FlatParameter.wait(SimpleNamespace(gather_work=SimpleNamespace(wait=future.result)))


def stop():
    raise KeyboardInterrupt


ENDS = {  # how a run ends: the code, and what is said in a line
    "out of memory": (
        lambda: torch.empty(1 << 50),
        1,
        r"out of memory \(.* can't allocate memory: .*\): use a smaller",
    ),
    "peer gone": (wait_in_c, 1, "a peer is gone, so the other ranks end: no checkpoint is there to resume"),
    "stop button": (stop, 130, "interrupted $"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_ends_early_says_so_in_a_line(command, monkeypatch, how):
    end, expected, said = ENDS[how]
    monkeypatch.setattr(labtrain.__main__, "train", lambda config: end())
    code, out, error = command(*TINY.split())
    assert code == expected
    assert re.match(f"labtrain: {said}", error)
    assert out.startswith("1 rank")


def test_any_other_error_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(labtrain.__main__, "train", lambda config: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size") as other:
        command(*TINY.split())
    assert other.traceback[-1].path == Path(__file__)


def gone(*_, **options):
    raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the server crash?")


def test_a_peer_that_takes_the_store_with_it_is_said_in_a_line(command, monkeypatch):
    """Rank 0 keeps the store if torchrun does not: nobody can then ask who is silent, or who has said it."""

    def lose(_):
        store = SimpleNamespace(set=gone, add=gone, check=gone)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        gone()

    monkeypatch.setattr(labtrain.__main__, "train", lose)
    code, _, error = command(*TINY.split())
    assert code == 1
    assert error.startswith("labtrain: a peer is gone (no answer from rank 0), so the other ranks end: no check")


def test_a_peer_that_goes_before_all_have_met_is_said_in_a_line(command, monkeypatch):
    monkeypatch.setattr(labtrain.__main__, "world", gone)
    code, out, error = command(*TINY.split())
    assert (code, out) == (1, "")
    assert error == "labtrain: a peer is gone before all ranks have met, so the others end "


def test_torch_does_not_warn_of_a_lost_peer_in_frames_of_cpp():
    lose = """
from labtrain import TrainConfig
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, is_master=True)
client = TCPStore("127.0.0.1", server.port, is_master=False)
del server
try:
    while True:
        client.add("anything", 1)
except RuntimeError:
    print("lost")
"""
    [result] = finish(start([sys.executable, "-c", lose], RANK="0"))
    assert result == (0, "lost\n", "")


@pytest.mark.parametrize("options", [TINY.split(), ["--stepz", "3"]], ids=str)
def test_a_rank_of_a_world_that_is_nowhere(command, monkeypatch, options):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, out, error = command(*options)
    assert (code, out) == (2, "")
    said = "labtrain: RANK=3 is set, but rank 0 cannot be found at MASTER_ADDR=None "
    assert error.startswith(said) and error.endswith("or unset RANK to train alone ")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "environment variable MASTER_PORT expected, but not set" in command(*options)[2]
    monkeypatch.setenv("MASTER_ADDR", "dgx[1.nowhere")
    assert "rank 0 cannot be found at MASTER_ADDR=dgx[1.nowhere (" in command(*options)[2]


def test_a_text_file_and_a_resumed_run(command, tmp_path):
    options = [*TINY.split(), "--text", ROOT / "README.md", "--checkpoint-dir", tmp_path]
    code, out, _ = command(*options)
    assert code == 0
    assert re.search(r"no floor is known for \S+README.md; seed 0.*Step 3: loss", out)
    assert "floor" not in out.partition("Step 3")[2]
    for more, code, said in (
        ([], 2, "already has step_00000003: resume it, or name a different folder"),
        (["--resume"], 0, "Resuming after step 3, from step_00000003"),
        (["--resume", "--steps", 2], 0, "Nothing to do: the checkpoint has 3 steps: use --steps 4 or more"),
    ):
        done, out, error = command(*options, *more)
        assert done == code
        assert said in out + error


def refused(folder, *options):
    """On a rank: the exit code and stderr of `main`, which also leaves a file for torchrun."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{os.environ['RANK']}"
    sys.argv[1:] = options
    with redirect_stderr(io.StringIO()) as error:
        return main(), error.getvalue()


def test_torchrun_does_not_drown_the_message(tmp_path):
    """It comes first, once for all ranks; and once more at the very end, as the cause that torchrun reports."""
    message = "labtrain: dp_size=2 * --micro-batch-size 4 = 8 does not divide --batch-size 6: use --batch-size 8"
    with World(2) as world:
        assert sorted(world.run(refused, tmp_path, "--batch-size", "6")) == [(2, ""), (2, f"{message}\n")]
    failures = {rank: ProcessFailure(rank, 1, 2, f"{tmp_path}/{rank}") for rank in range(2)}
    others, _, cause = str(ChildFailedError("labtrain", failures)).partition("Root Cause")
    assert message not in others
    assert message in cause


def refused_on_two_nodes(options_of_rank):
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    sys.argv[1:] = options_of_rank[int(os.environ["RANK"])]
    with redirect_stderr(io.StringIO()) as error:
        return main(), error.getvalue()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--stepz", "3"], "Unrecognized options: --stepz"),
        (["--hidden-size", "7"], "--num-attention-heads 4 does not divide --hidden-size 7:"),
        (["--text", "/nowhere"], "No such file or directory"),
        (["--steps", "7"], "--steps is 100 on ranks [0], 7 on ranks [1]: start every rank with the same options"),
    ],
)
def test_what_one_node_was_told_wrongly_ends_all_and_stands_in_each_log(wrong, message):
    with World(2) as world:
        for code, error in world.run(refused_on_two_nodes, [[], wrong]):
            assert code == 2
            assert re.sub(r"[\s│|]+", " ", error).count(message) == 1


def test_torchrun_does_not_restart_what_would_fail_again():
    """Options that cannot be read, too, are said once, and nobody tries them again."""
    options = ["--nproc-per-node", "2", "--max-restarts", "3"]
    command = [*TORCHRUN, "--standalone", *options, *TRAIN_IN_FORKS, "--stepz", "3"]
    code, _, error = finish(start(command, OMP_NUM_THREADS="1"))[0]
    assert code == 1
    assert error.count("Unrecognized options: --stepz") == 1
    assert error.count("\n(A restart would end in the same way, so torchrun is told to stop.)\n") == 1
    assert "SignalException" in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "given", "settings"),
    [
        ("--tp 2", {}, (None, "1")),
        ("--tp 2", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, (None, "32")),
        ("--tp 1", {}, (None, None)),
        ("--tp 2 --pp 2", {}, ("EAGER", None)),  # receives are posted ahead
        ("--tp 2 --fit-ranks", {}, ("EAGER", None)),  # which may turn out to be a pipeline
        ("--tp 2 --zero-stage 1", {}, (None, None)),
    ],
    ids=str,
)
def test_how_many_queues_a_gpu_has(command, monkeypatch, options, given, settings):
    """And when it loads kernels. CUDA reads it when it starts, after torch.distributed was told that there are GPUs."""

    def start_cuda(backend, **_):
        seen = map(os.environ.get, ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"))
        started.append((backend, *seen))
        raise ValueError("there is no GPU here")

    started = []
    monkeypatch.setattr(os, "environ", {**environment(), **given})
    monkeypatch.setattr("labtrain.world.count_gpus", lambda: 1)
    monkeypatch.setattr(labtrain.world.dist, "init_process_group", start_cuda)
    assert command(*options.split())[0] == 2
    assert started == [("nccl", *settings)]


@pytest.mark.parametrize(
    ("error", "restarts_done", "code", "stopped"),
    [(FloatingPointError("nan"), 0, 1, 1), (FloatingPointError("nan"), 3, 1, 0), (MemoryError("full"), 0, 1, 0)],
    ids=str,
)
def test_what_torchrun_may_start_again(command, monkeypatch, error, restarts_done, code, stopped):
    """Memory may be there the next time; and torchrun reports the last attempt itself."""

    def fail(_):
        raise error

    signals = []
    monkeypatch.setattr(labtrain.__main__, "train", fail)
    monkeypatch.setattr(labtrain.world.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "kill", lambda *about: signals.append(about))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts_done))
    monkeypatch.setenv("GROUP_RANK", "0")
    assert command(*TINY.split())[0] == code
    assert signals == [(os.getppid(), signal.SIGTERM)] * stopped
