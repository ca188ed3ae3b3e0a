"""Numbers in an explorer's sentence that move its controls, and a rack that regroups, on a page in a browser."""

import pytest

from tests.support import browser, living_page

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")


@pytest.fixture(scope="module")
def page():
    with browser.chromium(1280, 720) as page, living_page.serve("layout_explorer", 16, 2, 4) as address:
        page.goto(address)
        page.locator(".labkit-choice :enabled").first.wait_for()
        yield page


def number(page, name):
    return page.get_by_role("spinbutton", name=name)


def product(page):
    return page.locator(".labkit-says").last.inner_text().partition(":")[0]


def show(page, state):
    page.evaluate("state => { location.hash = state; }", state)
    page.locator("[data-explorer]:not([aria-busy])").wait_for()


def drag(page, name, pixels):
    box = number(page, name).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + pixels, y, steps=12)
    page.wait_for_timeout(500)  # one answer after the other
    page.locator("[data-explorer]:not([aria-busy])").wait_for()
    page.mouse.up()


@pytest.mark.parametrize(
    ("name", "pixels", "shows"),
    [
        ("tensor t", 30, "p · t · d = 4 · 4 · 1 = 16 = n"),
        ("tensor t", -30, "p · t · d = 4 · 1 · 4 = 16 = n"),
        ("pipeline p", -80, "p · t · d = 1 · 2 · 8 = 16 = n"),
        ("data d", 30, "p · t · d = 4 · 2 · 3 = 24 = n"),
        ("tensor t", 80, "p · t · d = 4 · 6 · 1 = 24 = n"),  # past 5, which is refused
    ],
)
def test_a_number_is_dragged_as_its_slider(page, name, pixels, shows):
    show(page, "t=2")
    page.get_by_text("= 4 · 2 · 2 = 16 = n").wait_for()
    drag(page, name, pixels)
    assert product(page) == shows


def test_arrow_keys_move_a_number_which_keeps_the_focus(page):
    show(page, "t=2")
    page.get_by_text("= 4 · 2 · 2 = 16 = n").wait_for()
    number(page, "data d").focus()
    for key, shows in (
        ("ArrowRight", "4 · 2 · 3 = 24"),
        ("ArrowUp", "4 · 2 · 4 = 32"),
        ("ArrowLeft", "4 · 2 · 3 = 24"),
    ):
        page.keyboard.press(key)
        page.get_by_text(f"= {shows} = n").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "data d"
    assert number(page, "data d").get_attribute("aria-valuenow") == "3"


PLACE = "() => { const { x, y } = document.querySelector('[data-key=gpu8]').getBoundingClientRect(); return [x, y]; }"


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_same_boxes_travel_to_their_groups_or_stand_there_at_once(page, motion):
    page.emulate_media(reduced_motion=motion)
    show(page, "t=2")
    show(page, "one_rack=on")
    page.get_by_text("step 1 of 4").wait_for()
    page.evaluate("document.querySelector('[data-key=gpu8]').isThis = true")
    page.get_by_role("button", name="Forward").click()
    places = [page.evaluate(PLACE)]
    for _ in range(20):
        page.wait_for_timeout(50)
        places.append(page.evaluate(PLACE))
    assert page.evaluate("document.querySelector('[data-key=gpu8]').isThis")
    assert (len({tuple(place) for place in places}) > 2) == (motion == "no-preference")
    frame, gpu = (page.locator(f"[data-key='{key}']").bounding_box() for key in ("tp4.frame", "gpu8"))
    assert frame["x"] < gpu["x"] < frame["x"] + frame["width"] and frame["y"] < gpu["y"] < frame["y"] + frame["height"]
    assert page.get_by_text("step 2 of 4: 8 groups of 2, each inside a node").is_visible()  # in an aria-live region
    page.emulate_media(reduced_motion="no-preference")
