"""What ranks print, and the progress that they report, as the cell shows it."""

import io
import os
import sys
import threading
import time

import torch.distributed as dist

from labkit.launch import launch, progress
from labkit.launch.output import Output


def test_output_is_grouped_by_rank_in_rank_order(capfd):
    def talk():
        for i in range(3):
            dist.barrier()
            print("line", i)
        print("to stderr", file=sys.stderr)
        os.write(1, b"from C, without newline")

    launch(talk, world_size=2)
    out, err = capfd.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("[rank")]
    expected = ["line 0", "line 1", "line 2", "from C, without newline"]
    assert lines == [f"[rank {rank}] {line}" for rank in (0, 1) for line in expected]
    assert err.splitlines() == ["[rank 0] to stderr", "[rank 1] to stderr"]


def test_live_output_comes_while_ranks_run(capsys, tmp_path):
    seen, shown = [], tmp_path / "shown"

    def talk():
        print("before")
        while not shown.exists():
            time.sleep(0.01)
        print("after")

    def watch():
        while "[rank 1] before" not in "".join(seen):
            time.sleep(0.01)
            seen.append(capsys.readouterr().out)
        shown.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    launch(talk, world_size=2, live=True)
    watcher.join()
    assert "after" not in "".join(seen)
    assert "[rank 1] after" in capsys.readouterr().out


def test_the_cut_of_many_lines_is_stated(capsys):
    output = Output(num_ranks=1, live=False)
    for start in range(0, 5000, 100):
        output.feed(0, "stdout", b"".join(b"%d\n" % i for i in range(start, start + 100)))
    output.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[899:902] == ["[rank 0] 899", lines[900], "[rank 0] 4900"]
    assert "4,000 lines left out" in lines[900]
    assert lines[-1] == "[rank 0] 4999"


def test_letters_that_the_terminal_lacks_are_replaced(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    output = Output(num_ranks=1, live=False)
    output.feed(0, "stdout", "caf\u00e9 \u2192\n".encode())
    output.finish()
    assert terminal.buffer.getvalue() == b"[rank 0] caf? ?\n"


def test_progress_moves_a_bar(capsys):
    def work():
        for i in range(5):
            progress(i + 1, 5, "training")
            time.sleep(0.06)

    launch(work, world_size=2)
    assert "training: 100%" in capsys.readouterr().err
