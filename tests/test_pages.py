"""The notebooks as web pages: links lead somewhere, nothing is loaded from elsewhere, nothing is too wide."""

import shutil

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe

from course.publish import living, pages
from tests.support.browser import chromium, find_chromium
from tests.test_notebooks import ROOT

TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth;
    const scrolls = each => each.parentElement
        && (["auto", "scroll"].includes(getComputedStyle(each.parentElement).overflowX) || scrolls(each.parentElement));
    const inside = [...document.querySelectorAll("main *")].filter(each => each.getClientRects().length);
    const wide = inside.filter(each => each.getBoundingClientRect().right > width + 1 && !scrolls(each));
    const cut = inside.filter(each => getComputedStyle(each).overflowX === "hidden"
        && each.clientWidth > 50 && each.scrollWidth > each.clientWidth + 1);
    return [document.documentElement.scrollWidth - width, [...wide, ...cut].map(each => each.outerHTML.slice(0, 80))];
}"""

HEADERS = "() => [...document.querySelectorAll('.jp-RenderedMarkdown p > img')].map(image => image.clientWidth)"
PROSE = """() => [...document.querySelectorAll('.jp-OutputArea-output > p')].filter(
    each => each.getBoundingClientRect().right > document.documentElement.clientWidth).length"""
TABLES_AS_WHEN_AWAKE = """() => {
    const all = [];
    for (const name of ["layout", "routing", "schedule"]) {
        const place = document.querySelector(`[data-explorer=${name}_explorer]`);
        place.className = "labkit-explorer labkit-place";
        for (const each of place.querySelectorAll("details")) each.open = true;
        for (const each of place.querySelectorAll("table")) all.push([name, each.scrollWidth - each.clientWidth]);
    }
    return all;
}"""
TABLES = "() => Math.max(0, ...[...document.querySelectorAll('main table')].map(table => table.clientWidth))"


def violations(page):
    """Return what axe-core finds to be serious or worse on a whole page."""
    found = Axe().run(page, None, {"resultTypes": ["violations"]}).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in serious]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project of two notebooks, a source file and a picture."""
    root = tmp_path / "project"
    for name, text in {
        "Start_Here.ipynb": "[one](notebooks/1.ipynb#Its-heading) ![drawn](pics/a.svg)",
        "notebooks/1.ipynb": "## Its heading\n[home](../Start_Here.ipynb) [code](../labkit/x.py) [web](https://x.org)",
        "labkit/x.py": "def f(): ...",
        "pics/a.svg": '<svg xmlns="http://www.w3.org/2000/svg"/>',
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".ipynb":
            write_notebook(path, text)
    monkeypatch.setattr(pages, "ROOT", root)
    return root


def write_notebook(path, markdown, html=""):
    output = nbformat.v4.new_output("display_data", {"text/html": html})
    code = nbformat.v4.new_code_cell("x = 1", outputs=[output] if html else [])
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(markdown), code]), path)


def put_what_all_pages_need(site):
    living.copy_files(site / "lab")
    (site / pages.as_page(pages.PLAY)).touch()


def test_links_lead_to_pages_of_the_site(project, tmp_path):
    pages.write_site(["Start_Here.ipynb"], tmp_path / "site")
    made = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.*")}
    written = {"index.html", "notebooks/1.html", "labkit/x.py.html", "pics/a.svg"}
    assert made == written | {"lab/notebook.css", "lab/code.css"}
    put_what_all_pages_need(tmp_path / "site")
    assert pages.dead_links(tmp_path / "site") == []
    home, one = ((tmp_path / "site" / name).read_text() for name in ("index.html", "notebooks/1.html"))
    assert 'href="notebooks/1.html#Its-heading"' in home and 'src="pics/a.svg"' in home
    assert 'href="../index.html"' in one and 'href="../labkit/x.py.html"' in one


def test_what_answers_a_question_in_words_is_folded(project, tmp_path):
    write_notebook(project / "asks.ipynb", "**Predict.** How long?", "<p>8 ms</p>")
    pages.write_page("asks.ipynb", tmp_path)
    assert '<details data-answers=""><summary>The result</summary>' in (tmp_path / "asks.html").read_text()


def test_what_leads_nowhere_is_listed(project, tmp_path):
    markdown = "[gone](notebooks/2.ipynb) [one](notebooks/1.ipynb#No-heading) ![gone](pics/b.svg)"
    write_notebook(project / "Start_Here.ipynb", markdown, '<script src="https://cdn.example/x.js"></script>')
    pages.write_site(["Start_Here.ipynb"], tmp_path / "site")
    put_what_all_pages_need(tmp_path / "site")
    dead = "https://cdn.example/x.js", "notebooks/1.html#No-heading", "notebooks/2.ipynb", "pics/b.svg"
    assert sorted(pages.dead_links(tmp_path / "site")) == [f"index.html: {each}" for each in dead]


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_real_pages_are_whole_and_no_wider_than_the_screen(tmp_path, monkeypatch):
    names = ["Start_Here.ipynb", "notebooks/04_row_parallel.ipynb"]
    shutil.copytree(ROOT / "pics", tmp_path / "pics")
    linked = set().union(*(pages.write_page(name, tmp_path) for name in names))
    for name in linked - set(names):  # they are written by `make site` only
        (tmp_path / pages.as_page(name)).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / pages.as_page(name)).touch()
    put_what_all_pages_need(tmp_path)
    assert pages.dead_links(tmp_path) == [] and len(linked) > 12
    pages.write_page("labkit/layout.py", tmp_path)
    notebook = nbformat.read(ROOT / names[1], as_version=4)
    shown = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "text/html" in output.get("data", {})
    ]
    wide = tmp_path / "wide.ipynb"
    write_notebook(wide, "text", f"<table><tr><td style='white-space: nowrap'>{'word ' * 100}</td></tr></table>")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    pages.write_page("wide.ipynb", tmp_path)
    asked = []
    with chromium() as page:
        page.on("request", lambda request: asked.append(request.url))
        for name in ["wide.ipynb", "labkit/layout.py", *names]:
            page.goto((tmp_path / pages.as_page(name)).as_uri())
            for width in (1400, 390):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate(TOO_WIDE) == [0, []]
                assert name == "wide.ipynb" or violations(page) == []  # keys reach what scrolls, too
            assert page.evaluate(HEADERS) in ([], [700])  # on a telephone, still large enough to read
            assert page.evaluate(TABLES) <= 390
            assert page.evaluate(PROSE) == 0  # a question is read without scrolling sideways
        assert page.locator(".jp-RenderedHTML").count() == len(shown) > 3
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.skipif(not find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_a_telephone_shows_all_columns_of_an_explorers_table(tmp_path):
    put_what_all_pages_need(tmp_path)
    pages.write_page(pages.PLAY, tmp_path)
    with chromium(390, 800) as page:
        page.goto((tmp_path / pages.as_page(pages.PLAY)).as_uri())
        hidden = page.evaluate(TABLES_AS_WHEN_AWAKE)
    assert len(hidden) > 3 and [each for each in hidden if each[1] > 1] == []
