"""The pins of a workshop: each installs on every Python that README promises, and is what the tests ran with.

And what pyproject.toml, the Makefile and README say about Python and torch is the same.
"""

import os
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
README = (ROOT / "README.md").read_text()
PYTHONS = ["3.11.2", "3.12.0", "3.13.0"]  # 3.11.2 is Debian 12's own
WITH_TORCH = os.environ.get("TORCH")  # `make test TORCH=2.11.0` hands it down
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))


def oldest(specifiers):
    [found] = [each.version for each in SpecifierSet(specifiers) if each.operator == ">="]
    return found.removesuffix(".0a0")


def test_the_oldest_python_is_the_same_wherever_it_is_said():
    [of_make] = re.findall(r"sys\.version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text())
    assert f"`python3` ({'.'.join(of_make)} or newer" in README
    assert tuple(PYTHONS[0].split(".")[:2]) == of_make
    [of_project] = re.findall(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)
    assert f"(Python {oldest(of_project)} or newer" in README
    assert len(PINS) > 50


def test_the_oldest_torch_is_the_readmes():
    """Whoever brings their own reads it there; what it was tried with stands under Versions."""
    [range_of_torch] = re.findall(r'^ +"torch(>=.*)"', PROJECT, re.MULTILINE)
    floor = oldest(range_of_torch)
    assert f"PyTorch {floor} or newer" in README
    [versions] = re.findall(r"^\*\*Versions\.\*\* (.*?)\n\n", README, re.MULTILINE | re.DOTALL)
    assert f"torch {floor}.0" in versions and f"torch {PINS['torch']}" in versions


@pytest.mark.parametrize("name", PINS)
def test_a_pin_installs_on_every_promised_python(name):
    package = metadata(name)
    pinned = WITH_TORCH if WITH_TORCH and name == "torch" else PINS[name]
    assert package["Version"].split("+")[0] == pinned, "not the version that requirements.txt pins"
    accepted = SpecifierSet(package["Requires-Python"] or "")
    assert [python for python in PYTHONS if python not in accepted] == []
