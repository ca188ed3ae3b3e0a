"""Slides: sections begin them, and in the browser none is taller than the page."""

import base64
import re

import nbformat
import pytest

from course.publish.slides import HEIGHT, WIDTH, as_slides, write_slides
from tests.support.browser import chromium, find_chromium
from tests.support.living_page import serve_folder
from tests.test_notebooks import NOTEBOOKS

TEXT = re.compile("<text[^>]*>(?=[^<])")  # with letters in it
MEASURE = """() => Array.from(document.querySelectorAll(".slides > section > section"), page => {
    const top = page.getBoundingClientRect().top;
    const inside = [...page.querySelectorAll("*")].filter(each => !each.closest("aside"));
    const shown = inside.filter(each => each.getClientRects().length && !each.closest(".moment"));  // what is heard
    const zoom = each => each ? zoom(each.parentElement) * (parseFloat(getComputedStyle(each).zoom) || 1) : 1;
    const words = shown.filter(each => !each.closest("svg") && [...each.childNodes].some(
        child => child.nodeType === Node.TEXT_NODE && child.textContent.trim()));
    const sizes = words.map(each => parseFloat(getComputedStyle(each).fontSize) * zoom(each));
    const pictures = shown.filter(each => each.matches("[data-picture], .paper > svg"));
    const source = svg => svg.outerHTML.replace(svg.querySelector(".clock").outerHTML, "");  // its texts are not shown
    const drawn = pictures.map(each => [each.src ?? source(each), each.getBoundingClientRect().height]);
    const heading = Boolean(page.querySelector("h1, h2, h3, h4"));
    const bottom = Math.max(0, ...shown.map(each => each.getBoundingClientRect().bottom - top));
    return [bottom, page.innerText, Math.min(...sizes), heading, drawn];
})"""


def letters(drawn):
    """Return the height of the smallest letters of each picture: of its SVG, and as high as it is shown."""
    smallest = {}
    for source, shown in drawn:
        svg = base64.b64decode(source.partition("base64,")[2]).decode() if source.startswith("data:") else source
        title = re.search(r'aria-label="([^"]*)"|$', svg)[1]
        height = float(re.search(r'viewBox="\S+ \S+ \S+ (\S+)"', svg)[1])
        sizes = [re.search(r"font(?:-size)?[:=][^\d;]*([\d.]+)|$", text)[1] or 13 for text in TEXT.findall(svg)]
        smallest[title] = round(shown / height * min(map(float, sizes)), 1)
    return smallest


def types(*cells):
    notebook = as_slides(nbformat.v4.new_notebook(cells=list(cells)))
    return [(cell.source.splitlines()[0], cell.metadata.slideshow.slide_type) for cell in notebook.cells]


def test_headings_begin_slides_and_answers_become_notes():
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [
        markdown("# Title"),
        code("import torch"),
        markdown("## One\n\ntext\n\n## Two"),
        code("1 + 1"),
        markdown("So it is.\n\n### Explore\n\n1. Why?\n\n<details>\n\nBecause.\n\n</details>\n\n## Three"),
        code("# three.hint()\n# three.solution()"),
        markdown("```bash\n## a comment\n```"),
    ]
    assert types(*cells) == [
        *[("# Title", "slide"), ("import torch", "skip"), ("## One", "slide"), ("## Two", "slide")],
        *[("1 + 1", "-"), ("So it is.", "-"), ("### Explore", "subslide"), ("<details>", "notes")],
        *[("## Three", "slide"), ("# three.hint()", "skip"), ("```bash", "-")],
    ]


def tall_notebook():
    markdown, code, output = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell, nbformat.v4.new_output
    lines = "\n".join(f"line {number}" for number in range(60))
    picture = '<svg width="300" height="2000" viewBox="0 0 300 2000"><rect width="300" height="2000"/></svg>'
    outputs = [output("stream", text=lines), output("display_data", {"text/html": picture})]
    paragraphs = "\n\n".join(f"paragraph {number}" for number in range(60))
    return nbformat.v4.new_notebook(cells=[markdown(f"## Tall\n\n{paragraphs}"), code("show()", outputs=outputs)])


def folder_for_slides(folder):
    """Return a folder with a reveal.js that does nothing, so slides stand below each other; npm has the true one."""
    slides = folder / "slides"
    for script in ("dist/reveal.js", "plugin/notes/notes.js"):
        (slides / "reveal.js" / script).parent.mkdir(parents=True, exist_ok=True)
        (slides / "reveal.js" / script).write_text("Reveal = {initialize() { this.isOn = true; }}; RevealNotes = 0;")
    return slides


@pytest.fixture(scope="module")
def page():
    with chromium(WIDTH, HEIGHT) as page:
        yield page


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
@pytest.mark.parametrize("name", ["tall", "07_pipeline_parallel", "15_experts"])
def test_no_slide_is_taller_than_the_page(name, tmp_path, page):
    slides = folder_for_slides(tmp_path)
    [path] = [each for each in NOTEBOOKS if each.stem == name] or [tmp_path / "tall.ipynb"]
    if name == "tall":
        nbformat.write(tall_notebook(), path)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(write_slides(path, slides).as_uri())
    page.wait_for_function("Reveal.isOn")
    pages = page.evaluate(MEASURE)
    assert max(height for height, *_ in pages) <= HEIGHT
    assert all(heading for *_, heading, _ in pages)
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert not [url for url in asked if url.endswith(".svg")]  # a deck has its pictures
    if name == "tall":
        words = " ".join(text for _, text, *_ in pages).split()
        assert [int(number) for number in words if number.isdigit()] == [*range(60), *range(60)]
        assert 5 <= len(pages) <= 10
    else:
        assert min(size for _, _, size, *_ in pages) >= 24
        assert not [text for _, text, *_ in pages if "not attempted yet" in text]
        ends = "You will be able to", "not what a right run shows."  # a list or a table comes after these
        assert not [text for _, text, *_ in pages if text.strip().endswith(ends)]
        small = {title for *_, drawn in pages for title, size in letters(drawn).items() if size < 24}
        assert len(small) == {"07": 0, "15": 1}[name[:2]], small  # in 15, groups of seven axes stand below each other


ROWS = "all => all.map(table => [table.tHead.innerText.split(/\\s+/).join(' ').trim(), table.tBodies[0].rows.length])"


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_a_long_table_and_a_long_output_are_divided_in_large_letters(tmp_path, page):
    rows = "\n".join(f"| {number} | word |" for number in range(60))
    lines = "\n".join(f"line {number}" for number in range(60))
    output = nbformat.v4.new_output("stream", text=lines)
    cells = [nbformat.v4.new_markdown_cell(f"## Long\n\n| number | word |\n|---|---|\n{rows}")]
    cells += [nbformat.v4.new_code_cell("show()", outputs=[output])]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "long.ipynb")
    page.goto(write_slides(tmp_path / "long.ipynb", folder_for_slides(tmp_path)).as_uri())
    page.wait_for_function("Reveal.isOn")
    pages = page.evaluate(MEASURE)
    assert max(height for height, *_ in pages) <= HEIGHT and min(size for _, _, size, *_ in pages) >= 24
    tables = page.locator("table").evaluate_all(ROWS)
    assert {head for head, _ in tables} == {"number word"} and len(tables) > 1
    assert sum(rows for _, rows in tables) == 60
    words = " ".join(text for _, text, *_ in pages).split()
    assert [int(number) for number in words if number.isdigit()] == [*range(60), *range(60)]


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_an_explorer_on_a_slide_is_alive_where_the_folder_is_served(tmp_path, page):
    slides = folder_for_slides(tmp_path)
    [path] = [each for each in NOTEBOOKS if each.stem == "01_group_layout"]
    write_slides(path, slides)
    with serve_folder(slides) as address:
        page.goto(f"{address}/01_group_layout.html")
        page.wait_for_function("window.Reveal?.isOn")
        explorer = page.locator("[data-explorer]")
        explorer.scroll_into_view_if_needed()
        control = explorer.get_by_role("slider", name="tensor t")
        explorer.locator(".labkit-choice :enabled").first.wait_for()
        control.press("ArrowRight")
        explorer.get_by_text("= 4 · 4 · 1 = 16 = n").wait_for()
        pages = page.evaluate(MEASURE)
    assert max(height for height, *_ in pages) <= HEIGHT and min(size for _, _, size, *_ in pages) >= 24
    small = {title for *_, drawn in pages for title, size in letters(drawn).items() if size < 24}
    assert [title[:6] for title in small] == ["Orders"]  # two orders of groups, below each other


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_letters_of_a_living_timeline_stay_large_when_it_grows(tmp_path, page):
    output = nbformat.v4.new_output(
        "execute_result", {"text/plain": "schedule_explorer('1F1B', 4, 8)", "text/html": "-"}
    )
    cells = [nbformat.v4.new_markdown_cell("## A timeline"), nbformat.v4.new_code_cell("show()", outputs=[output])]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "timeline.ipynb")
    slides = folder_for_slides(tmp_path)
    write_slides(tmp_path / "timeline.ipynb", slides)
    with serve_folder(slides) as address:
        page.goto(f"{address}/timeline.html")
        page.wait_for_function("window.Reveal?.isOn")
        [first] = letters(page.evaluate(MEASURE)[-1][-1]).values()
        explorer = page.locator("[data-explorer]")
        explorer.scroll_into_view_if_needed()
        explorer.locator(".labkit-choice :enabled").first.wait_for()
        explorer.get_by_role("combobox", name="race against").select_option("V-Min")
        explorer.get_by_text("V-Min: 29.5 time units").wait_for()
        *_, (bottom, _, _, _, drawn) = page.evaluate(MEASURE)
        [grown] = letters(drawn).values()
    assert first >= 24 > grown >= 18
    assert bottom <= HEIGHT


def test_a_heading_shares_its_slide_with_the_one_below_it():
    cell = nbformat.v4.new_markdown_cell("## The agenda\n\n### The lab\n\nEight notebooks.")
    assert types(cell) == [("## The agenda", "slide"), ("### The lab", "-")]
