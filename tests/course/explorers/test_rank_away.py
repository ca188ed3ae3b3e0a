"""A rank is dragged out of a collective on a page, by mouse and by keys: the others stand still."""

import pytest
from playwright.sync_api import expect

from tests.support import browser, living_page

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")


@pytest.fixture(scope="module")
def page():
    with browser.chromium(1280, 800) as page, living_page.serve("collective_explorer", "all-reduce", 4) as address:
        page.goto(address)
        page.locator(".labkit-choice :enabled").first.wait_for()
        yield page


def settle(page):
    """Wait until no mark of the picture before fades any more."""
    expect(page.locator("svg .leaving")).to_have_count(0)


def walk_to(page, key):
    """Go by arrow keys from mark to mark, to the one with this key: those of ranks are at the left."""
    settle(page)
    page.locator("svg g[tabindex='0']").focus()
    for arrow in 30 * ["ArrowLeft"] + 8 * ["ArrowDown"] + 8 * ["ArrowUp"]:
        if page.evaluate("document.activeElement.dataset.key") == key:
            return
        page.keyboard.press(arrow)
    raise AssertionError(f"no key leads to {key}")


def test_it_is_dragged_away_and_back(page):
    for start, end in (("0.rank2", "away"), ("0.rank2", "state2")):
        places = [page.locator(f"[data-key='{key}']").bounding_box() for key in (start, end)]
        x, y, to_x, to_y = (place[side] + 8 for place in places for side in "xy")
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(to_x, to_y, steps=5)
        page.mouse.up()
        if end == "away":
            page.get_by_text("Rank 2 does not come, and this stands still").wait_for()
            assert page.locator("[role=alert]").inner_text().count("waits to receive from rank") == 3
            page.wait_for_timeout(1000)  # it has moved there
    page.get_by_text("step 1 of").wait_for()


def test_it_is_pressed_by_keys(page):
    walk_to(page, "0.rank1")
    page.keyboard.press("Enter")
    page.get_by_text("Rank 1 does not come, and this stands still").wait_for()
    walk_to(page, "0.rank1")  # in its place beside the title
    page.keyboard.press(" ")
    page.get_by_text("step 1 of").wait_for()


def test_keys_reach_the_picture_when_the_mark_that_had_them_is_gone(page):
    settle(page)
    page.locator("svg g[tabindex='0']").evaluate("mark => mark.removeAttribute('tabindex')")
    page.locator("[data-key='0.start3.3']").evaluate("mark => mark.setAttribute('tabindex', 0)")  # not of a standstill
    page.locator("[data-key='0.rank2']").click()
    page.get_by_text("Rank 2 does not come, and this stands still").wait_for()
    settle(page)
    assert page.locator("svg g[tabindex='0']").count() == 1
    page.locator("[data-key='0.rank2']").click()
    page.get_by_text("step 1 of").wait_for()
