"""Writes slides of notebooks into build/slides: sections are slides, and their code cells go on below.

What lies beyond the lab goes into build/slides/further.

Answers that are folded away in a notebook become speaker notes (key S). The setup cell, the hints, and the checks of
exercises that nobody has tried are left out. In the browser, each page gets its section's heading, and letters in
pictures get 24 pixels where there is room: course/pictures/slide.py draws timelines anew, other pictures are stretched.
Nothing is loaded from the network when the slides are shown: reveal.js and Pyodide come from npm once, and lie beside
them. Explorers are alive where the folder is served (`python3 -m http.server -d build/slides`); opened as files, slides
show them as they were stored.
"""

import base64
import re
import shutil
import sys
from functools import partial
from html import escape
from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter

from course.explorers.jupyter import CONTROLS
from course.pictures.narrow import VIEW
from course.pictures.scene import USUAL
from course.pictures.slide import svgs_on_slide
from course.publish import living, npm, pages, pyodide
from course.working_copy import within
from labtrain.command_line import run_command

REVEAL = "reveal.js@5.2.1"
WIDTH, HEIGHT = 1400, 900
NOT_YET = "not attempted yet"  # what a check says of a stub
PICTURES = re.compile(r'<div style="overflow-x:auto">((?:<img [^>]*>)+)</div>')
IN_TEXT = re.compile(r"!\[([^\]]*)\]\((\S+\.svg)\)")
ALT, CODE = re.compile(r'alt="([^"]*)"'), re.compile(f'{re.escape(living.SVG)}([^"]*)"')
TEXT, SIZE = re.compile("<text[^>]*>"), re.compile(r"font(?:-size)?[=:][^\d;]*([\d.]+)")
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
            if kind == "subslide" and cells and re.fullmatch("#+ .*", cells[-1].source.strip()):
                kind = "-"  # below a heading that has nothing else
            has_section = has_section or part.startswith("## ")
            cells.append(nbformat.v4.new_markdown_cell(part, metadata={"slideshow": {"slide_type": kind}}))
    notebook.cells = cells
    return notebook


def with_pictures(notebook, folder: Path):
    """Make all stored pictures such as slides can show large: timelines are drawn anew, others can be stretched."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = IN_TEXT.sub(partial(_in_text, folder), cell.source)
        for output in cell.get("outputs", []):
            if html := output.get("data", {}).get("text/html"):
                output.data["text/html"] = PICTURES.sub(_stored, html)
    return notebook


def _in_text(folder: Path, found: re.Match) -> str:
    return _pictures([(folder / found[2]).read_text()], escape(found[1]))


def _stored(found: re.Match) -> str:
    svgs = [base64.b64decode(code).decode() for code in CODE.findall(found[1])]
    return _pictures(svgs, ALT.findall(found[1])[0]) if svgs else found[0]


def _pictures(svgs: list[str], alt: str) -> str:
    """Return SVGs that stand beside each other as HTML: a timeline is one block, or several."""
    if len(svgs) == 1 and (folded := svgs_on_slide(svgs[0])):
        return "\n\n".join(f'<div class="picture">{_picture(svg, alt)}</div>' for svg in folded)
    return f'<div class="picture">{"".join(_picture(svg, alt) for svg in svgs)}</div>'


def _picture(svg: str, alt: str) -> str:
    """Return an image that says how wide, how tall, and how small in its letters it is: the page makes it large."""
    width, height = VIEW.findall(svg)[0]
    sizes = [float(size[1]) if (size := SIZE.search(text)) else USUAL for text in TEXT.findall(svg)]
    code = base64.b64encode(svg.replace("<svg ", '<svg preserveAspectRatio="none" ', 1).encode()).decode()
    return f'<img alt="{alt}" data-picture="[{width},{height},{min(sizes, default=USUAL)}]" src="{living.SVG}{code}">'


def with_places(notebook):
    """Put each explorer's stored picture into a place where page.js makes it live."""
    seen = 0
    for cell in notebook.cells:
        call = living.explorer_call(cell) if cell.cell_type == "code" else None
        if call is None:
            continue
        seen += 1
        place = living.explorer_place(*call, view=f"explorer{seen}", screen="slide")
        for output in cell.outputs:
            if html := output.get("data", {}).get("text/html"):
                output.data["text/html"] = f"<div {place} data-prevent-swipe>{html.replace(CONTROLS, '')}</div>"
    return notebook


def write_slides(path: Path, folder: Path) -> Path:
    """Write one notebook's slides; returns the file."""
    is_further = path.parent.name == "further"  # as in notebooks/
    exporter = SlidesExporter(
        raw_template=Path(__file__).with_suffix(".html.j2").read_text(),
        reveal_url_prefix=f"{'../' * is_further}reveal.js",
        reveal_theme="white",
        reveal_width=str(WIDTH),
        reveal_height=str(HEIGHT),
    )
    notebook = as_slides(with_places(with_pictures(nbformat.read(path, as_version=4), path.parent)))
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
        pyodide.fetch(pages.CACHE)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    living.put_files(folder / "lab", pages.CACHE)
    for path in map(Path, sys.argv[1:]):
        for notebook in within(path):
            print(write_slides(notebook, folder))
    return 0


if __name__ == "__main__":
    run_command(main)
