"""What is solved is remembered, shown and forgotten; and every exercise of every notebook is counted."""

import json
import re
from pathlib import Path

import pytest

from course import progress
from course.exercises import Exercise
from course.exercises.row_parallel import row_forward

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_a_solved_exercise_is_remembered_and_forgotten(capsys):
    double = Exercise("double", lambda x: 2 * x, [(0,), (3,)])
    double.check(lambda x: 3 * x)
    double.check(lambda x: ...)
    assert progress.solved() == {}
    double.check(lambda x: x + x)
    assert list(progress.solved()) == ["double"]
    progress.clear()
    assert progress.solved() == {}
    progress.clear()  # forgetting nothing is no error
    assert capsys.readouterr().out.count("Forgotten") == 2


def test_the_table_marks_what_is_solved():
    progress.note_solved(row_forward.name)
    assert "row_forward ✓" in repr(progress.table())
    assert "row_backward" in repr(progress.table()) and "row_backward ✓" not in repr(progress.table())
    markdown = progress.table()._repr_markdown_()
    assert re.search(r"\| 04 \| 1 of \d+ \|", markdown)


def test_a_file_that_is_damaged_or_cannot_be_written_stops_nothing(monkeypatch, tmp_path):
    progress.file().write_text("{half")
    assert progress.solved() == {}
    progress.note_solved("double")
    assert list(json.loads(progress.file().read_text())) == ["double"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "file" / "progress.json"))  # its folder is a file
    progress.note_solved("double")
    assert progress.solved() == {}


def test_names_are_unique():
    names = [name for names in progress.exercises().values() for name in names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_as_many_exercises_count_for_a_notebook_as_it_checks(path):
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    checked = set(re.findall(r"^\s*(?:\w+\.)?(\w+)\.check\(", "\n".join(sources), re.MULTILINE))
    checked -= {"schedules", "case"}  # no exercises: a module, and the cases that the museum counts as one
    assert len(checked) == len(progress.exercises().get(path.stem[:2], []))
