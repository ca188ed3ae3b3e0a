"""labkit is a house: a file imports only from lower floors, and the ground floor's plain files need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LABKIT = Path(__file__).parents[1] / "labkit"

# From the ground up. On one floor, a name may import those to its left: so no cycles. A package is one name.
FLOORS = [
    ["sizes", "layout", "schedules", "sizing", "sharding", "batch", "text", "launch"],
    ["groups", "timeline"],
    ["communication", "collectives", "bandwidth", "operations", "flow", "by_axis"],
    ["parity", "layers", "data_parallel", "pipeline"],
    ["model"],
    ["checkpoint", "train", "utilisation"],
    [
        "plots",
        "explorer",
        "widgets",
        "widgets_collectives",
        "widgets_sharding",
        "widgets_sizing",
        "widgets_training",
        "widgets_three_axes",
        "widgets_data_parallel",
        "widgets_pipeline",
        "exercises",
        "environment",
        "this_machine",
    ],
]
ORDER = [name for floor in FLOORS for name in floor]
WITHOUT_TORCH = {"batch", "layout", "schedules", "sizes", "sizing", "sharding", "text"}


def module_of(path: Path) -> str:
    """The name on a floor that a file belongs to: its own, or its package's."""
    return path.relative_to(LABKIT).with_suffix("").parts[0]


def imports_of(source: str, package: str) -> set[str]:
    """Every module that a source imports, at the top or inside a function, as dotted names from the root."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def labkit_imports(path: Path) -> set[str]:
    """The names on labkit's floors that a file imports, its own left out."""
    package = ".".join(("labkit", *path.relative_to(LABKIT).parent.parts))
    parts = [name.split(".") for name in imports_of(path.read_text(), package)]
    return {names[1] for names in parts if names[0] == "labkit" and len(names) > 1} - {module_of(path)}


FILES = sorted(path for path in LABKIT.rglob("*.py") if path != LABKIT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LABKIT)))
def test_a_file_imports_only_from_below(path):
    module = module_of(path)
    assert module in ORDER, f"{module} has no floor yet: give it one in FLOORS"
    below = set(ORDER[: ORDER.index(module)])
    assert labkit_imports(path) <= below, f"{module} imports {labkit_imports(path) - below}, which is not below it"
    if module in WITHOUT_TORCH:
        assert not any(name.split(".")[0] == "torch" for name in imports_of(path.read_text(), "labkit"))


def test_the_package_itself_imports_nothing():
    assert imports_of((LABKIT / "__init__.py").read_text(), "labkit") == set()


def test_imports_are_found_wherever_they_hide():
    source = """
import labkit.layout as l, os
from labkit import groups
from labkit.plots.style import TP
def late():
    from ..train import train
    from . import base
"""
    assert imports_of(source, "labkit.exercises") == {
        "labkit.layout", "os", "labkit.groups", "labkit.plots.style.TP", "labkit.train.train", "labkit.exercises.base",
    }  # fmt: skip


@pytest.mark.parametrize("module", sorted(name for name in WITHOUT_TORCH if (LABKIT / f"{name}.py").exists()))
def test_a_fresh_process_loads_no_torch(module):
    code = f"import sys, labkit.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
