"""Writes slides of notebooks into build/slides: sections are slides, and their code cells go on below.

What lies beyond the lab goes into build/slides/further.

Answers that are folded away in a notebook become speaker notes (key S). The setup cell, the hints, and the checks of
exercises that nobody has tried are left out. In the browser, each page gets its section's heading.
Nothing is loaded from the network when the slides are shown: reveal.js comes from npm once, and lies beside them.
"""

import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter

from course.publish import npm
from course.working_copy import within
from labtrain.command_line import run_command

REVEAL = "reveal.js@5.2.1"
WIDTH, HEIGHT = 1400, 900
NOT_YET = "not attempted yet"  # what a check says of a stub
PARTS = re.compile(r"\n(?=#{1,4} [^!])|\n(?=<details>)|(?<=</details>)\n")


def as_slides(notebook):
    """Give every cell its place among the slides; a cell with several headings is divided.

    Code begins a page, unless there is nothing but a heading above it.
    """
    cells, has_section = [], False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            has_lines = any(line and not line.startswith("#") for line in cell.source.splitlines())
            cell.outputs = [
                output for output in cell.outputs if NOT_YET not in output.get("data", {}).get("text/plain", "")
            ]
            kind = "-" if cells and re.fullmatch("#+ .*", cells[-1].source.strip()) else "subslide"  # below its heading
            cell.metadata["slideshow"] = {"slide_type": kind if has_section and has_lines else "skip"}
            cells.append(cell)
            continue
        parts = [cell.source] if "```" in cell.source else PARTS.split(cell.source)
        for part in filter(str.strip, parts):
            kind = "slide" if re.match("##? ", part) else "subslide" if part.startswith("#") else "-"
            kind = "notes" if "<details>" in part else kind
            has_section = has_section or part.startswith("## ")
            cells.append(nbformat.v4.new_markdown_cell(part, metadata={"slideshow": {"slide_type": kind}}))
    notebook.cells = cells
    return notebook


def write_slides(path: Path, folder: Path) -> Path:
    """Write one notebook's slides; returns the file."""
    is_further = path.parent.name == "further"  # as in notebooks/, so that links to pictures lead to the same place
    exporter = SlidesExporter(
        raw_template=Path(__file__).with_suffix(".html.j2").read_text(),
        reveal_url_prefix="../reveal.js" if is_further else "reveal.js",
        reveal_theme="white",
        reveal_width=str(WIDTH),
        reveal_height=str(HEIGHT),
        embed_images=True,
    )
    notebook = as_slides(nbformat.read(path, as_version=4))
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(notebook, resources)
    written = folder / ("further" if is_further else "") / f"{path.stem}.html"
    written.parent.mkdir(exist_ok=True)
    written.write_text(page)
    return written


def fetch_reveal(folder: Path) -> None:
    """Fetch reveal.js into ``folder``, unless it is there.

    Raises:
        RuntimeError: npm is missing or cannot fetch it.
    """
    if not (folder / "reveal.js").exists():
        archive = npm.pack(REVEAL, folder)
        shutil.unpack_archive(archive, folder)
        (folder / "package").rename(folder / "reveal.js")
        archive.unlink()


def main() -> int:
    folder = Path("build/slides")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fetch_reveal(folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.copytree("pics", folder.parent / "pics", dirs_exist_ok=True)
    for path in map(Path, sys.argv[1:]):
        for notebook in within(path):
            print(write_slides(notebook, folder))
    return 0


if __name__ == "__main__":
    run_command(main)
