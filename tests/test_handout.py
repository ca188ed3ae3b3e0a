"""What participants get: no outputs, no answers, nothing missing that a notebook needs, and solutions that are kept."""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from course.publish.handout import COPIED, clear, make_handout
from tests.test_notebooks import LINK, NOTEBOOKS, ROOT

TRY = """
import os
from course.exercises.group_layout import rank_to_coordinates as exercise
from course.exercises.flawed_layers import case_a
from course.museum import museum
from course.project.steps import step_1
import course, labkit, labtrain
print(*(package.__file__ for package in (course, labkit, labtrain)))
exercise.check(exercise.solution_function)
for each in (exercise, case_a, museum.case(1), step_1):
    print(repr(each.solution()))
print("chunk(dist.get_world_size()" in repr(case_a.code()))
os.environ["LABKIT_SOLUTIONS"] = "open"
print(exercise.solution())
"""


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "handout"
    (folder.parent / "answers.md").write_text(make_handout(folder))
    return folder


def test_it_has_every_notebook_without_outputs_and_answers(handout):
    names = [path.relative_to(ROOT) for path in NOTEBOOKS]
    assert {path.relative_to(handout) for path in handout.rglob("*.ipynb")} == set(names)
    for name in names:
        before, after = (nbformat.read(root / name, as_version=4) for root in (ROOT, handout))
        code, kept = ([cell.source for cell in each.cells if cell.cell_type == "code"] for each in (before, after))
        assert code == kept
        assert all(not cell.outputs and not cell.execution_count for cell in after.cells if cell.cell_type == "code")
        text = "\n".join(cell.source for cell in after.cells)
        assert not re.findall("<summary>(?!After you have run it)", text) and "should have found" not in text
        assert "After you have run it" in text
        assert not [
            link for link in LINK.findall(text) if "://" not in link and not (handout / name.parent / link).exists()
        ]


def test_no_page_links_to_what_is_left_out(handout):
    for page in handout.rglob("*.md"):
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_the_answers_are_kept_apart(handout):
    answers = (handout.parent / "answers.md").read_text()
    sources = [cell.source for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells]
    assert answers.count("\n\n## ") + 1 == sum(source.count("<details>") for source in sources)
    assert "## 01_group_layout: Explore\n\n1. The next that fits, 4" in answers
    assert "\n## further/13_context_parallel: " in answers


def test_what_is_for_instructors_is_left_out(handout):
    assert {path.name for path in handout.iterdir()} == set(COPIED)
    assert not (handout / "course" / "quiz").exists() and not (handout / "course" / "servers.md").exists()
    assert [
        path for path in handout.rglob("*.py") if re.search("exercises|museum|predictions|project", str(path))
    ] == []


def test_checks_run_and_solutions_are_kept_until_opened(handout):
    environment = {name: value for name, value in os.environ.items() if name != "LABKIT_SOLUTIONS"}
    run = subprocess.run([sys.executable, "-c", TRY], cwd=handout, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    where, verdict, *kept, has_code, opened = run.stdout.replace("\n\n", "\n").split("\n", 7)
    packages = ("course", "labkit", "labtrain")
    assert where.split() == [str(handout / package / "__init__.py") for package in packages]
    assert "correct" in verdict
    assert len(kept) == 4 and all(each.startswith("Solution: Your instructor has the solutions.") for each in kept)
    assert has_code == "True" and opened.startswith("def my_coordinates(")


def test_the_project_is_checked_and_our_file_is_not_there(handout):
    (handout / "my_megatron.py").write_text((ROOT / "course/project/one_file.py").read_text())
    command = [sys.executable, "-m", "course.project.check", "my_megatron.py", "--step", "2"]
    run = subprocess.run(command, cwd=handout, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "step 2, f and g: passed", run.stdout + run.stderr
    (handout / "my_megatron.py").unlink()
    assert not list(handout.rglob("one_file.py"))


def test_a_link_to_what_is_left_out_becomes_words(tmp_path):
    cell = nbformat.v4.new_markdown_cell("See [there](../tests/x.py), [here](here.md) and ![a](b.png).")
    (tmp_path / "here.md").touch()
    clear(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "one.ipynb")
    assert cell.source == "See there, [here](here.md) and ![a](b.png)."
