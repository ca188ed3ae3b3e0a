"""Makes what participants get: a copy of the lab without outputs and answers, with the solutions out of sight.

build/handout has the notebooks with empty outputs, labkit to read, and those parts of the course that have solutions
in an archive, which Python imports from; `solution()` says who has them. build/answers.md has the answers that stood
folded in the notebooks. Nobody who wants to look is kept from it: the checks need the solutions.
"""

import re
import shutil
from pathlib import Path

import nbformat

from course.working_copy import hide_answers, within
from labtrain.command_line import run_command

ROOT = Path(__file__).parents[2]
COPIED = ["Start_Here.ipynb", "notebooks", "pics", "labkit", "labtrain", "course"]
COPIED += ["README.md", "CONTRIBUTING.md", "LICENSE", "NOTICE"]
COPIED += ["Dockerfile", "Makefile", "pyproject.toml", "requirements.txt"]
LEFT_OUT = ["quiz", "publish", "servers.md", "__pycache__", ".ipynb_checkpoints", "checkpoints", "*_trace.json"]
LEFT_OUT += ["my_megatron.py"]
CLOSED = ["exercises", "museum", "predictions", "project"]
ANSWERS = re.compile(r"<details>\s*<summary>(?!Hint).*?</summary>(.*?)</details>\s*", re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")
MESSAGE = """Your instructor has the solutions. To see them anyway, run `%env LABKIT_SOLUTIONS=open` first.
"""


def make_handout(folder: Path) -> str:
    """Write the handout into ``folder``, which must not exist yet; returns the answers that were taken out."""
    folder.mkdir(parents=True)
    for path in (ROOT / name for name in COPIED):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        else:
            shutil.copy(path, folder)
    _close(folder / "course")
    answers = []
    for path in [folder / "Start_Here.ipynb", *within(folder / "notebooks")]:
        notebook = nbformat.read(path, as_version=4)
        answers += clear(notebook, path)
        nbformat.write(notebook, path)
    for page in folder.rglob("*.md"):
        page.write_text(_without_dead_links(page.read_text(), page.parent))
    return "\n\n".join(answers)


def clear(notebook, path: Path) -> list[str]:
    """Take outputs and folded answers out of a notebook; returns the answers, each with where it stood."""
    answers, heading = [], ""
    where = f"further/{path.stem}" if path.parent.name == "further" else path.stem
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            continue
        for part in re.split(r"(?m)^(?=#+ )", cell.source):
            if begins := re.match(r"#+ (.+)", part):
                heading = begins[1]
            answers += [f"## {where}: {heading}\n\n{text.strip()}" for text in ANSWERS.findall(part)]
        cell.source = _without_dead_links(ANSWERS.sub("", cell.source).strip(), path.parent)
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    hide_answers(notebook)
    return answers


def _close(course: Path) -> None:
    """Put the packages with solutions into an archive beside the others, and note who has them."""
    (course / "closed").mkdir()
    for name in CLOSED:
        shutil.move(course / name, course / "closed" / name)
    shutil.make_archive(str(course / "closed"), "zip", course / "closed")
    shutil.rmtree(course / "closed")
    with (course / "__init__.py").open("a") as package:
        package.write('\n__path__.append(__path__[0] + "/closed.zip")  # what has solutions in it\n')
    (course / "handout.md").write_text(MESSAGE)


def _without_dead_links(text: str, folder: Path) -> str:
    """Keep the words of a link to what the handout lacks."""
    return LINK.sub(lambda link: link[0] if (folder / link[2]).exists() else link[1], text)


def main() -> None:
    build = Path("build")
    shutil.rmtree(build / "handout", ignore_errors=True)
    (build / "answers.md").write_text(make_handout(build / "handout") + "\n")
    print(shutil.make_archive("build/handout", "zip", build, "handout"), "and build/answers.md")


if __name__ == "__main__":
    run_command(main)
