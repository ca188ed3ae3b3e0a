"""Writes what Sphinx makes the site from: the notebooks as stored, and a page for each file that they link to.

Links among notebooks and texts lead to pages of the site. A file of labkit or labtrain has a page with what it offers,
from its docstrings, and its source; any other file one with its source.
"""

import posixpath
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import nbformat

from course import working_copy
from course.publish import living, play

ROOT = Path(__file__).parents[2]
PACKAGES = "labkit", "labtrain"
TEXTS = Path(__file__).with_name("site")
LINK = re.compile(r"(\]\()(?!\w+:|//)([^)#\s]*)(?:#([^)\s]*))?")
TO_FOLDER = re.compile(r"\[([^\]]+)\]\((?!\w+:|//|#)([^)#\s]+)\)")
LEXERS = {".py": "python", ".sbatch": "bash", ".toml": "toml", ".json": "json", ".md": "markdown", ".yml": "yaml"}
OF_THE_SITE = {
    "index.md": play.front,
    "play.md": play.play,
    "symbols.md": (TEXTS / "symbols.md").read_text,
    "glossary.md": (TEXTS / "glossary.md").read_text,
}
"""Pages that are no file of the project, and what writes them."""
TITLES = {"Start_Here.ipynb": "Start here", "INSTRUCTOR.md": "Lead a workshop"}
"""Where a page's own title would say less beside the others."""
GUIDES = "INSTRUCTOR.md", "course/servers.md"
NO_LETTER = re.compile(r"[^\w\- ]")
API = """# API

What labkit and labtrain offer, from their docstrings. Each page ends with the file itself: it is meant to be read.
"""


def write_source(names: list[str], folder: Path, follow: bool = True) -> list[str]:
    """Write these files of the project, and what they link to if told so, into a new folder; return them all."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "pics", folder / "pics")
    to_write = [*names]
    written = []
    while to_write:
        name = to_write.pop(0)
        written.append(name)
        linked = write_file(name, folder)
        if follow:
            to_write += sorted(linked.difference(written, to_write))
    _write_tree(written, folder)
    return written


def as_source(name: str) -> str:
    """Return where a file of the project lies in the source of its page."""
    return name if name.endswith((".ipynb", ".md")) else f"{name}.md"


def anchor(heading: str) -> str:
    """Return the end of a link to a heading, whether it is written as GitHub or as JupyterLab has it."""
    return NO_LETTER.sub("", heading.lower()).replace(" ", "-")


def write_file(name: str, folder: Path) -> set[str]:
    """Write the source of one page; return the files of the project that it links to."""
    linked = set()
    here = posixpath.dirname(name)

    def lead(link: re.Match) -> str:
        heading = f"#{anchor(unquote(link[3]))}" if link[3] else ""
        target = posixpath.normpath(posixpath.join(here, unquote(link[2]))) if link[2] else name
        if not link[2] or target in OF_THE_SITE or target.startswith("pics/") or not (ROOT / target).is_file():
            return link[1] + link[2] + heading
        linked.add(target)
        if not target.endswith((".ipynb", ".md")):
            heading = "#source" if _is_module(target) else ""
        return link[1] + posixpath.relpath(as_source(target), here or ".") + heading

    def lead_all(text: str) -> str:
        def words(link: re.Match) -> str:
            return link[1] if (ROOT / here / unquote(link[2])).is_dir() else link[0]

        return LINK.sub(lead, TO_FOLDER.sub(words, text))

    place = folder / as_source(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    if name in OF_THE_SITE:
        place.write_text(lead_all(OF_THE_SITE[name]()))
    elif name.endswith(".ipynb"):
        notebook = living.enliven(nbformat.read(ROOT / name, as_version=4))
        if name in TITLES:
            notebook.cells[0].source = re.sub("^# .*", f"# {TITLES[name]}", notebook.cells[0].source)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = lead_all(cell.source)
        nbformat.write(notebook, place)
    elif name.endswith(".md"):
        place.write_text(lead_all((ROOT / name).read_text()))
    else:
        place.write_text(_module_page(name) if _is_module(name) else _file_page(name))
    return linked


def modules() -> list[str]:
    """Return the files of labkit and labtrain that offer something."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"]


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name.split("/")[0] in PACKAGES


def _module_page(name: str) -> str:
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    documented = f"```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```"
    return f"# {module}\n\n{documented}\n\n## Source\n\n{_listing(name)}"


def _file_page(name: str) -> str:
    return f"---\norphan: true\n---\n# {name}\n\n{_listing(name)}"


def _listing(name: str) -> str:
    return f"`````{LEXERS.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text()}\n`````\n"


def _write_tree(written: list[str], folder: Path) -> None:
    """Give each page its place in the navigation."""
    notebooks = [name for name in map(str, working_copy.notebooks(ROOT)) if name in written]
    core = [name for name in notebooks if "/further/" not in name]
    further = [name for name in notebooks if "/further/" in name]
    files = [as_source(name) for name in written if _is_module(name)]
    (folder / "api.md").write_text(API + _toctree("", sorted(files)))
    looked_up = [name for name in ("play.md", "symbols.md", "glossary.md") if name in written]
    guides = [name for name in GUIDES if name in written]
    others = [name for name in written if name.endswith(".md") and name not in (*OF_THE_SITE, *guides)]
    trees = _toctree("The core", core) + _toctree("Beyond", further) + _toctree("To look up", [*looked_up, "api.md"])
    trees += _toctree("To run it", [*guides, *others])
    with (folder / "index.md").open("a") as front:
        front.write(trees)


def _toctree(caption: str, names: list[str]) -> str:
    options = ":hidden:\n:caption: " + caption if caption else ":maxdepth: 1"
    places = [f"{TITLES[name]} </{name}>" if name in TITLES else f"/{name}" for name in names]
    return "\n".join(["\n```{toctree}", options, "", *places, "```\n"])
