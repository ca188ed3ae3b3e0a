"""What ranks print, and the progress that they report, as the cell shows it."""

import io
import os
import sys
import threading
import time

import torch.distributed as dist
from jupyter_client.manager import run_kernel

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


PASSING = """
from labkit.launch.output import Output, ProgressBar
output, bar = Output(1, live=False), ProgressBar()
bar.update(0, 1, 2, "training")
output.note("No news for 5 s")
output.note("No news for 35 s")
bar.close()
output.finish()
"""


def test_what_passes_in_a_cell_is_an_update_and_goes():
    """nbval compares streams and what is displayed; what is stored is the last update of each place."""
    messages = []
    with run_kernel() as client:
        client.execute_interactive(PASSING, timeout=60, output_hook=messages.append)
    shown = [message["content"] for message in messages if message["msg_type"] not in ("status", "execute_input")]
    displayed = [message["content"]["data"] for message in messages if message["msg_type"] == "display_data"]
    texts = [content["data"].get("text/plain", "") for content in shown]
    assert displayed == [{}, {}]  # the bar and the notes
    assert "training:  50%" in "".join(texts) and texts.index("No news for 5 s") < texts.index("No news for 35 s")
    stored = {content["transient"]["display_id"]: content["data"] for content in shown}
    assert list(stored.values()) == [{}, {}]


def test_without_a_notebook_a_note_goes_to_stderr(capsys):
    output = Output(num_ranks=1, live=False)
    output.note("No news for 5 s")
    output.finish()
    assert capsys.readouterr().err == "No news for 5 s\n"
