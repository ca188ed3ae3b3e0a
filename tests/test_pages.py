"""What the site is made of: links lead somewhere, answers are folded, symbols lead to their card."""

import re

import nbformat
import pytest

from course.publish import extension, living, pages, source, styles


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project of two notebooks, a text, a source file and a picture."""
    root = tmp_path / "project"
    for name, text in {
        "Start_Here.ipynb": "# Home\n[one](notebooks/1.ipynb#Its-heading) ![drawn](pics/a.svg) [folder](labkit)",
        "notebooks/1.ipynb": "# One\n## Its heading\n[home](../Start_Here.ipynb) [code](../course/x.py) "
        "[web](https://x.org) [text](../notes.md#the-labs-own)",
        "notes.md": "# Notes\n## The lab's own\n[first](#the-labs-own)",
        "course/x.py": "def f(): ...",
        "labkit/y.py": "",
        "pics/a.svg": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 70 50"/>',
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".ipynb":
            write_notebook(path, text)
    monkeypatch.setattr(source, "ROOT", root)
    monkeypatch.setattr(source, "OF_THE_SITE", {"index.md": lambda: "# Door\n"})
    return root


def write_notebook(path, markdown, html=""):
    output = nbformat.v4.new_output("display_data", {"text/html": html})
    code = nbformat.v4.new_code_cell("x = 1", outputs=[output] if html else [])
    cells = [nbformat.v4.new_markdown_cell(markdown), code]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), path)


@pytest.fixture
def site(tmp_path):
    return tmp_path / "site"


def test_links_lead_to_pages_of_the_site(project, site):
    assert pages.write_site(["Start_Here.ipynb"], site) == []
    living.copy_files(site / "lab")
    made = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert made == {"Start_Here.html", "notebooks/1.html", "notes.html", "course/x.py.html"} | {
        f"{name}.html" for name in ("index", "api", "search")
    }
    assert pages.dead_links(site) == []
    home, one = ((site / name).read_text() for name in ("Start_Here.html", "notebooks/1.html"))
    assert 'href="notebooks/1.html#its-heading"' in home and 'width="70" height="50" src="_images/a.svg"' in home
    assert " folder</p>" in home  # it has no page
    assert 'href="../Start_Here.html"' in one and 'href="../course/x.py.html"' in one
    assert 'href="../notes.html#the-lab-s-own"' in one  # as docutils names it


def test_what_leads_nowhere_is_listed(project, site):
    markdown = "# Home\n[gone](notebooks/2.ipynb) [one](notebooks/1.ipynb#No-heading) ![gone](pics/b.svg)"
    html = '<script src="https://cdn.example/x.js"></script><a href="away.html">there</a>'
    write_notebook(project / "Start_Here.ipynb", markdown, html)
    warnings = "\n".join(pages.write_site(["Start_Here.ipynb"], site))
    living.copy_files(site / "lab")
    assert "target not found: 'notebooks/2.ipynb'" in warnings and "image file not readable: pics/b.svg" in warnings
    dead = pages.dead_links(site)
    for each in ("https://cdn.example/x.js", "away.html", "#notebooks/2.ipynb", "notebooks/1.html#no-heading"):
        assert f"Start_Here.html: {each}" in dead


def test_no_page_runs_or_styles_what_the_policy_refuses(project, site):
    pages.write_site(["Start_Here.ipynb"], site)
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "Content-Security-Policy" in text and "fontawesome" not in text
        assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=|http-equiv=\"refresh", text)
    assert "font-face" not in "".join(path.read_text() for path in site.rglob("*.css"))


def test_of_a_style_sheet_stays_what_pages_and_scripts_name():
    sheet = """
    @charset "utf-8"; /* of .no-one */ @font-face { src: url(a.woff) }
    .there, .gone > a { content: "}" } .gone { color: red } #here:not(.gone), a:is(.gone, :hover) { color: blue }
    [data-theme=dark] .p-0\\.5 { top: 0 } main h7 { top: 1px } @keyframes gone { from { top: 0 } }
    @media print { .gone { top: 0 } } @media (max-width: 1px) { .gone { top: 0 } .there { top: 2px } }
    """
    kept = re.sub(r"\s+", " ", styles.needed(sheet, {"there", "here", "main", "a", "p-0.5"})).strip()
    expected = """
    @charset "utf-8";.there{ content: "}" }#here:not(.gone),a:is(.gone, :hover){ color: blue }
    [data-theme=dark] .p-0\\.5{ top: 0 }@keyframes gone{ from { top: 0 } }@media (max-width: 1px){.there{ top: 2px }}
    """
    assert kept.replace(" ", "") == re.sub(r"\s+", "", expected)


def test_what_scripts_and_pages_name_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<nav class="one two" id="three">four</nav>')
    (tmp_path / "a.js").write_text('node.className = "five-6"')
    (tmp_path / "searchindex.js").write_text("words of the text")
    assert {"nav", "one", "two", "three", "five-6"} <= (found := styles.names(tmp_path, [])) and "text" not in found


def test_what_answers_a_question_in_words_is_folded(project, site):
    write_notebook(project / "Start_Here.ipynb", "# Asks\n**Predict.** How long?", "<p>8 ms</p>")
    pages.write_site(["Start_Here.ipynb"], site)
    text = (site / "Start_Here.html").read_text()
    folded = re.search(r'<details data-answers=""><summary>The result</summary>(.*?)</details>', text, re.DOTALL)
    assert "<p>8 ms</p>" in folded[1] and "x" not in re.sub("<.*?>", "", folded[1])


def test_the_first_use_of_a_symbol_leads_to_the_card(project, site, monkeypatch):
    symbols = (source.TEXTS / "symbols.md").read_text
    monkeypatch.setattr(source, "OF_THE_SITE", {"index.md": lambda: "# Door\n", "symbols.md": symbols})
    markdown = "# t = 1\n\nThe rank's `t = 1`, s. At t = 2 and d = n / (t · p), B = 8.\n\n| c |\n|---|\n| m |"
    write_notebook(project / "notebooks/1.ipynb", markdown)
    pages.write_site(["notebooks/1.ipynb", "symbols.md"], site)
    text = (site / "notebooks/1.html").read_text()
    linked = re.findall(r'href="\.\./symbols\.html#symbol-(\w+)" title="[^"]+">(\w+)</a>', text)
    assert linked == [(each, each) for each in "tdnpBcm"]
    card = (site / "symbols.html").read_text()
    assert all(f'id="symbol-{each}"' in card for each in extension.SYMBOLS)
    assert list(extension.SYMBOLS) == ["n", "t", "p", "d", "c", "ep", "etp", "v", "m", "b", "B", "s", "h"]


def test_a_module_has_a_page_with_its_docstrings_and_its_source(monkeypatch, site):
    monkeypatch.setattr(source, "OF_THE_SITE", {"index.md": lambda: "# Door\n"})
    assert pages.write_site(["labkit/grid.py"], site, follow=False) == []
    text = (site / "labkit/grid.py.html").read_text()
    assert 'id="labkit.grid.Grid"' in text and 'id="source"' in text
    assert 'href="labkit/grid.py.html"' in (site / "api.html").read_text()
    modules = set(source.modules())
    assert {"labkit/layout.py", "labtrain/trainer.py", "labkit/launch/frames.py"} <= modules and len(modules) > 80
