"""A run that is asked to end finishes its step, saves, and goes on later as if nothing had been."""

import os
import re
import signal
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from labkit.launch import launch
from labtrain import steps, train
from labtrain.checkpoint import InBackground, newest
from labtrain.exit_signal import ExitSignal
from tests.labtrain.processes import SIX, finish, start
from tests.labtrain.tiny import TINY, numbers
from tests.support.sweep import IS_SWEEP


def ended_by(config, number):
    """Steps of a run in which one rank gets a signal after its third."""
    before, done = signal.getsignal(number), []
    for step in steps(config):
        done.append(step)
        if step.step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_end_after_the_same_step_and_resume(on_ranks, tmp_path, number):
    config = replace(TINY, steps=6, pp_size=2, checkpoint_dir=str(tmp_path))
    whole = on_ranks(train, replace(config, checkpoint_dir=None))[0]
    first = launch(ended_by, config, number, world_size=2)
    for rank, done in enumerate(first):
        assert [step.step for step in done] == [1, 2, 3, 4]
        assert done[-1].exit_reason == ("asked on another rank", number.name)[rank]
    rest = on_ranks(train, replace(config, resume=True))[0]
    assert numbers(first[0] + rest) == numbers(whole)


def test_a_run_ends_when_its_time_is_up(tmp_path):
    config = replace(TINY, steps=100_000, eval_interval=0, exit_duration=0.01, checkpoint_dir=str(tmp_path))
    [done] = launch(train, config, world_size=1)
    assert done[-1].exit_reason == "0.01 minutes"
    assert (tmp_path / f"step_{len(done):08d}").is_dir()


def test_a_minute_has_sixty_seconds(monkeypatch):
    clock = MagicMock()
    monkeypatch.setattr("labtrain.exit_signal.time", clock)
    clock.monotonic.return_value = 0.0
    with ExitSignal(2) as early:
        for seconds, reason in ((119, ""), (121, "2 minutes")):
            clock.monotonic.return_value = seconds
            assert early.reason == reason


def told_while_it_saves(config):
    """On a rank: train, and get a signal when only the save in the background is left to do."""
    really = InBackground.__exit__

    def told(self, *error):
        os.kill(os.getpid(), signal.SIGTERM)
        really(self, *error)

    InBackground.__exit__ = told
    try:
        return len(train(config))
    finally:
        InBackground.__exit__ = really


def test_a_signal_does_not_cut_off_a_save_in_the_background(tmp_path):
    config = replace(TINY, async_save=True, checkpoint_dir=str(tmp_path))
    assert launch(told_while_it_saves, config, world_size=1) == [config.steps]
    assert newest(tmp_path).name == f"step_{config.steps:08d}"


@pytest.mark.parametrize("num_ranks", [1, 2] if IS_SWEEP else [1])
def test_sigterm_to_a_command(tmp_path, num_ranks):
    """To a rank alone, or to torchrun, which sends it on, and itself ends with a traceback of its own."""
    options = ["--checkpoint-dir", str(tmp_path), "--tp", str(num_ranks), "--keep", "1", "--async-save"]
    options += ["--save-interval", "2", *SIX.replace("--steps 6", "--steps 100000").split()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "labtrain"]
    command = torchrun if num_ranks > 1 else [sys.executable, "-m", "labtrain"]
    process = start([*command, *options])
    for line in process.stdout:
        if "step 3/" in line:
            break
    process.send_signal(signal.SIGTERM)
    [(code, out, error)] = finish(process)
    assert "Ended early (SIGTERM): a checkpoint is saved, --resume continues from it" in out
    if num_ranks == 1:
        assert code == 0 and "Traceback" not in error
    [saved] = tmp_path.glob("step_*")
    assert int(saved.name[5:]) == int(re.search(r"Step (\d+): loss", out)[1])
