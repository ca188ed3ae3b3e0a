"""What notebook 18 does with a learner's file: it runs, faults go into it, and no process is left of it."""

import ast
import math

import pytest

from course.museum.cases import GPUS, MAIN
from course.project import probes
from course.project.check import check
from course.project.faults import FAULTS
from course.project.parts import ONE_FILE, filled_in, parts_of, replaced, source_of, steps, to_begin_with, written_in
from course.project.steps import STEPS, begin, plant_faults, train
from tests.course.project.left import left
from tests.support.sweep import IS_SWEEP

TINY = {"steps": 2, "layers": 2, "global_batch": 4, "micro_batch": 1, "hidden": 16, "warmup": 1}
FORKS = """
def one_f_one_b():
    if os.fork() == 0:
        os.setsid()
        Path("{pids}", str(os.getpid())).touch()
        time.sleep(600)
        os._exit(0)
    {then}
"""
BAD = {
    "returns": "return []",
    "loops": "while True: pass",
    "prints": "while True: print('x' * 1000)",
    "exits": "raise SystemExit",
    "is gone": "os._exit(0)",
}


def with_part(name, text):
    return replaced(to_begin_with(), {name: text.strip()})


def body(source):
    """Return a file without its docstring."""
    return ast.dump(ast.Module(ast.parse(source).body[1:], []))


def test_a_file_to_begin_with_runs_with_our_parts(tmp_path, capsys):
    """With our parts it is one_file.py but for the docstring: torchrun starts either."""
    assert body(filled_in(to_begin_with())) == body(ONE_FILE.read_text())
    begin(tmp_path / "my_megatron.py")
    assert capsys.readouterr().out == "my_megatron.py: 0 of 19 parts are yours.\n"
    found = train(tmp_path / "my_megatron.py", world_size=2, pp=2, **TINY)
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()] == [["step", "0"], ["step", "1"]]
    assert len(found.losses) == 2 and found.tokens_per_second > 0


def test_what_is_there_stays(tmp_path, capsys):
    path = tmp_path / "my_megatron.py"
    path.write_text(with_part("rank_lists", source_of(ONE_FILE.read_text(), "rank_lists")))
    before = path.read_text()
    begin(path)
    assert path.read_text() == before and "1 of 19" in capsys.readouterr().out


def test_only_stubs_are_filled_in():
    mine = with_part("rank_lists", "def rank_lists():\n    return 1, 2, 3\n")
    filled = filled_in(mine)
    assert source_of(filled, "rank_lists") == "def rank_lists():\n    return 1, 2, 3"
    assert written_in(filled) == list(steps())
    ours = ONE_FILE.read_text()
    assert all(source_of(filled, name) == source_of(ours, name) for name in list(steps())[1:])


def test_a_file_that_fails_ends_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "my_megatron.py"
    path.write_text("raise ValueError('mine')\n")
    assert math.isnan(train(path, world_size=1).tokens_per_second)
    printed = capsys.readouterr().out
    assert "ValueError: mine" in printed and printed.endswith("torchrun ended with status 1.\n")


def observe_for_a_second(*args):
    """Observe on a rank, where a loop ends after a second of computing: in each of four ranks it takes five else."""
    probes.MOST_SECONDS = 1.0
    return probes.observe(*args)


@pytest.mark.parametrize("then", BAD if IS_SWEEP else ["returns", "loops", "is gone"])
def test_a_check_leaves_no_process(then, tmp_path, pids, monkeypatch):
    if not IS_SWEEP:
        monkeypatch.setattr("course.project.check.observe", observe_for_a_second)
    path = tmp_path / "my_megatron.py"
    path.write_text(with_part("one_f_one_b", FORKS.format(pids=pids, then=BAD[then])))
    result = check(path, 6)
    statuses = {"returns": "wrong", "loops": "endless", "prints": "endless"}
    assert result.status == statuses.get(then, "raised"), str(result)
    assert len(str(result)) < 10_000
    assert left(pids) == []


def test_a_failed_check_shows_what_was_printed(tmp_path):
    path = tmp_path / "my_megatron.py"
    path.write_text(with_part("one_f_one_b", "def one_f_one_b():\n    print('I am', pp_rank)\n    return [1]\n"))
    text = check(path, 6).text
    assert "Your parts printed:\n    [rank 0] I am 0\n    [rank 1] I am 1\n" in text


def test_faults_have_the_names_of_the_museum_and_change_a_part():
    names = [fault.name for wing in (MAIN, GPUS) for fault in wing.faults]
    assert [name for name in FAULTS if name not in names] == ["attention looks ahead", "gradients not clipped"]
    parts = parts_of(ONE_FILE.read_text())
    assert all(fault.part in parts and fault.source() for fault in FAULTS.values())


def test_into_a_wrong_file_no_fault_is_planted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("course.project.steps.FAULTS", {name: FAULTS[name] for name in ("attention looks ahead",)})
    path = tmp_path / "my_megatron.py"
    wrong = source_of(ONE_FILE.read_text(), "CopyToTp").replace("all_reduce_tp(grad)", "grad")
    path.write_text(with_part("CopyToTp", wrong))
    assert plant_faults(path).missed == ["attention looks ahead"]
    assert "does not pass the test itself: differ: norm of step 0, rank 0" in capsys.readouterr().out


def test_a_step_has_a_hint_and_a_solution():
    for step in STEPS:
        assert len(repr(step.hint())) > 100
        assert all(f" {name}" in repr(step.solution()) for name, number in steps().items() if number == step.number)


def test_a_check_is_not_attempted_where_there_is_no_file(tmp_path):
    verdict = STEPS[0].verdict(tmp_path / "my_megatron.py")
    assert verdict.status == "not attempted" and "begin()" in verdict.text
