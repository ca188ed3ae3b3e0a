"""What a run leaves in the checkout stays out of git, of an image and of a package."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "left", ["checkpoints/step_00000001/labkit.json", "labtrain-70001.log", "build/tests.xml", ".venv"]
)
def test_git_ignores_what_a_run_leaves(left):
    ignored = subprocess.run(["git", "check-ignore", "--quiet", left], cwd=ROOT).returncode == 0
    assert ignored or not (ROOT / ".git").exists()


@pytest.mark.parametrize("line", (ROOT / ".gitignore").read_text().splitlines())
def test_an_image_lacks_what_git_ignores(line):
    """Docker reads a pattern from the root of the checkout on, git in every folder."""
    lacking = (ROOT / ".dockerignore").read_text().splitlines()
    assert line in lacking or f"**/{line}" in lacking
    assert ".git/" in lacking
