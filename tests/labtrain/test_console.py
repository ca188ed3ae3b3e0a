"""The lines before and after a run, and what is shown while it lasts."""

import io
import json
import platform
import re
import socket
import sys
from dataclasses import asdict, replace
from unittest.mock import MagicMock, call

import pytest
import torch
import torch.distributed as dist

from labkit.launch import RankFailed, launch
from labtrain import Step, console, train
from labtrain.console import describe_end, describe_start, describe_step, peak_memory_bytes, progress_bar
from labtrain.world import world
from tests.labtrain.tiny import TINY


def test_the_line_before_a_run():
    text = describe_start(TINY, 4, None)
    assert text.startswith("4 ranks (tp 1, pp 1, dp 4); ")
    assert f"; {TINY.shape.num_parameters:,} parameters in float64; 64 tokens per step; " in text
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    assert text.endswith(f"; no floor is known for invented; seed 0; host {socket.gethostname()}; {versions}")
    assert describe_start(TINY, 1, 0.5).startswith("1 rank (")
    assert "; the text's floor is 0.5000; " in describe_start(TINY, 1, 0.5)


def test_the_line_after_a_run():
    done = [Step(number, 3.0 - number / 10, 1.0, 0.1, 61.0, 64.0) for number in (1, 2)]
    totals = "2 steps and 128 tokens in 02:02"
    assert describe_end(TINY, done, None) == f"Step 2: loss 2.8000; {totals}"
    assert describe_end(TINY, done, 0.5) == f"Step 2: loss 2.8000, 2.3000 above the text's floor; {totals}"


def test_a_rate_that_never_gets_high_is_said():
    said = "; the learning rate only rises (--warmup-steps 50 of --steps 5), to 0.001 instead of 0.01; "
    assert said in describe_start(replace(TINY, warmup_steps=50, steps=5), 1, None)
    assert "rises" not in describe_start(replace(TINY, warmup_steps=5, steps=5), 1, None)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_log_has_lines(monkeypatch, is_terminal):
    stdout = io.StringIO()
    stdout.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stdout", stdout)
    with world(), progress_bar(replace(TINY, log_interval=4), 0) as show:
        for number in range(1, 11):
            show(Step(number, 3.0 - number / 10, 1.0, 0.1, 2.0, 64.0))
    shown = stdout.getvalue()
    if is_terminal:
        assert "10/10" in shown and "\r" in shown and shown.count("\n") == 1
    else:
        for line, number in zip(shown.splitlines(), (1, 4, 8, 10), strict=True):
            facts = rf"loss {3.0 - number / 10:.4f}, norm 1, lr 1.00e-01, 2,000 ms, 64 tokens/s per rank"
            assert re.fullmatch(rf"step {number}/10: {facts}, peak \d+\.\d\d GiB, 00:{2 * (10 - number):02} left", line)


def test_the_memory_is_that_of_the_worst_rank(on_ranks):
    peaks = on_ranks(fill_and_ask, world_size=2)
    assert peaks[0] == peaks[1] > 300 << 20


def fill_and_ask():
    filled = torch.ones((300 << 20) // 4) if dist.get_rank() == 1 else None
    peak = peak_memory_bytes()
    del filled
    return peak


def test_mfu_is_the_share_of_the_peak_of_a_known_gpu(monkeypatch):
    monkeypatch.setattr(console, "local_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    config = replace(TINY, precision="bfloat16")
    half = 0.5 * 989e12 * 4 / config.shape.flops_per_token  # tokens/s of 4 ranks
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    step = Step(1, 3.0, 1.0, 0.1, 2.0, half)
    assert "MFU 50%" in describe_step(step, config, None)
    assert "MFU" not in describe_step(step, TINY, None)  # its float64 has a different peak


def test_metrics_on_a_full_disk_do_not_end_the_run(capsys):
    with world(), progress_bar(replace(TINY, metrics="/dev/full"), 0) as show:
        for number in range(1, 4):
            show(Step(number, 3.0, 1.0, 0.1, 2.0, 64.0))
    said = "/dev/full cannot be written (No space left on device): the run goes on without metrics\n"
    assert capsys.readouterr().out.count(said) == 1


def test_metrics_are_kept_and_continued(tmp_path, on_ranks):
    file = tmp_path / "metrics.jsonl"
    config = replace(TINY, steps=3, metrics=str(file), checkpoint_dir=str(tmp_path / "run"), log_interval=2)
    first = on_ranks(train, config, world_size=2)[0]
    second = on_ranks(train, replace(config, steps=5, resume=True), world_size=2)[0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, step in zip(lines, [*first, *second], strict=True):
        assert {name: line[name] for name in asdict(step)} == asdict(step)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line.get("resumed_after") for line in lines] == [None, None, None, 3, None]
    assert [line["peak_memory_bytes"] is not None for line in lines] == [True, True, True, True, True]
    with pytest.raises(RankFailed, match=r"metrics=\S+ cannot be written \(Is a directory\): name a file"):
        launch(train, replace(TINY, metrics=str(tmp_path)), world_size=2)


EARLIER = '{"step": 1}\n{"step": 2}\n'
LOST = '{"step": 1, "loss": 2.9}\n{"step": 2, "loss": 2.8}\n{"step": 3, "loss": 2.7}\n{"step": 4, "lo'
AGAIN = '{"step": 1, "loss": 2.9}\n{"step": 2, "loss": 2.8}\n'


@pytest.mark.parametrize(
    ("content", "resume", "steps_done", "kept"),
    [
        (EARLIER + LOST, True, 2, EARLIER + AGAIN),  # steps 3 and 4 are computed again
        (EARLIER + LOST, True, 0, EARLIER),  # the run ended before it saved anything
        (EARLIER + LOST, False, 0, EARLIER + LOST + "\n"),  # a new run: nothing is computed again
        ("of something else\n[9]\nno end", True, 0, "of something else\n[9]\nno end\n"),
        ("", True, 3, ""),
    ],
)
def test_a_step_that_is_computed_again_stands_once_in_the_metrics(tmp_path, content, resume, steps_done, kept):
    file = tmp_path / "metrics.jsonl"
    file.write_text(content)
    config = replace(TINY, metrics=str(file), checkpoint_dir=str(tmp_path), resume=resume)
    with world(), progress_bar(config, steps_done) as show:
        show(Step(steps_done + 1, 3.0, 1.0, 0.1, 2.0, 64.0))
    *before, last = file.read_text().splitlines(keepends=True)
    assert "".join(before) == kept
    assert json.loads(last)["step"] == steps_done + 1


def test_tensorboard_gets_the_numbers_of_each_step(monkeypatch, tmp_path):
    """It is not installed here. It hides the steps of a resumed run that come again."""
    tensorboard = MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    config = replace(TINY, tensorboard=str(tmp_path), checkpoint_dir=str(tmp_path))
    with world(), progress_bar(config, 0) as show:
        show(Step(1, 2.9, 1.0, 0.1, 2.0, 64.0))
    with world(), progress_bar(replace(config, resume=True), 3):
        pass
    made = tensorboard.SummaryWriter
    assert made.call_args_list == [call(str(tmp_path), purge_step=None), call(str(tmp_path), purge_step=4)]
    added = [each.args for each in made.mock_calls if each[0].endswith("add_scalar")]
    assert ("loss", 2.9, 1) in added and ("grad_norm", 1.0, 1) in added
    assert "evaluation_loss" not in {name for name, *_ in added}  # there was none
    assert [each[0] for each in made.mock_calls if each[0].endswith("__exit__")] == ["().__exit__"] * 2


def test_tensorboard_is_asked_for_but_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it raises an ImportError
    refused = pytest.raises(ValueError, match="tensorboard=here needs the package: pip install tensorboard")
    with world(), refused, progress_bar(replace(TINY, tensorboard="here"), 0):
        pass
