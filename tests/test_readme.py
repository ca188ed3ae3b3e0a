"""README's numbers are counted and its example runs; the map leads somewhere; each option of a run has a reader.

``python -m tests.test_readme`` writes the numbers of README anew.
"""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import nbformat
import pytest

from labtrain import TrainConfig
from labtrain.spelling import options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## The map")[2].partition("\n## ")[0]
PACKAGES = ("labkit", "labtrain", "course")
DOCUMENTS = ["README.md", "labtrain/README.md", "CONTRIBUTING.md", "INSTRUCTOR.md", "course/servers.md"]
FILE_OF_CODE = re.compile(r"\]\(((?:labkit|labtrain|course)/\S+\.py)\) (\d+)")
LINES_PER_MINUTE = 10


def with_counted_numbers(text: str) -> str:
    """README with the lines of each file, the length of both readings, and the minutes and hours of the notebooks."""
    text = FILE_OF_CODE.sub(lambda found: f"]({found[1]}) {num_lines(found[1])}", text)
    short = text[text.index("**The short reading**") : text.index("**The full reading**")]
    full = text[text.index("**The short reading**") : text.index("## Measured")]
    for name, part in ("The short reading", short), ("The full reading", full):
        lengths = [int(number) for _, number in FILE_OF_CODE.findall(part)]
        hours = sum(lengths) / LINES_PER_MINUTE / 60
        length = f"**{name}** ({len(lengths)} files, {sum(lengths):,} lines, {hours:.1f} hours)"
        text = re.sub(rf"\*\*{name}\*\* \(.*?\)", length, text)
    row = re.compile(r"\]\((\S+\.ipynb)\) \|(.*)\| \d+ min \|")
    text = row.sub(lambda found: f"]({found[1]}) |{found[2]}| {minutes(found[1])} min |", text)
    lab, further = (text[text.index(heading) :].partition("\n##")[0] for heading in ("## The lab", "### Further"))
    hours = [sum(map(int, re.findall(r"\| (\d+) min \|", table))) / 60 for table in (lab, further)]
    text = re.sub(r"about \d+ hours with exercises", f"about {hours[0]:.0f} hours with exercises", text)
    return re.sub(r"Ten more\s+\(\d+ hours\)", lambda said: re.sub(r"\d+", f"{hours[1]:.0f}", said[0]), text)


def num_lines(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def minutes(notebook: str) -> int:
    """What a notebook says of its core path, with the exercises; of Start_Here, its agenda does."""
    text = "\n".join(cell.source for cell in nbformat.read(ROOT / notebook, as_version=4).cells[:2])
    said = re.search(r"core path takes (\d+) \+ (\d+) minutes|\*\*Start here\*\* \| (\d+)", text)
    return sum(int(number) for number in said.groups() if number)


def test_the_numbers_are_counted():
    assert with_counted_numbers(README) == README, "run `.venv/bin/python -m tests.test_readme`"


def test_readme_is_a_front_door():
    assert len(README.splitlines()) <= 130


def test_the_example_runs_as_it_stands():
    [example] = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    run = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("16 ranks") and run.stdout.endswith(f"{['hello'] * 4}\n")


def test_the_eight_rows_are_measured_rows_of_the_long_table():
    measured = README[README.index("## Measured") : README.index("## Where to read on")]
    rows = [line.split("|")[2:5] for line in measured.splitlines() if line.startswith("| ")][1:]
    table = (ROOT / "benchmarks/README.md").read_text()
    assert len(rows) == 8
    assert not [row for row in rows if f"|{'|'.join(row)}|" not in table]


@pytest.mark.parametrize("name", re.findall(rf"`((?:{'|'.join(PACKAGES)})/.*?)`", MAP))
def test_the_map_leads_somewhere(name):
    assert (ROOT / name).exists()


def test_every_part_of_the_three_packages_is_on_the_map():
    shown = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[^/`]+)", MAP)
    parts = [path for package in PACKAGES for path in (ROOT / package).iterdir()]
    names = {f"{path.parent.name}/{path.name}" for path in parts if path.suffix == ".py" or path.is_dir()}
    assert {name for name in names if "__" not in name} - {*shown} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_a_heading_find_it(document):
    folder = (ROOT / document).parent
    for path, anchor in re.findall(r"\]\(([\w./]*\.md)?#([\w-]+)\)", (ROOT / document).read_text()):
        headings = re.findall(r"^#+ (.*)", (folder / path if path else ROOT / document).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def texts_for_readers():
    """The notebooks' own cells, and the two pages that tell a user how to run something."""
    for path in [ROOT / "Start_Here.ipynb", *sorted((ROOT / "notebooks").rglob("*.ipynb"))]:
        yield from (cell.source for cell in nbformat.read(path, as_version=4).cells)
    yield from (README, (ROOT / "labtrain/README.md").read_text())


@pytest.fixture(scope="module")
def texts():
    return "\n".join(texts_for_readers())


@pytest.mark.parametrize("name", [field.name for field in fields(TrainConfig)])
def test_each_option_of_a_run_is_used_or_explained(name, texts):
    option = options()[name].removeprefix("--")
    assert re.search(rf"\b{name}=|--(no-)?({option}|{name.replace('_', '-')})(?![\w-])", texts), "it has no reader"


def test_no_page_names_an_option_that_is_not_there():
    page = re.sub(r"^```.*?^```$", "", (ROOT / "labtrain/README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {word for span in re.findall(r"`([^`]+)`", page) for word in re.findall(r"(?<!\S)--(?:no-)?[\w-]+", span)}
    assert {option.replace("--no-", "--") for option in named} - {*options().values(), "--help"} == set()


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_counted_numbers(README))
