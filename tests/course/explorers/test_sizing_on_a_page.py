"""The sizing explorer on a page: all of it in one window, and what one more and one less would do."""

import pytest

from tests.support import browser, living_page

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")
MODEL = dict(world_size=512, batch_size=1024, tp_size=8, pp_size=4, recompute="none", sequence_parallel=True)


@pytest.fixture(scope="module")
def address():
    with living_page.serve("sizing_explorer", "Llama 3, 70 billion", **MODEL, fused_attention=True) as address:
        yield address


@pytest.fixture(scope="module")
def page(address):
    with browser.chromium(1280, 800) as page:
        page.goto(address)
        page.locator(".labkit-choice :enabled").first.wait_for()
        yield page


@pytest.mark.parametrize("height", [720, 800])
def test_controls_sentence_days_memory_and_time_are_in_one_window(page, height):
    page.set_viewport_size({"width": 1280, "height": height})
    page.wait_for_timeout(200)
    shown = page.locator(".labkit-choice, .labkit-says, .paper").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect()).map(({ right, bottom }) => [right, bottom])"
    )
    assert len(shown) == 23 and max(right for right, _ in shown) <= 1280
    assert max(bottom for _, bottom in shown) <= height
    controls = [page.get_by_role("slider", name=name).bounding_box() for name in ("tensor t", "micro-batch b")]
    picture = page.locator(".paper").bounding_box()
    assert all(control["x"] + control["width"] < picture["x"] for control in controls)


def test_a_slider_says_what_one_more_and_one_less_would_do(page):
    fact = page.locator(".fact")
    page.get_by_role("slider", name="tensor t").hover()
    fact.get_by_text("tensor t: one less, 4: ").wait_for()
    slider = page.get_by_role("slider", name="pipeline p")
    slider.hover()
    fact.get_by_text("pipeline p: one less, 3: ").wait_for()
    assert "does not divide" in fact.inner_text().partition(";")[0]
    slider.focus()
    slider.press("ArrowRight")  # on to the next that divides
    fact.get_by_text("pipeline p: one less, 7: ").wait_for()
    slider = page.get_by_role("slider", name="batch B", exact=True)
    slider.hover()
    fact.get_by_text("batch B: one less, 512: ").wait_for()
    assert fact.inner_text().count(" days, ") == fact.inner_text().count(" GB") == 2
    slider.focus()
    page.mouse.move(5, 5)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_function("!document.querySelector('.fact').textContent", timeout=5000)


def test_its_numbers_are_dragged_too(page):
    number = page.get_by_role("spinbutton", name="data d")
    before = int(number.get_attribute("aria-valuenow"))
    number.focus()
    page.keyboard.press("ArrowRight")
    page.locator(f"[aria-label='data d']:not([aria-valuenow='{before}'])").wait_for()
