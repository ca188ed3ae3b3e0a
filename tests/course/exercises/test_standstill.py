"""Twelve jobs that stand still, each on real ranks: what it shows, and that it ends by itself when it is mended."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest

from course.exercises import standstill
from course.exercises.standstill import CASES, REPAIRS, SHOWS, case_1, case_5, causes, repair_1
from course.pictures.standstill import QUESTIONS
from course.standstill.runner import Job
from tests.support.sweep import IS_SWEEP

SHOWN = {
    "case_1": (
        "stuck",
        r"rank 2 \| saving",
        r"(?s)rank 0  train_on_files.py:13.*rank 2  train_on_files.py:19",
        "rank 2;",
    ),
    "case_2": ("stuck", r"loss -0\.163", r"rank 0  \S+:19 .*\nrank 1  \S+:19 ", r"missing ranks: \{1, 2\}"),
    "case_3": ("stuck", r"rank 1 \| gradients", r"rank 0  \S+:12 .*\nrank 1  \S+:20 ", "rank 1; .*TYPE_MISMATCH"),
    "case_4": ("failed", r"rank 1 \| .*Timed out waiting 3000ms", "", ""),
    "case_5": ("ended", r"rank 1 \| weight 3\.94", "", ""),
    "case_6": ("stuck", r"rank 2 \| step 3: skipped", r"rank 0  \S+:18 .*\n.*\nrank 2  \S+:22 ", "rank 2;"),
    "case_7": ("failed", r"rank 3 \| .*Received data size doesn't match", "", ""),
    "case_8": ("stuck", r"rank 1 \| step 2: The size of tensor", r"rank 1  \S+:26 ", "rank 1;"),
    "case_9": ("stuck", r"rank 1 \| loss", r"rank 0  \S+:17 .*new_group\n.*\nrank 2  \S+:1[78] ", ""),
    "case_10": ("stuck", "", r"rank 0  \S+:12 .*: send\nrank 1  \S+:12 ", ""),
    "case_11": ("stuck", "", r"rank 0  \S+:14 .*\nrank 1  \S+:17 ", r"(?s)(missing ranks: \{\d\}.*){4}"),
    "case_12": ("stuck", "rank 1 of 4", r"rank 0  \S+:15 .*init_process_group", ""),
}
"""How each job ends, and what is in its logs, where its ranks stand, and what torchfrtrace says."""

IN_SHORT = ["case_11", "case_12"]
"""The notebook's own run has cases 1 to 4; these are looked at by every test run, and all in `make sweep`."""


def only(names):
    return [pytest.param(each, id=each.name) for each in CASES if IS_SWEEP or each.name in names]


@pytest.mark.gloo
@pytest.mark.parametrize("case", only(IN_SHORT))
def test_a_job_shows_its_symptom(case, nothing_is_left):
    job = case.run()
    status, in_logs, where, analysis = SHOWN[case.name]
    assert job.status == status, job
    assert re.search(in_logs, str(job))
    assert re.search(where, job.where())
    assert re.search(analysis, job.analysis)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "repair", [each for each in REPAIRS if IS_SWEEP or each.name == "repair_9"], ids=lambda each: each.name
)
def test_a_mended_job_ends_by_itself(repair, nothing_is_left):
    verdict = repair.verdict(repair.mended)
    assert verdict.status == "passed", verdict.text


@pytest.mark.gloo
@pytest.mark.skipif(not IS_SWEEP, reason="takes a dozen seconds")
def test_a_slow_job_is_not_killed():
    job = case_5.run()
    assert job.status == "ended"
    assert len(job.looks) >= 2
    assert job.looks[0].num_calls != job.looks[1].num_calls
    assert ":15 in read" in job.where() or ":21 in <module>" in job.where()


def lines_to_take_home():
    """What notebook 17 tells its reader to put beside a script: answers.py, and the program that reads the dumps."""
    notebook = nbformat.read(Path(__file__).parents[3] / "notebooks/further/17_standstill.ipynb", as_version=4)
    [cell] = [cell for cell in notebook.cells if cell.id == "by-hand"]
    return re.findall(r"^```python\n(.*?)^```$", cell.source, re.MULTILINE | re.DOTALL)


@pytest.mark.gloo
def test_a_script_of_ones_own_answers_with_the_lines_of_the_page(tmp_path):
    answers, reader = lines_to_take_home()
    (tmp_path / "answers.py").write_text(answers)
    (tmp_path / "reader.py").write_text(reader)
    (tmp_path / "script.py").write_text(f"import answers\n{case_1.source}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "script.py"]
    log = tmp_path / "log"
    with log.open("w") as said:
        job = subprocess.Popen(torchrun, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True)
    try:
        wait_until(lambda: "saving" in log.read_text())
        time.sleep(1)  # from what rank 2 prints to its last call
        (tmp_path / "dump").touch()
        wait_until(lambda: all((tmp_path / f"rank_{rank}").exists() for rank in range(3)))
        for pid in ranks_of(job):
            os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: log.read_text().count("Current thread") == 3)
    finally:
        for pid in [*ranks_of(job), job.pid]:
            os.kill(pid, signal.SIGKILL)
        job.wait()
    read = subprocess.run([sys.executable, "reader.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    for rank, call in enumerate(("all_reduce on line 14", "all_reduce on line 14", "all_gather on line 20")):
        assert f"rank_{rank} has noted 3 calls\n    the last is 3 gloo:{call}\n" in read.stdout
    compare = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    options = [tmp_path, "--prefix", "rank_"]
    compared = subprocess.run([sys.executable, "-c", compare, *options], capture_output=True, text=True, check=True)
    # whom it blames depends on which file it reads first
    assert "COLLECTIVE_TYPE_MISMATCH" in compared.stdout + compared.stderr


def wait_until(is_so):
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def ranks_of(job):
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@pytest.fixture
def nothing_is_left(tmp_path, monkeypatch):
    """No file and no process of a job stays; those of a notebook that runs beside this test do not count."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not [*tmp_path.iterdir()]
    assert not processes_with(tmp_path)


def processes_with(folder):
    """Return the processes of torchrun and of ranks whose job has its files in a folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text():
                found.add(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_right_answers_pass_and_typical_wrong_ones_get_advice(case):
    for rank in case.ranks:
        for line in case.lines:
            assert case.verdict(rank, case.cause, line).status == "passed"
    for (part, answer), advice in case.typical.items():
        answers = {"rank": case.ranks[0], "cause": case.cause, "line": case.lines[0], part: answer}
        verdict = case.verdict(**answers)
        assert verdict.status == "wrong", (part, answer)
        assert "".join(advice.split()) in "".join(verdict.text.split())


def test_every_cause_is_that_of_one_case():
    assert sorted(case.cause for case in CASES) == sorted(SHOWS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scripts_are_plain(case):
    lines = [line for line in case.source.splitlines() if line.strip()]
    assert 10 <= len(lines) <= 30
    assert not re.search("labkit|labtrain|course", case.source)
    assert all(case.source.splitlines()[line - 1].strip() for line in case.lines)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_name_of_a_script_does_not_give_the_cause_away(case):
    assert not (set(case.script.split("_")) & set(case.cause.lower().split())) - {"on", "and", "a"}


def test_every_case_is_at_one_place_of_the_decision_tree():
    found = [number for *_, cases in QUESTIONS for number in cases]
    assert sorted(found) == list(range(1, len(CASES) + 1))


def test_a_blank_answer_is_not_attempted():
    assert case_1.verdict().status == "not attempted"
    assert case_1.verdict(2, ..., 11).status == "not attempted"
    assert repair_1.verdict().status == repair_1.verdict({}).status == "not attempted"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cause_may_be_named_by_its_number_on_the_list(case, capsys):
    causes()
    [number] = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(case.cause)]
    verdicts = [case.verdict(case.ranks[0], each, case.lines[0]).status for each in range(1, len(SHOWS) + 1)]
    assert [each for each, status in enumerate(verdicts, start=1) if status == "passed"] == [int(number)]
    assert "no cause is called '13'" in case.verdict(case.ranks[0], 13, case.lines[0]).text


def test_a_cause_that_is_not_on_the_list_is_said_so():
    assert "no cause is called 'gremlins'" in case_1.verdict(2, "gremlins", 11).text


def test_a_wrong_answer_says_what_of_it_is_right():
    text = case_1.verdict(2, "shapes that differ", 13).text
    assert "right: rank." in text
    assert "With this one you would see" in text


def test_a_wrong_cause_says_what_one_would_see_of_it():
    for cause in SHOWS:
        if cause != case_1.cause and ("cause", cause) not in case_1.typical:
            assert SHOWS[cause][:30] in case_1.verdict(2, cause, 11).text.replace("\n  ", " ")


def test_changes_that_cannot_run_are_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(standstill, "run", lambda *_: pytest.fail("it ran"))
    assert "with numbers from 1 to" in repair_1.verdict({99: "pass"}).text
    assert "with numbers from 1 to" in repair_1.verdict(["pass"]).text
    assert "line 11 is not Python" in repair_1.verdict({11: "for"}).text


@pytest.mark.parametrize(
    ("job", "status", "says"),
    [
        (Job("stuck", 1.0, {0: "", 1: ""}, "", (), ""), "stuck", "still stands still"),
        (Job("failed", 1.0, {0: "a\nOops: no", 1: ""}, "", (), ""), "raised", "Oops: no"),
        (Job("ended", 1.0, {0: "bye", 1: "", 2: ""}, "", (), ""), "wrong", "no longer prints"),
    ],
)
def test_a_repair_says_what_became_of_the_job(monkeypatch, job, status, says):
    monkeypatch.setattr(standstill, "run", lambda *_: job)
    verdict = repair_1.verdict({11: "for number, batch in []:"})
    assert verdict.status == status
    assert says in verdict.text


@pytest.mark.parametrize(("changes", "says"), [({15: "        pass"}, "Line 15 stays"), ({1: ""}, "still wait")])
def test_who_is_slow_is_not_mended_by_less_work_or_by_nothing(changes, says):
    verdict = standstill.repair_5.verdict(changes)
    assert verdict.status == "wrong" and says in verdict.text


@pytest.mark.parametrize(("rank", "line"), [({2}, 11), ([2], [11]), (2, {11})])
def test_one_rank_or_line_may_be_in_a_list(rank, line):
    assert (
        standstill.case_1.verdict(rank, 1 + list(standstill.SHOWS).index(standstill.case_1.cause), line).status
        == "passed"
    )
    assert standstill.case_1.verdict(rank, standstill.case_1.cause, {11, 12}).status == "wrong"


def test_solutions_show_the_lines_that_change():
    assert "+    if step % 2 == 0:" in repr(standstill.repair_2.solution())
    assert "line 11" in repr(case_1.solution())
