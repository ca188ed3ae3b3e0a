"""A scene is one drawing: the SVG, the PNG, the table and the words for a screen reader come from the same marks."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from course.pictures import stage as stage_module
from course.pictures.parts import heading, legend
from course.pictures.scene import SMALLEST, WIDTH, Scene, arrow, box, label, line, text_width
from course.pictures.style import DP, INK, TP
from course.table import Table

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def scene():
    marks = [
        *heading("h", 10, 0, "Two ranks & a message"),
        box("one", 10, 60, 80, 40, TP, "rank 0", fact="Rank 0 <\nrank 1", tags=("a",), lights=("b",), means="computes"),
        box("two", 200, 60, 80, 40, DP, ("far too long for a box", "1\nB"), drop=True, means="waits"),
        arrow("message", [(90, 80), (200, 80)], INK, heads=2, dashed=True),
        line("shy", [(0, 0), (9, 9)], INK, shy=True),
        label("note", 10, 120, "a note"),
    ]
    table = Table(["rank", "does"], [["0", "computes <"], ["1", "waits"]], "Made up.")
    return Scene("Two ranks", "One sends", [*marks, *legend(marks, 10, 140)], 160, table=table)


def test_a_mark_is_a_group_with_its_fact_and_its_place(scene):
    groups = {mark.key: ElementTree.fromstring(mark.svg) for mark in scene.marks}
    assert all(group.get("data-key") == key for key, group in groups.items())
    assert groups["one"].get("aria-label") == "Rank 0 < rank 1"
    assert groups["one"].get("style") == "transform:translate(10px,60px)" and groups["one"].get("data-lights") == "b"
    assert [text.text for text in groups["two"].iter("text")] == ["1", "B"]
    assert groups["shy"].get("data-shy") == "1" and groups["two"].get("data-drop") == "1"
    assert len(list(groups["message"])) == 3  # the line and its two heads


def test_the_picture_is_what_is_seen_with_words(scene):
    root = ElementTree.fromstring(scene.svg())
    seen = [mark for mark in scene.marks if not mark.shy]
    assert [group.get("style") for group in root.iter(f"{SVG}g")] == [
        ElementTree.fromstring(mark.svg).get("style") for mark in seen
    ]
    assert "data-" not in scene.svg() and "Rank 0" not in scene.svg()
    assert (root.get("role"), root.get("aria-label")) == ("img", "Two ranks. One sends.")
    assert [root.find(f"{SVG}{tag}").text for tag in ("title", "desc")] == ["Two ranks", "One sends"]


def test_a_notebook_gets_the_picture_in_every_form_with_words(scene):
    bundle = scene._repr_mimebundle_()
    frame = ElementTree.fromstring(bundle["text/html"].split("<details>")[0].replace("></div>", "/></div>"))
    picture = frame.find("img")
    assert picture.get("alt") == "Two ranks. One sends."
    assert base64.b64decode(picture.get("src").partition(",")[2]).decode() == bundle["image/svg+xml"] == scene.svg()
    assert bundle["text/plain"] == ("Two ranks. One sends.\nrank  does\n0     computes <\n1     waits\nMade up.")
    assert "<td>computes &lt;</td>" in bundle["text/html"]


def test_on_a_narrow_page_the_smallest_text_still_has_eight_pixels(scene):
    """The picture scrolls then."""
    frame = ElementTree.fromstring(scene.html().split("<details>")[0].replace("></div>", "/></div>"))
    narrowest = float(re.search(r"min-width:([0-9.]+)px", frame.find("img").get("style"))[1])
    assert narrowest / scene.view[2] * SMALLEST >= 8 and "overflow-x:auto" in frame.get("style")
    [stage] = re.findall(r"NARROWEST = ([0-9.]+)", Path(stage_module.__file__).with_suffix(".js").read_text())
    assert narrowest == round(float(stage) * scene.view[2])


def test_panels_are_images_beside_each_other_with_all_marks():
    marks = [box(name, x, 0, 40, 20, "#ffffff", name) for name, x in (("left", 0), ("right", 500))]
    html = Scene("T", "S", marks, 40, panels=[(0, 0, 460, 40), (480, 0, 460, 40)]).html()
    images = [base64.b64decode(each).decode() for each in re.findall(r"base64,([^\"]*)", html)]
    assert [("left</text>" in svg, "right</text>" in svg) for svg in images] == [(True, False), (False, True)]
    assert html.count("vertical-align:top;width:49%;max-width:460px;min-width:336px") == 2
    assert images[1].startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox="480 0 460 40"')


def test_text_is_as_large_as_fits_and_never_too_small_to_read():
    for width in range(4, 120):
        mark = box("k", 0, 0, width, 20, TP, ("micro-batch 12", "F12"))
        assert not mark.text or (mark.size >= SMALLEST and text_width(mark.text, mark.size) <= width - 4)
    assert box("k", 0, 0, 200, 20, TP, ("micro-batch 12", "F12")).text == "micro-batch 12"
    assert box("k", 0, 0, 40, 20, TP, ("micro-batch 12", "F12")).text == "F12"
    assert box("k", 0, 0, 9, 20, TP, "F12").text == ""


def test_a_legend_has_each_meaning_once(scene):
    assert [mark.text for mark in scene.marks if mark.key.endswith(".word")] == ["computes", "waits"]


def test_a_legend_goes_on_in_the_next_row_where_the_picture_ends():
    marks = legend(
        [box(str(n), 0, 0, 9, 9, "#ffffff", means=f"{n}: a meaning of some length") for n in range(8)], 10, 20
    )
    words = [mark for mark in marks if mark.shape == "label"]
    assert {mark.y for mark in words} == {20, 42, 64}
    assert all(mark.x + text_width(mark.text) < WIDTH for mark in words)


@pytest.mark.parametrize("above", [{}, {0: "", 1: "over"}])
def test_a_corner_without_words_is_no_header(above):
    html = Table(("", "size"), [("a", "1")], above=above).html
    assert "<td></td><th" in html and not re.search("<th[^>]*></th>", html)
