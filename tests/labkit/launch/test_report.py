"""What the reports say: who failed or waits, and on which line of whose code."""

import signal
from dataclasses import replace

from labkit import communication
from labkit.launch import report
from labkit.launch.report import Death, add_lab_package, deadlock_report, failure_report, slow_note
from labkit.launch.watchdog import Silence
from tests.labkit.launch.looks import RUNNING, in_collective, in_point_to_point, world


def test_report_says_who_waits_and_who_never_came():
    report = deadlock_report(world(in_collective(group="0"), in_collective(group="1"))).splitlines()
    assert report[1:3] == [
        "  all_reduce number 1 (float [4]) of the world [0, 1]: rank 0 waits; rank 1 never came",
        "  all_reduce number 1 (float [4]) of tp [0, 1]: rank 1 waits; rank 0 never came",
    ]
    assert report[3].startswith(
        "  rank 0: waits in all_reduce number 1 (float [4]) of the world [0, 1], at train.py, line 3"
    )


def test_report_names_the_learners_line_and_where_in_labkit():
    deeper = (("train.py", 3, "work"), (communication.__file__, 5, "wait"), ("/lib/python3.11/threading.py", 1, "wait"))
    report = deadlock_report(world(replace(in_collective(), stack=deeper), None, returned=[1]))
    assert "at train.py, line 3, in work, in labkit/communication.py, line 5, in wait" in report


def test_report_tells_a_group_of_all_ranks_from_the_world():
    look = world(in_collective(), in_collective(group="2"))
    groups = {**RUNNING.groups, "2": ("undefined", (0, 1))}
    report = deadlock_report(replace(look, snapshots={r: replace(s, groups=groups) for r, s in look.snapshots.items()}))
    assert "all_reduce number 1 (float [4]) of the world [0, 1]: rank 0 waits" in report
    assert "all_reduce number 1 (float [4]) of a group [0, 1]: rank 1 waits" in report


def test_report_of_point_to_point():
    report = deadlock_report(world(in_point_to_point("send", 1, tag=1), in_point_to_point("recv", 0, tag=2)))
    assert "rank 0: waits in send to rank 1 (float32 [4], tag 1)" in report
    assert "rank 1: waits in recv from rank 0 (float32 [4], tag 2)" in report


def test_note_says_where_the_slow_rank_is():
    note = slow_note(world(RUNNING, in_collective()), 5.2)
    assert "No news for 5 s" in note
    assert "rank 0: runs at train.py, line 3, in work" in note


def test_what_nccl_says_when_a_rank_never_comes_is_said_in_words():
    words = (
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 60004 ms",
        *(f"frame #{number}: <unknown function> + 0x1 (0x7f in libc.so.6)" for number in range(30)),
    )
    report = failure_report({0: Death(signal.SIGABRT, words, 1.0)}, Silence(1, {}, frozenset()))[1]
    assert "SIGABRT: its GPU waited timeout_seconds in an operation, named below" in report
    assert "OpType=ALLREDUCE" in report and "frame #" not in report and "strict" not in report


def test_report_tells_the_code_of_a_package_above_labkit_from_the_learners(monkeypatch):
    monkeypatch.setattr(report, "_lab_folders", report._lab_folders)
    in_course = (("train.py", 3, "work"), ("/above/course/measure/flow.py", 5, "trace"))
    look = world(replace(in_collective(), stack=in_course), None, returned=[1])
    assert ", at /above/course/measure/flow.py, line 5, in trace" in deadlock_report(look)
    add_lab_package("/above/course/__init__.py")
    assert ", at train.py, line 3, in work, in /above/course/measure/flow.py, line 5" in deadlock_report(look)
