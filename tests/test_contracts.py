"""Each of import-linter's contracts fails when what it forbids is planted: one that cannot fail holds nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANTS = {
    "labkit imports neither labtrain nor course": ("labkit/layout.py", "import labtrain.data"),
    "labtrain never imports course": ("labtrain/data.py", "import course.table"),
    "labkit needs only torch, cloudpickle and tqdm": ("labkit/groups.py", "import numpy"),
    "labkit: a file imports only from lower floors": ("labkit/groups.py", "import labkit.pipeline"),
    "labtrain: a file imports only from lower floors": ("labtrain/model.py", "import labtrain.generation"),
    "a package imports no tests, tools or benchmarks": ("course/publish/slides.py", "import tests.support.browser"),
    "course: a file imports only from lower floors": ("course/sizing/plan.py", "import course.pictures.style"),
    "no circle among files": ("labtrain/config/run.py", "import labtrain.trainer"),
    "the plain files need no torch": ("labkit/schedules/schedule.py", "import torch"),
    "an explorer needs nothing but Python, until it is shown": ("course/pictures/layout.py", "import numpy"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project in which a test may plant things."""
    folder = tmp_path_factory.mktemp("project")
    for package in ("labkit", "labtrain", "course"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken(folder: Path) -> set[str]:
    """The names of the contracts that import-linter finds broken."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    assert "Contracts: " in said, said
    return set(re.findall(r"^(.*) BROKEN", said, re.MULTILINE))


@pytest.mark.parametrize("name", PLANTS)
def test_a_contract_finds_what_it_forbids(copy, name):
    path, line = PLANTS[name]
    source = (copy / path).read_text()
    (copy / path).write_text(f"{source}\n\n{line}\n")
    try:
        assert name in broken(copy)
    finally:
        (copy / path).write_text(source)


def test_every_contract_is_planted_once():
    assert set(re.findall(r'^name = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1:]) == set(PLANTS)
