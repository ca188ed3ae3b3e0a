"""What ranks print, and the progress that they report, as the cell shows it."""

import io
import os
import sys
import threading
import time

import torch.distributed as dist
from jupyter_client.manager import run_kernel

from labkit.launch import launch, output, progress
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
    shown = Output(num_ranks=1, live=False)
    for start in range(0, 5000, 100):
        shown.feed(0, "stdout", b"".join(b"%d\n" % i for i in range(start, start + 100)))
    shown.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[899:902] == ["[rank 0] 899", lines[900], "[rank 0] 4900"]
    assert "4,000 lines left out" in lines[900]
    assert lines[-1] == "[rank 0] 4999"


def test_letters_that_the_terminal_lacks_are_replaced(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    shown = Output(num_ranks=1, live=False)
    shown.feed(0, "stdout", "caf\u00e9 \u2192\n".encode())
    shown.finish()
    assert terminal.buffer.getvalue() == b"[rank 0] caf? ?\n"


def test_progress_moves_a_bar(capsys):
    def work():
        for i in range(5):
            progress(i + 1, 5, "training")
            time.sleep(0.06)

    launch(work, world_size=2)
    assert "training: 100%" in capsys.readouterr().err


KINDS = ("display_data", "update_display_data", "stream")
PASSING = """
from labkit.launch import output
output._SOON_SECONDS = output._VIEW_SECONDS = 0
shown = output.Output(2, live=False)
shown.progress(0, 1, 2, "training")
shown.refresh()
shown.note("No news for 5 s")
shown.refresh()
for rank in (1, 0):
    shown.feed(rank, "stdout", b"first\\nsecond")
shown.feed(0, "stderr", b"\\r 0%|   |\\r100%|###|")
shown.refresh()
shown.finish()
"""


def test_what_passes_in_a_cell_is_an_update_and_goes():
    """nbval compares streams and what is displayed; what is stored is the last update of each place."""
    messages = []
    with run_kernel() as client:
        client.execute_interactive(PASSING, timeout=60, output_hook=messages.append)
    contents = {kind: [message["content"] for message in messages if message["msg_type"] == kind] for kind in KINDS}
    assert [content["data"] for content in contents["display_data"]] == [{}]
    bar, note, lines, end = [content["data"].get("text/plain") for content in contents["update_display_data"]]
    assert bar.startswith("training:  50%") and note == f"{bar}\nNo news for 5 s" and end is None
    printed = ["[rank 0] first", "[rank 0] second", "[rank 0] 100%|###|", "[rank 1] first", "[rank 1] second"]
    assert lines == "\n".join([*printed, note])
    assert "".join(message["text"] for message in contents["stream"] if message["name"] == "stdout").split("\n") == [
        *(line for line in printed if "#" not in line),
        "",
    ]


def test_a_short_call_shows_only_what_stays(monkeypatch):
    shown, written = output.Output(1, live=False), []
    shown._is_notebook, shown._show_in_place = True, written.append
    shown.feed(0, "stdout", b"first\n")
    shown.refresh()
    shown.finish()
    assert written == [""]


def test_the_last_state_of_a_bar_stays(capsys):
    shown = output.Output(2, live=False)
    for part in (b"\r  0%|  |", b"\r 50%|# |", b"\r100%|##|", b"\nafter\r\n"):
        shown.feed(0, "stderr", part)
    shown.feed(1, "stderr", b"\r 50%|# |\r        \r")  # leave=False
    shown.finish()
    assert capsys.readouterr().err == "[rank 0] 100%|##|\n[rank 0] after\n"


def test_without_a_notebook_a_note_goes_to_stderr(capsys):
    shown = Output(num_ranks=1, live=False)
    shown.note("No news for 5 s")
    shown.finish()
    assert capsys.readouterr().err == "No news for 5 s\n"


def test_a_warning_of_what_is_wanted_is_left_out(capsys):
    """NCCL's group says on each rank that two ranks get a communicator of their own: labkit has channels for that."""
    cell = Output(1, live=False)
    where = (
        b"[rank0]:[W701 09:03:30.190545785 ProcessGroupNCCL.cpp:4025] Warning: [PG ID 0 PG GUID 0(default_pg) Rank 0] "
    )
    warning = b"An unbatched P2P op (send/recv) was called on this ProcessGroup with size 3."
    cell.feed(0, "stderr", b"before\n" + where + warning[:20])
    cell.feed(0, "stderr", warning[20:] + b"\nafter\n")
    cell.finish()
    assert capsys.readouterr().err == "[rank 0] before\n[rank 0] after\n"
