"""The pins of a workshop: each installs on every Python that README promises, and is what the tests ran with."""

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.11.2", "3.12.0", "3.13.0"]  # 3.11.2 is Debian 12's own
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))


def test_the_oldest_promised_python_is_the_readmes():
    assert "`python3` (3.11 or newer" in (ROOT / "README.md").read_text()
    assert len(PINS) > 50


@pytest.mark.parametrize("name", PINS)
def test_a_pin_installs_on_every_promised_python(name):
    package = metadata(name)
    assert package["Version"].split("+")[0] == PINS[name], "not the version that requirements.txt pins"
    accepted = SpecifierSet(package["Requires-Python"] or "")
    assert [python for python in PYTHONS if python not in accepted] == []
