"""The table of what is solved: it marks what is, and counts every exercise of every notebook."""

import json
import re
from pathlib import Path

import pytest

from course import progress
from course.exercises.record import note_solved
from course.exercises.row_parallel import row_forward

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_the_table_marks_what_is_solved():
    note_solved(row_forward.name)
    assert "row_forward ✓" in repr(progress.table())
    assert "row_backward" in repr(progress.table()) and "row_backward ✓" not in repr(progress.table())
    markdown = progress.table()._repr_markdown_()
    assert re.search(r"\| 04 \| 1 of \d+ \|", markdown)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_as_many_exercises_count_for_a_notebook_as_it_checks(path):
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    checked = set(re.findall(r"^\s*(?:\w+\.)?(\w+)\.check\(", "\n".join(sources), re.MULTILINE))
    checked -= {"schedules", "case"}  # no exercises: a module, and the cases that the museum counts as one
    assert len(checked) == len(progress.exercises().get(path.stem[:2], []))
