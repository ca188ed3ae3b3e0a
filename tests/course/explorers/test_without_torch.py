"""Explorers that only calculate need nothing but Python, so a page can run them; plain files load no torch."""

import subprocess
import sys

import pytest

EXPLORERS = [
    "base", "batch", "collectives", "context", "fully_sharded", "layout", "routing", "schedule", "schedule_builder",
    "sharding", "sizing",
]  # fmt: skip
PLAIN = [
    *(f"labkit.{name}" for name in ("layout", "partition", "schedules", "shape", "sizes", "timeline")),
    *(f"labtrain.{name}" for name in ("data", "hugging_face", "memory_estimate")),
]
REFUSED = ["torch", "numpy", "matplotlib", "pandas", "ipywidgets", "IPython", "traitlets", "anywidget"]
IMPORT = """import importlib, sys
modules, refused = (words.split() for words in sys.argv[1:])
class Refuse:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is refused")
sys.meta_path.insert(0, Refuse)
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize(
    ("modules", "refused"),
    [
        ([f"course.explorers.{name}" for name in EXPLORERS], REFUSED),
        (["course.pictures.steps"], REFUSED),
        (PLAIN, ["torch"]),
    ],
    ids=["explorers", "steps", "plain files"],
)
def test_they_import_nothing_that_is_refused(modules, refused):
    command = [sys.executable, "-c", IMPORT, " ".join(modules), " ".join(refused)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
