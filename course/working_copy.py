"""Makes a reader's own copy of the notebooks, in which no answer stands below its question.

The outputs that answer a question are taken out, and the text that explains them is folded. What a reader has is never
written over: a newer version of a notebook is put beside it. Pictures are copied, because Jupyter's server hands out no
file that lies outside its folder, not even through a link. All else that notebooks link to is linked.
"""

import filecmp
import hashlib
import json
import re
import shutil
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from course import EARLIER

ROOT = Path(__file__).resolve().parents[1]
PICTURES = "pics"
LINKED = ["labkit", "labtrain", "course", "tests", "README.md", "CONTRIBUTING.md", "INSTRUCTOR.md", "LICENSE", "NOTICE"]
ASKS = re.compile(r"predict\.\w+")
"""The whole of a cell that shows a question; see `course.predict`."""
ASKS_IN_WORDS = "**Predict.**"
"""What a text has that asks without `course.predict`, because the answer is a measurement or a formula."""
COMPARES = re.compile(r"\bpredict\.\w+\.compare\(")
SUMMARY = "<details><summary>After you have run it</summary>"


def notebooks(root: Path) -> list[Path]:
    """Return the paths of all notebooks of the lab, within its folder ``root``: the core first, then what is beyond."""
    return [Path("Start_Here.ipynb"), *(path.relative_to(root) for path in within(root / "notebooks"))]


def within(path: Path) -> list[Path]:
    """Return a notebook itself, or all those in a folder and below it, in the order of their numbers."""
    found = [path] if path.is_file() else sorted(path.rglob("*.ipynb"))
    return [each for each in found if ".ipynb_checkpoints" not in each.parts]


def find(pattern: str, root: Path = ROOT) -> Path:
    """Return the path within ``root`` of the one notebook whose name fits, as in ``find("05_*")``."""
    [path] = [path for path in notebooks(root) if path.match(f"{pattern}.ipynb")]
    return path


def hide_answers(notebook: nbformat.NotebookNode) -> None:
    """Take out what answers a question: outputs, up to the next question or heading, and fold the text after the first.

    Headings stay in sight, and what stands below them. A cell with the tag ``explanation`` is folded as a whole, one
    with ``introduction`` not at all. Without a tag, the last of several paragraphs before code introduces the code.
    """
    hides = folds = False
    for before, cell, after in zip([None, *notebook.cells], notebook.cells, [*notebook.cells[1:], None]):
        if cell.cell_type == "code":
            if ASKS.fullmatch(cell.source):
                hides = folds = False
            elif COMPARES.search(cell.source):
                hides = folds = True
            elif before and before.cell_type == "markdown" and ASKS_IN_WORDS not in before.source:
                folds = False  # what was folded explains the cells above it
            if hides:
                cell.outputs, cell.execution_count = [], None
            continue
        if hides:
            tags = cell.metadata.get("tags", [])
            text, *below = re.split(r"(?m)^(?=#+ )", cell.source, maxsplit=1)
            wanted = (folds or "explanation" in tags) and "introduction" not in tags
            if wanted and text.strip() and not text.startswith(SUMMARY):
                told, introduction = text.strip(), []
                before_code = not below and after and after.cell_type == "code" and not ASKS.fullmatch(after.source)
                if before_code and "explanation" not in tags:
                    told, *introduction = told.rsplit("\n\n", 1)
                cell.source = "\n\n".join([SUMMARY, told, "</details>", *introduction, *below])
            if below:
                hides = folds = False
        if ASKS_IN_WORDS in cell.source:
            hides = folds = True


def without_earlier(folder: Path) -> Path:
    """Return the folder or, if it holds a copy of an earlier version of the lab, the first beside it that does not."""
    free, number = folder, 2
    while (free / "notebooks" / EARLIER).exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


def make(folder: Path, root: Path = ROOT) -> list[Path]:
    """Put into ``folder`` what it lacks of the lab in ``root``; returns the newer notebooks, each beside the reader's.

    Raises:
        OSError: the folder cannot be written to.
    """
    newer = []
    for name in notebooks(root):
        notebook = nbformat.read(root / name, as_version=4)
        hide_answers(notebook)
        version = _sign(notebook)
        place, number = folder / name, 2
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            if version in map(_version, [place, *place.parent.glob(f"{place.stem}-*.ipynb")]):
                continue
            while place.exists():
                place, number = (folder / name).with_stem(f"{name.stem}-{number}"), number + 1
            newer.append(place)
        with place.open("x") as file:
            nbformat.write(notebook, file)
    _copy_pictures(root / PICTURES, folder / PICTURES)
    for name in LINKED:
        link, target = folder / name, root / name
        if link.is_symlink() and link.readlink() != target:  # the lab has moved
            link.unlink()
        if target.exists() and not link.exists():
            link.symlink_to(target)
    return newer


def _copy_pictures(source: Path, target: Path) -> None:
    """Bring the lab's pictures up to date in a reader's copy; an earlier version of the lab has left a link there."""
    if target.is_symlink():
        target.unlink()
    target.mkdir(exist_ok=True)
    for picture in source.iterdir():
        copied = target / picture.name
        if not copied.exists() or not filecmp.cmp(picture, copied, shallow=False):
            shutil.copyfile(picture, copied)


def _sign(notebook: nbformat.NotebookNode) -> str:
    """Let JupyterLab trust what is stored, as it trusts what a reader runs; returns the version, which it notes."""
    sources = json.dumps([[cell.cell_type, cell.source] for cell in notebook.cells])
    version = hashlib.sha256(sources.encode()).hexdigest()[:16]
    notebook.metadata["labkit"] = {"version": version}
    NotebookNotary().sign(notebook)
    return version


def _version(path: Path) -> str | None:
    """Return the version from which a reader's notebook was made, if it says so."""
    try:
        return json.loads(path.read_text())["metadata"]["labkit"]["version"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
