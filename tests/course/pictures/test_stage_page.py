"""stage.js in a browser, without Jupyter: who takes clicks, and how keys reach them."""

import json
from pathlib import Path

import pytest

from course.pictures import stage
from course.pictures.scene import Scene, box
from course.pictures.stage import differences
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

CODE = Path(stage.__file__).with_suffix(".js").read_text()
SHOW = """async ([code, state]) => {
  const { render } = (await import("data:text/javascript," + encodeURIComponent(code))).default;
  window.sent = [];
  const model = { get: (name) => state[name], on() {}, off() {}, send: (message) => window.sent.push(message) };
  render({ model, el: document.body.appendChild(document.createElement("div")) });
}"""
MARKS = [
    box("cell", 0, 0, 40, 40, "#ffffff", "35", fact="35 days", click=True),
    box("plain", 60, 0, 40, 40, "#ffffff", "a", fact="Says something"),
    box("op", 120, 0, 40, 40, "#ffffff", "F0", fact="F0", drag=True, drop=True),
]


@pytest.fixture(scope="module")
def page():
    with browser.chromium() as page:
        yield page


@pytest.mark.parametrize(("clicks", "buttons"), [(True, ["35 days", "F0"]), (False, ["F0"])])
def test_what_takes_clicks_is_a_button(page, clicks, buttons):
    page.set_content("")
    page.evaluate(SHOW, [CODE, {"steps": differences([Scene("T", "S", MARKS, 50)]), "seconds": 1, "clicks": clicks}])
    roles = "all => all.map(group => group.getAttribute('aria-label'))"
    assert page.locator("g[role=button]").evaluate_all(roles) == buttons


def test_keys_reach_every_button_and_press_it(page):
    page.set_content("")
    page.evaluate(SHOW, [CODE, {"steps": differences([Scene("T", "S", MARKS, 50)]), "seconds": 1, "clicks": True}])
    page.locator("svg g[tabindex='0']").focus()
    for key in ("Enter", "ArrowRight", "ArrowRight", " "):
        page.keyboard.press(key)
    assert json.loads(page.evaluate("JSON.stringify(window.sent)")) == [{"click": "cell"}, {"click": "op"}]


def test_a_mouse_that_rests_dims_nothing_any_longer_and_facts_are_above_the_picture(page):
    page.set_content("")
    marks = [box(name, 60 * x, 0, 40, 40, "#ffffff", fact=name, same="one" * (x < 2), tags=(name,), lights=(name,))
             for x, name in enumerate("abc")]  # fmt: skip
    page.evaluate(SHOW, [CODE, {"steps": differences([Scene("T", "S", marks, 50)]), "seconds": 1, "clicks": False}])
    page.locator("[data-key=a]").dispatch_event("pointerover")
    assert page.locator("g.lit").evaluate_all("all => all.map(each => each.dataset.key)") == [
        "a",
        "b",
    ]  # the same thing
    page.wait_for_function("() => !document.querySelector('svg.lighting')", timeout=10_000)
    assert page.locator("g.lit").count() == 2
    assert page.locator(".fact").bounding_box()["y"] < page.locator(".paper").bounding_box()["y"]
