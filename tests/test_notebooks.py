"""What holds for every notebook before it is run: stored outputs, no leftovers of a session, working links."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = [ROOT / "Start_Here.ipynb", *sorted((ROOT / "notebooks").glob("*.ipynb"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def unstored_cells(notebook):
    """Cells that nbval would run without comparing anything, because they were stored without having been run."""
    return [cell.id for number, cell in enumerate(code_cells(notebook), 1) if cell.execution_count != number]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_outputs_are_stored_in_one_run_from_top_to_bottom(path):
    notebook = read(path)
    assert not unstored_cells(notebook), f"run `make notebooks`: {path.name} has cells stored without their outputs"
    assert any(cell.outputs for cell in code_cells(notebook)), f"{path.name} stores no output at all"


def test_a_stripped_notebook_is_caught():
    notebook = read(NOTEBOOKS[0])
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    assert len(unstored_cells(notebook)) == len(code_cells(notebook))


def test_errors_are_stored_only_where_they_are_meant(path):
    for cell in code_cells(read(path)):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), f"cell {cell.id} of {path.name}"


def test_nothing_of_a_session_is_stored(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert not [cell.id for cell in notebook.cells if set(cell.metadata) - {"tags", "jupyter"}]
    assert "widget-view" not in path.read_text()


def test_cells_are_small_enough_to_read(path):
    """A list of imports is not read line by line, so it does not count."""
    own = {cell.id: re.sub(r"(?m)^(import|from) .*\n?", "", cell.source) for cell in code_cells(read(path))}
    long = {name: source.count("\n") + 1 for name, source in own.items() if source.count("\n") > 12}
    assert not long, f"cells of {path.name} with their lines: {long}"


def test_every_section_runs_behind_the_setup_alone(path):
    """The setup is what stands before the first section with code; names are looked up as ruff does it."""
    sections = [[]]
    for cell in read(path).cells:
        if cell.cell_type == "code":
            sections[-1].append(cell.source)
        elif sections[-1] and re.search(r"^## ", cell.source, re.MULTILINE):
            sections.append([])
    setup, *others = sections
    for section in others:
        found = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "-"],
            input="\n".join([*setup, *section]), capture_output=True, text=True,
        )  # fmt: skip
        assert found.returncode == 0, f"{path.name}, a section that begins with {section[0]!r}: {found.stdout}"


def counted_minutes(notebook):
    """To read and run, and for the exercises; INSTRUCTOR.md says by which rule."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in code_cells(notebook))
    words, lines = len(re.findall(r"\w+", text)), len(code.splitlines())
    reading = (
        words / 200 + lines / 20 + text.count("**Predict") + 5 * len(re.findall(r"^#+ Explore", text, re.MULTILINE))
    )
    checks = re.findall(r"^(?:\w+\.)?(\w+)\.check\(", code, re.MULTILINE)
    short = sum(12 if name == "museum" else name.startswith("case_") for name in checks)
    return reading, 3 * short + 8 * sum(name != "museum" and not name.startswith("case") for name in checks)


@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_the_minutes_that_are_promised_were_counted(path):
    notebook = read(path)
    said = re.search(r"About (\d+) minutes to read and run, (\d+) for the exercises", notebook.cells[0].source)
    assert said, f"counted for {path.name}: {counted_minutes(notebook)}"
    for number, counted in zip(map(int, said.groups()), counted_minutes(notebook)):
        assert number % 5 == 0
        assert abs(number - counted) <= 5, f"{path.name}: {counted_minutes(notebook)}"
    [row] = [line for line in read(NOTEBOOKS[0]).cells[1].source.splitlines() if path.name in line]
    assert f"| {said[1]} + {said[2]} |" in row


@pytest.mark.parametrize("document", [*NOTEBOOKS, ROOT / "README.md"], ids=lambda path: path.stem)
def test_relative_links_lead_somewhere(document):
    if document.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in read(document).cells if cell.cell_type == "markdown")
    else:
        text = document.read_text()
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("attachment:")]
    assert not [link for link in links if not (document.parent / link).exists()]
