"""The check of a learner's file: our parts pass, stubs are not attempted, and what is wrong is told by its advice."""

import subprocess
import sys

import pytest

from course.project.check import TITLES, check, on_ranks
from course.project.mistakes import MISTAKES
from course.project.parts import ONE_FILE, steps, to_begin_with, written_in
from course.project.probes import observe
from tests.support.sweep import IS_SWEEP

FIRST = {mistake.step: index for index, mistake in reversed([*enumerate(MISTAKES)])}
SAMPLE = [*FIRST.values()][::2]


def written(folder, source):
    path = folder / "my_megatron.py"
    path.write_text(source)
    return path


def test_a_learner_begins_with_stubs_of_all_parts(tmp_path):
    source = to_begin_with()
    assert written_in(source) == []
    assert written_in(ONE_FILE.read_text()) == [*steps()]
    assert {*steps().values()} == {*TITLES}
    path = written(tmp_path, source)
    assert {check(path, step).status for step in TITLES} == {"not attempted"}


@pytest.mark.parametrize("step", TITLES if IS_SWEEP else [7])
def test_our_parts_pass(step):
    assert str(check(ONE_FILE, step)) == f"step {step}, {TITLES[step]}: passed"


@pytest.mark.parametrize(
    "index", range(len(MISTAKES)) if IS_SWEEP else SAMPLE, ids=lambda index: f"{MISTAKES[index].part}-{index}"
)
def test_each_mistake_gets_its_own_advice(index, tmp_path):
    mistake = MISTAKES[index]
    result = check(written(tmp_path, mistake.source() + "\n"), mistake.step)
    assert result.status in ("wrong", "raised", "stuck")
    text = "".join(result.text.split())  # the report breaks long lines, also after a hyphen
    assert {other.advice for other in MISTAKES if "".join(other.advice.split()) in text} == {mistake.advice}, text


def test_a_part_may_use_functions_of_its_own(tmp_path):
    source = "def twice(x):\n    return 2 * x\n\n\ndef make_buckets(params):\n    return twice(world_size)\n"
    result = check(written(tmp_path, source), 5)  # of these parts, it has the fewest known mistakes to compare with
    assert result.status == "raised"
    assert "cannot unpack" in result.text or "not iterable" in result.text


def test_a_slow_check_prints_no_notes(monkeypatch, capfd):
    monkeypatch.delenv("LABKIT_NO_NOTES", raising=False)  # `make test` sets it
    for name in ("_NOTE_SECONDS", "_NOTE_RUNNING_SECONDS"):
        monkeypatch.setattr(f"labkit.launch.watchdog.{name}", 0.0)
    source = "def rank_lists():\n    time.sleep(4)\n    raise EOFError\n"
    assert on_ranks(2, observe, source, "my_megatron.py", ["rank_lists"], 1, {}).ended.startswith("EOFError")
    assert "No news" not in "".join(capfd.readouterr())


def test_the_command_prints_a_table_and_writes_junit(tmp_path):
    path = written(tmp_path, to_begin_with())
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "course.project.check", path, "--junit-xml", junit]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "step 1, groups: not attempted"
    assert junit.read_text().count("<skipped") == 7
