"""What is solved: the table marks it and counts every exercise, and it is written as JSON and as JUnit."""

import json
import re
import sys
from xml.etree import ElementTree

import pytest

from course import progress
from course.exercises.collectives import ring_all_reduce
from course.exercises.group_layout import rank_to_coordinates
from course.exercises.record import Prediction, note_check, note_prediction, note_result, note_solved
from course.exercises.row_parallel import row_forward
from course.working_copy import ROOT, notebooks


def test_the_table_marks_what_is_solved():
    note_solved(row_forward.name)
    assert "row_forward ✓" in repr(progress.table())
    assert "row_backward" in repr(progress.table()) and "row_backward ✓" not in repr(progress.table())
    markdown = progress.table()._repr_markdown_()
    assert re.search(r"\| 04 \| 1 of \d+ \|", markdown)
    assert re.search(
        r"\| 08 (.*\n)\| the lab \| 1 of \d+ (.*\n)\| 09 (.*\n)+\| further \| 0 of \d+ (.*\n)\| all \| 1 of", markdown
    )


def test_the_lab_is_what_does_not_lie_further():
    for path in notebooks(ROOT)[1:]:
        assert (path.parent.name == "further") == (path.stem[:2] > progress.LAST_OF_THE_LAB), path


def test_the_table_counts_predictions_and_how_many_were_right_at_first():
    keys = [key for key in progress.questions() if key.startswith("01.")]
    note_result(keys[4])
    for key, right in zip(
        keys, [True, False, True, None, None]
    ):  # the last but one waits for its cell, the last is late
        note_prediction(key, Prediction(kind="?", first=8, time="", right=right, mistake=None, last=8, tries=1))
    markdown = progress.table()._repr_markdown_()
    assert f"| 4 of {len(keys)}, 2 right at first |" in markdown
    assert re.search(r"\| all \| 0 of \d+ \| 4 of \d+, 2 right at first \|", markdown)
    assert "4 of" in repr(progress.table())


@pytest.mark.parametrize("path", notebooks(ROOT)[1:], ids=lambda path: path.stem)
def test_as_many_exercises_count_for_a_notebook_as_it_checks(path):
    sources = ["".join(cell["source"]) for cell in json.loads((ROOT / path).read_text())["cells"]]
    checked = set(re.findall(r"^\s*(?:\w+\.)?(\w+)\.check\(", "\n".join(sources), re.MULTILINE))
    checked -= {"schedules", "case"}  # no exercises: a module, and the cases that the museum counts as one
    assert len(checked) == len(progress.exercises().get(path.stem[:2], []))


@pytest.fixture
def half_a_day():
    note_solved(rank_to_coordinates.name)
    note_check(rank_to_coordinates.name, "passed", None)
    note_check(ring_all_reduce.name, "wrong", "You <added> twice.")
    for key, right in {"01.a": True, "01.b": False, "01.c": None}.items():
        answer = Prediction(
            kind="number", first=8, time="2026-11-22T16:20:03+01:00", right=right, mistake=None, last=8, tries=1
        )
        note_prediction(key, answer)
    note_result("01.b")


def test_junit_says_what_is_solved_wrong_and_left(half_a_day, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["course.progress", str(tmp_path / "me.xml")])
    progress.main()
    assert capsys.readouterr().out == f"{tmp_path / 'me.xml'}\n"
    root = ElementTree.parse(tmp_path / "me.xml").getroot()
    cases = {case.get("name"): [(child.tag, child.get("message")) for child in case] for case in root.iter("testcase")}
    assert cases[rank_to_coordinates.name] == cases["01.a"] == []
    assert cases[ring_all_reduce.name] == [("failure", "You <added> twice.")]
    assert cases[row_forward.name] == cases["01.c"] == [("skipped", None)]
    assert cases["01.b"] == [("failure", "wrong, by no typical mistake")]
    assert len(cases) == len(progress.all_exercises()) + 3
    first = root.find("testsuite[@name='01']")
    num_exercises = len(progress.exercises()["01"])
    counts = [int(first.get(name)) for name in ("tests", "failures", "skipped")]
    assert counts == [num_exercises + 3, 1, num_exercises - 1 + 1]


def test_a_button_saves_json_into_a_folder_under_the_users_name(half_a_day, tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "anna")
    button, said = progress.save_button(tmp_path).children
    button.click()
    assert said.value == f"Saved in {tmp_path / 'anna.json'}"
    assert [path.name for path in tmp_path.iterdir()] == ["anna.json"]
    content = json.loads((tmp_path / "anna.json").read_text())
    assert list(content["solved"]) == [rank_to_coordinates.name]
    assert content["checks"][ring_all_reduce.name]["mistake"] == "You <added> twice."
    assert set(content["predictions"]) == {"01.a", "01.b", "01.c"} and set(content["results"]) == {"01.b"}


def test_a_button_says_what_could_not_be_saved(tmp_path):
    button, said = progress.save_button(tmp_path / "no folder" / "me.json").children
    button.click()
    assert said.value.startswith("Not saved: ") and "no folder" in said.value
