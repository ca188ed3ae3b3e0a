"""The explorers that only calculate, and labkit's plain files, load no torch: a cell that draws is up at once."""

import subprocess
import sys

import pytest

PLAIN = [
    *(f"course.explorers.{name}" for name in ("batch", "layout", "schedule", "sharding", "sizing")),
    *(f"labkit.{name}" for name in ("cuts", "data", "layout", "schedules", "shape", "sizes", "timeline")),
    "course.sizing",
]


@pytest.mark.parametrize("module", PLAIN)
def test_it_loads_no_torch(module):
    look = f"import sys, {module}; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'torch'))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "[]\n"
