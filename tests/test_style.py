"""Lint, format and types: each tool is one test, and its findings are the failure's message."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TOOLS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "pyright": ["pyright", "--pythonpath", sys.executable, "labkit", "labtrain", "course"],
    "import-linter": ["lint-imports", "--no-logo", "--no-cache"],
}


@pytest.mark.parametrize("name", TOOLS)
def test_style(name):
    command, *options = TOOLS[name]
    run = subprocess.run([BIN / command, *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{name} found:\n{run.stdout}{run.stderr}"
