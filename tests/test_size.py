"""The map of the code in README, its inner path, and its rows of measurements are true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE_MAP = README[README.index("## The code") : README.index("## Commands")]
INNER_PATH = [ROOT / name for name in re.findall(r"\*\*`(.+?\.py)`\*\*", CODE_MAP)]


def num_lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("name", re.findall(r"`((?:labkit|labtrain|course)/.*?)`", CODE_MAP))
def test_the_map_leads_somewhere(name):
    assert (ROOT / name).exists()


def test_every_part_of_both_packages_is_on_the_map():
    shown = re.findall(r"`((?:labkit|labtrain|course)/[^/`]+)", CODE_MAP)
    parts = [path for package in ("labkit", "labtrain", "course") for path in (ROOT / package).iterdir()]
    names = {f"{path.parent.name}/{path.name}" for path in parts if path.suffix == ".py" or path.is_dir()}
    left_out = {name for name in names if "__" not in name and name not in shown}
    assert left_out <= {"labkit/sizes.py", "labkit/shape.py", "labkit/device.py", "course/progress.py"}


def test_the_inner_path_is_as_long_as_readme_says():
    assert len(INNER_PATH) == 12
    said = int(re.search(r"twelve files, ([\d,]+) lines", CODE_MAP)[1].replace(",", ""))
    assert abs(num_lines(*INNER_PATH) - said) < 50


def test_the_eight_rows_of_readme_are_measured_rows_of_the_long_table():
    measured = README[README.index("## Measured") : README.index("## From the notebook")]
    rows = [line.split("|")[2:5] for line in measured.splitlines() if line.startswith("| ")][1:]
    table = (ROOT / "benchmarks/README.md").read_text()
    assert len(rows) == 8
    assert not [row for row in rows if f"|{'|'.join(row)}|" not in table]
