"""What the reports say: who failed or waits, and on which line of whose code."""

import signal
from dataclasses import replace

from labkit import collectives, lab_folders
from labkit.launch import frames
from labkit.launch.rank import Failure
from labkit.launch.report import deadlock_report, death, failure_report, locations_report
from labkit.launch.watchdog import Look
from tests.labkit.launch.looks import LOCKED, RUNNING, at, in_collective, with_thread, world


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
    deeper = (("train.py", 3, "work"), (collectives.__file__, 5, "wait"), ("/lib/python3.11/threading.py", 1, "wait"))
    report = deadlock_report(world(at(in_collective(), deeper), LOCKED, returned=[1]))
    assert "at train.py, line 3, in work, in labkit/collectives.py, line 5, in wait" in report


def test_note_says_where_the_slow_rank_is():
    note = locations_report("No news for 5 s", world(RUNNING, in_collective()))
    assert "No news for 5 s" in note
    assert "rank 0: runs at train.py, line 3, in work" in note


def test_what_nccl_says_when_a_rank_never_comes_is_said_in_words():
    words = (
        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 60004 ms",
        *(f"frame #{number}: <unknown function> + 0x1 (0x7f in libc.so.6)" for number in range(30)),
    )
    report = failure_report({0: death(signal.SIGABRT, words)}, Look(1, {}, frozenset()))[1]
    assert "SIGABRT: its GPU waited timeout_seconds in an operation, named below" in report
    assert "OpType=ALLREDUCE" in report and "frame #" not in report and "strict" not in report
    assert "GPU" not in death(signal.SIGABRT, ["last words"]).text


def test_report_tells_the_code_of_a_package_above_labkit_from_the_learners(monkeypatch):
    monkeypatch.setattr(frames, "lab_folders", [*lab_folders])
    in_course = (("train.py", 3, "work"), ("/above/course/measure/flow.py", 5, "trace"))
    look = world(at(in_collective(), in_course), LOCKED, returned=[1])
    assert ", at /above/course/measure/flow.py, line 5, in trace" in deadlock_report(look)
    frames.lab_folders.append("/above/course")
    assert ", at train.py, line 3, in work, in /above/course/measure/flow.py, line 5" in deadlock_report(look)


def test_report_says_who_has_left_a_collective_that_others_are_in():
    past = replace(LOCKED, started={"0": 1})  # and it has returned
    report = deadlock_report(world(past, in_collective(), returned=[0]))
    assert "all_reduce number 1 (float [4]) of the world [0, 1]: rank 1 waits; rank 0 has left it" in report
    assert "do its tensors differ in size? strict=True names both" in report


def test_report_shows_the_learners_threads():
    report = deadlock_report(world(with_thread(LOCKED, "waits"), in_collective()))
    assert "rank 0: waits for a thread of its own, at train.py, line 3" in report
    assert "and a thread of it waits in communication, at train.py, line 3" in report


def error(text: str, *, file: str = "/site-packages/torch/distributed/c10d.py", seconds: float = 1.0) -> Failure:
    frames = (("train.py", 3, "work"), (file, 5, "wait"))
    return Failure("RuntimeError", text, frames, "", seconds, None)


def test_after_a_time_out_the_headline_is_the_rank_that_did_not_come():
    blamed, text = failure_report({0: error("Timed out waiting 60000ms for recv")}, world(None, RUNNING))
    assert blamed == 1
    assert text.startswith("rank 1 of 2 did not come where others waited: it runs at train.py, line 3")
    assert "rank 0: gave up after timeout_seconds, at train.py, line 3" in text


def test_a_rank_that_gives_no_answer_is_not_named_where_another_did_not_come():
    rank, text = failure_report({0: error("Timed out waiting 60000ms for recv")}, world(None, None, RUNNING))
    assert rank == 2 and "rank 1: gives no answer" in text


def test_of_ranks_that_failed_alike_the_lowest_is_named():
    """Which came first is chance; a different error that came before them is named as ever."""
    failures = {1: error("a typo", seconds=1.0), 0: error("a typo", seconds=2.0)}
    blamed, text = failure_report(failures, world(None, None))
    assert blamed == 0 and "rank 1: the same" in text
    assert failure_report(failures | {1: error("a fault", seconds=1.0)}, world(None, None))[0] == 1


def test_a_refused_connection_of_the_learners_own_is_no_consequence():
    failures = {
        0: error("Connection closed by peer"),
        1: error("Connection refused", file="/lib/urllib.py", seconds=2.0),
    }
    blamed, text = failure_report(failures, world(None, None))
    assert blamed == 1 and "rank 0: lost its connection, a consequence" in text


def test_a_note_names_each_location_once():
    note = locations_report("No news", world(RUNNING, in_collective(), in_collective())).splitlines()
    assert len(note) == 3 and note[2].startswith("  rank 1, 2: waits in all_reduce number 1")
