"""Timelines on a telephone: nothing is lost, letters have 16 pixels, and a stored one is folded like a living one."""

import base64
import json
import re
from pathlib import Path

import nbformat
import pytest

from course import working_copy
from course.explorers.schedule import NAMES, schedule_explorer
from course.pictures import stage
from course.pictures.layout import draw_layout
from course.pictures.narrow import BAND, START, WIDTH, fold, read, scene_of
from course.pictures.scene import MARGIN, Scene
from course.pictures.stacked import narrow_svgs
from course.pictures.steps import differences
from course.pictures.timeline import LEFT
from labkit.layout import ParallelLayout
from tests.support import browser

ROOT = Path(__file__).parents[3]
STORED = re.compile(r"data:image/svg\+xml;base64,([^\"]+)")
RACE = "1F1B", 4, 8, 2, 1.0, 2.0, 0.5, 8, "V-Min"
CHOICES = [(name, 4, 8) for name in NAMES] + [("1F1B", 1, 1), ("GPipe", 8, 24), RACE]


def drawn(*choice) -> Scene:
    return schedule_explorer(*choice).steps[0]


def stored_timelines():
    for name in "pipeline_schedules", "utilisation":
        yield name, (ROOT / f"pics/{name}.svg").read_text()
    for path in working_copy.notebooks(ROOT):
        for cell in nbformat.read(ROOT / path, as_version=4).cells:
            for output in cell.get("outputs", []):
                for code in STORED.findall(output.get("data", {}).get("text/html", "")):
                    svg = base64.b64decode(code).decode()
                    if ">rank 0<" in svg and ("% idle" in svg or "% computing" in svg):
                        yield cell.id, svg


def wrong(scene: Scene) -> list[str]:
    """What of a narrow picture is too small, or outside of it."""
    letters = [mark.key for mark in scene.marks if mark.text and mark.size < 16]
    outside = [mark.key for mark in scene.marks if not -1 <= mark.x <= mark.right <= WIDTH + MARGIN]
    below = [mark.key for mark in scene.marks if not -1 <= mark.y <= mark.bottom <= scene.height + 1]
    return letters + outside + below


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_all_of_a_timeline_is_in_its_bands(choice):
    wide = drawn(*choice)
    narrow = fold(wide)
    assert wrong(narrow) == []
    assert narrow.width == WIDTH
    end, right = narrow.clock[1] - START, read(wide.marks).right - LEFT
    for mark in wide.marks:
        pieces = [each for each in narrow.marks if each.key.partition("~")[0] == mark.key]
        if mark.fact and mark.shape == "box" and mark.x <= right and "held" not in mark.key:
            assert sum(each.width for each in pieces) / end == pytest.approx(mark.width / right, abs=1e-3)
            assert {each.fact for each in pieces} == {mark.fact}
            band, down = divmod(pieces[0].y - narrow.clock[2], narrow.clock[9])
            assert pieces[0].x - START + band * BAND == pytest.approx((mark.x - LEFT) / right * end, abs=0.5)
            assert down < narrow.clock[3] - narrow.clock[2]
    for letter in ("held0.number", "held0.peak"):
        assert letter in narrow.by_key


def test_ops_are_written_in_as_few_bands_as_that_takes():
    narrow = fold(drawn("1F1B", 4, 8))
    assert [narrow.by_key[f"2.{op}"].text for op in ("F0", "F7", "B0", "B7")] == ["0", "7", "0", "7"]
    assert narrow.height < 600 and narrow.clock[9] * 2 < 330  # both bands are in view while a control moves
    assert fold(drawn("1F1B", 2, 3)).clock[1] == START + BAND  # one band
    assert fold(drawn("1F1B", 2, 3)).by_key["0.B0"].text == "B0"


@pytest.mark.parametrize("choice", CHOICES[:-1], ids=str)  # where what is rounded decides nothing
def test_a_stored_timeline_is_folded_as_a_living_one(choice):
    wide = drawn(*choice)
    seen = [mark for mark in wide.marks if not mark.shy and not mark.live]
    [narrow] = narrow_svgs([wide.svg()])
    stored = scene_of(narrow).marks
    living = scene_of(fold(Scene(wide.title, wide.says, seen, 0.0), 48).svg()).marks
    assert [(each.shape, each.text, each.fill, each.ink) for each in stored] == [
        (each.shape, each.text, each.fill, each.ink) for each in living
    ]
    for one, other in zip(stored, living):
        places = [(each.x, each.y, each.width, each.height) for each in (one, other)]
        assert places[0] == pytest.approx(places[1], abs=2)  # what is stored is rounded


def test_every_timeline_of_the_notebooks_is_folded():
    found = list(stored_timelines())
    assert len(found) > 15
    for name, svg in found:
        [narrow] = narrow_svgs([svg])
        assert narrow, name
        assert wrong(scene_of(narrow)) == [], name


def test_another_picture_stays_as_it_is():
    scene = draw_layout(ParallelLayout(16, 2, 4), 8)
    assert fold(scene) is scene


@pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")
def test_the_playhead_goes_on_in_the_next_band():
    code, style = (Path(stage.__file__).with_suffix(suffix).read_text() for suffix in (".js", ".css"))
    scene = fold(drawn("1F1B", 4, 8))
    state = {"steps": differences([scene]), "seconds": 1, "clicks": False, "unfolded": False}
    show = """async ([code, state]) => {
      const { render } = (await import("data:text/javascript," + encodeURIComponent(code))).default;
      const model = { get: (name) => state[name], on() {}, off() {}, send() {} };
      render({ model, el: document.body.appendChild(document.createElement("div")) });
    }"""
    with browser.chromium(width=360, height=800) as page:
        page.set_content(f"<style>{style}</style>")
        page.evaluate(show, [code, state])
        handle = page.get_by_role("slider", name="moment")
        handle.focus()
        places = []
        for _ in range(40):
            place = [float(each) for each in re.findall(r"[-\d.]+", handle.get_attribute("transform"))]
            says = page.locator(".moment li").all_inner_texts()
            places.append((place, says))
            handle.press("ArrowRight")
        second = [place for place, _ in places if place[1] > scene.clock[3] + 50]
        assert len(second) > 5 and len(second) < len(places)
        assert all(START <= x <= WIDTH for (x, _), _ in places)
        assert places[0][1][0] == "At 0 time units" and "rank 0: F0 · holds 1" in places[0][1]
        assert places[-1][1][0] == "At 33 time units"
        box = page.locator("[data-key='3.B7']").bounding_box()  # in the second band: the handle is drawn to its middle
        start = handle.bounding_box()
        page.mouse.move(start["x"] + 16, start["y"] + 10)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5, steps=3)
        page.mouse.up()
        assert "rank 3: B7 · holds 1" in page.locator(".moment li").all_inner_texts()
        assert page.locator(".controls", has_text="Zoom in").is_hidden()
        assert json.dumps(scene.clock)  # as a page stores it
