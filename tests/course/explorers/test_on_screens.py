"""Where an explorer's picture is while a control moves: in view on a telephone, beside it in a low window."""

from pathlib import Path

import pytest

from course.explorers import choice
from course.explorers.schedule import schedule_explorer
from course.pictures import stage
from course.pictures.steps import differences
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

CODE = Path(stage.__file__).with_suffix(".js").read_text()
CSS = "".join(Path(each.__file__).with_suffix(".css").read_text() for each in (stage, choice))
SHOW = """async ([code, steps, isPhone]) => {
  const { render } = (await import("data:text/javascript," + encodeURIComponent(code))).default;
  const state = { steps, seconds: 1, clicks: false, unfolded: true };
  const model = { get: (name) => state[name], on() {}, off() {}, send() {} };
  const explorer = document.querySelector(".labkit-explorer"), row = explorer.firstElementChild;
  const drawing = explorer.appendChild(document.createElement("div"));
  if (isPhone) explorer.prepend(drawing);  // as page.js does
  render({ model, el: drawing });
}"""
CONTROL = '<div class="labkit-choice" data-look="slider"><label>t</label><input type="range"><output>2</output></div>'
SAYS = '<div class="widget-html"><div class="labkit-says" role="status">8 copies of the model</div></div>'
MOVED = '<div class="labkit-says moved" role="alert">t is 4 now, not 3.</div>'


@pytest.fixture(scope="module")
def page():
    with browser.chromium() as page:
        yield page


def show(page, width, height):
    page.set_viewport_size({"width": width, "height": height})
    row = f'<div class="widget-box" style="display: flex; flex-flow: column">{9 * CONTROL}</div>'
    page.set_content(
        "<style>body { margin: 8px } .jp-OutputArea-output { overflow-x: auto } "
        f"@media (max-width: 600px) {{ .labkit-choice {{ min-height: 60px }} }} {CSS}</style>"
        f'<div class="jp-OutputArea-output"><div class="labkit-explorer">{row}{SAYS}</div></div>'
        '<div style="height: 900px"></div>'
    )
    page.evaluate(SHOW, [CODE, differences(schedule_explorer("1F1B", 4, 8).steps), width < 600])
    page.wait_for_timeout(100)


@pytest.mark.parametrize("number", [0, 4, 8])
def test_on_a_telephone_the_picture_is_in_view_whichever_control_moves(page, number):
    show(page, 390, 844)
    page.locator(".labkit-choice").nth(number).evaluate("place => place.scrollIntoView({ block: 'end' })")
    picture, control = (page.locator(each).bounding_box() for each in (".paper", f".labkit-choice >> nth={number}"))
    assert picture["y"] >= -1 and 100 < picture["height"] <= 0.45 * 844 + 3
    assert picture["y"] + picture["height"] <= control["y"] and control["y"] + control["height"] <= 845
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # what is wider scrolls inside
    sizes = page.locator(".labkit-choice label, .labkit-says, .controls button").evaluate_all(
        "all => all.map(each => parseFloat(getComputedStyle(each).fontSize))"
    )
    assert min(sizes) >= 16


def test_on_a_telephone_a_timeline_that_is_played_says_its_states_and_scrolls_with_its_playhead(page):
    show(page, 390, 844)
    page.get_by_role("button", name="Forward").click()
    assert page.locator(".moment li").first.bounding_box()["height"] > 10
    for _ in range(60):
        page.get_by_role("button", name="Forward").click()
    handle, paper = (page.locator(each).bounding_box() for each in (".clock [role=slider]", ".paper"))
    assert paper["x"] <= handle["x"] and handle["x"] + handle["width"] <= paper["x"] + paper["width"] + 40


@pytest.mark.parametrize(("width", "height", "is_beside"), [(1280, 720, True), (1280, 1000, False), (900, 720, False)])
def test_in_a_wide_and_low_window_the_controls_are_beside_the_picture(page, width, height, is_beside):
    show(page, width, height)
    control, picture = (page.locator(each).first.bounding_box() for each in (".labkit-choice", ".paper"))
    assert (picture["x"] >= control["x"] + control["width"]) == is_beside
    if is_beside:
        last = page.locator(".labkit-choice").last.bounding_box()
        assert picture["y"] + picture["height"] <= height and last["y"] + last["height"] <= height


@pytest.mark.parametrize("width", [900, 1280])
def test_a_warning_does_not_move_the_picture(page, width):
    show(page, width, 720)
    before = page.locator(".paper").bounding_box()
    page.locator(".widget-html").evaluate(f"place => place.insertAdjacentHTML('afterbegin', `{MOVED}`)")
    assert page.locator(".paper").bounding_box() == before
