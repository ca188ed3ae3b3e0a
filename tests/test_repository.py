"""What the repository says about itself: one version, one address, and links that are made from it."""

import re
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

from course.publish import links

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
[ADDRESS] = re.findall(r'^Repository = "(.*)"$', PROJECT, re.MULTILINE)
OURS = "https://git.example.org/we/megatron-lab"


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in filter(None, listed.split("\0"))]
    return {path: path.read_text(errors="ignore") for path in paths if path.is_file() and path.suffix != ".png"}


def test_the_version_is_the_same_wherever_it_is_said():
    """The newest release of CHANGELOG is the project's, and it names its tag."""
    [version] = re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE)
    newest, tag = re.search(r"^## (\S+) .*?`(\S+)`", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert newest == version == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert tag == f"v{version}"


def test_the_address_stands_in_one_place():
    """Whoever puts the lab somewhere else changes one line; links to other services are made from it."""
    address = urlparse(ADDRESS)
    named = {path.name for path, text in tracked().items() if f"{address.netloc}{address.path}" in text}
    assert named == {"pyproject.toml"}
    written = re.compile(r"mybinder\.org/v2/[\w{]|git-pull\?\S*repo=")
    assert {path.name for path, text in tracked().items() if written.search(text)} == {"links.py", "test_repository.py"}


def test_links_are_made_from_the_address():
    address = links.repository(PROJECT.replace(ADDRESS, OURS))
    assert address == OURS
    assert links.binder(address, "main") == (
        "https://mybinder.org/v2/git/https%3A%2F%2Fgit.example.org%2Fwe%2Fmegatron-lab/main"
        "?urlpath=lab/tree/Start_Here.ipynb"
    )
    url = urlparse(links.nbgitpuller(address, "v1.0.0", "https://hub.example.org/"))
    assert (url.netloc, url.path) == ("hub.example.org", "/hub/user-redirect/git-pull")
    query = {"repo": [OURS], "branch": ["v1.0.0"], "urlpath": ["lab/tree/megatron-lab/Start_Here.ipynb"]}
    assert parse_qs(url.query) == query


def test_without_an_owner_there_are_no_links():
    with pytest.raises(ValueError, match="has no owner yet: write the address into"):
        links.repository('Repository = "https://github.com/OWNER/some-lab"')


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.stem)
def test_a_template_says_what_it_is_for(path):
    _, head, body = path.read_text().split("---\n", 2)
    assert {"name", "about"} <= yaml.safe_load(head).keys()
    assert body.count("**") >= 6  # at least three questions


def test_there_is_a_template_for_a_number_a_hang_and_a_sentence():
    names = {path.stem for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()}
    assert names == {"wrong_number", "hang", "sentence"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_may_only_read(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
