"""Prints links by which others open the lab in a browser: on mybinder.org, and on a JupyterHub that has nbgitpuller.

    python -m course.publish.links --hub https://hub.example.org --branch v1.0.0

Where the repository lies is written in one place, `[project.urls]` of pyproject.toml. Put its address there first.
"""

import argparse
import re
from pathlib import Path
from urllib.parse import quote, urlencode, urlparse

from labtrain.command_line import run_command

ROOT = Path(__file__).parents[2]
START = "Start_Here.ipynb"
UNKNOWN = "OWNER"


def repository(project: str) -> str:
    """Return the repository's address, as the text of pyproject.toml has it.

    Raises:
        ValueError: nobody has written it there.
    """
    [address] = re.findall(r'^Repository = "(.*)"$', project, re.MULTILINE)
    if f"/{UNKNOWN}/" in address:
        raise ValueError(f"Repository = {address!r} has no owner yet: write the address into pyproject.toml")
    return address.removesuffix("/")


def binder(address: str, branch: str) -> str:
    """Return the link that makes a machine with the lab at mybinder.org.

    >>> binder("https://github.com/we/lab", "v1.0.0")
    'https://mybinder.org/v2/gh/we/lab/v1.0.0?urlpath=lab/tree/Start_Here.ipynb'
    """
    url = urlparse(address)
    place = f"gh{url.path}" if url.netloc == "github.com" else f"git/{quote(address, safe='')}"
    return f"https://mybinder.org/v2/{place}/{quote(branch, safe='')}?urlpath=lab/tree/{START}"


def nbgitpuller(address: str, branch: str, hub: str) -> str:
    """Return the link that brings the lab into a participant's home on this hub, and opens it.

    >>> nbgitpuller("https://github.com/we/lab", "v1.0.0", "https://hub.org").partition("?")[0]
    'https://hub.org/hub/user-redirect/git-pull'
    """
    name = Path(urlparse(address).path).name.removesuffix(".git")
    query = urlencode({"repo": address, "branch": branch, "urlpath": f"lab/tree/{name}/{START}"})
    return f"{hub.removesuffix('/')}/hub/user-redirect/git-pull?{query}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course.publish.links", description="Print links to the lab.")
    parser.add_argument("--hub", help="the address of a JupyterHub")
    parser.add_argument("--branch", default="main", help="or a tag, such as v1.0.0; by default main")
    given = parser.parse_args()
    try:
        address = repository((ROOT / "pyproject.toml").read_text())
    except ValueError as error:
        parser.error(str(error))
    print(binder(address, given.branch))
    if given.hub:
        print(nbgitpuller(address, given.branch, given.hub))


if __name__ == "__main__":
    run_command(main)
