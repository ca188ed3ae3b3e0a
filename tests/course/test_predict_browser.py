"""A question in a browser: answered by mouse and by keys, with names and states, and nothing axe-core objects to.

The page has the real form and the real question; only the messages between them are handed over by hand.
"""

import pytest
from axe_playwright_python.sync_playwright import Axe

from course.predict import Choice, Form, Number, Order
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

SHOW = """state => {
    const heard = {}, model = {
        get: name => state[name],
        set: (name, value) => { state[name] = value; },
        on: (event, call) => { heard[event] = call; },
        off: () => {},
        save_changes: async () => {
            state.feedback = await window.answer(state.answer);
            heard["change:answer"]();
            heard["change:feedback"]();
        },
    };
    document.body.replaceChildren(document.createElement("main"));
    window.predict.render({ model, el: document.querySelector("main") });
}"""


@pytest.fixture(scope="module")
def page():
    with browser.chromium(800, 400) as page:
        page.set_content('<html lang="en"><title>A question</title><body>')
        source = (browser.ROOT / "course" / "predict.js").read_text()
        page.add_script_tag(type="module", content=source.replace("export default", "window.predict ="))
        page.add_style_tag(path=browser.ROOT / "course" / "predict.css")
        page.wait_for_function("window.predict")
        page.answered = None
        page.expose_function("answer", lambda answer: page.answered(answer))
        yield page


def show(page, question):
    def answer(value):
        question.answer(value)
        return question.feedback()

    page.answered = answer
    state = Form(question).get_state()
    page.evaluate(SHOW, {name: value for name, value in state.items() if not name.startswith("_")})
    return page.get_by_role("status")


def assert_axe_finds_nothing(page):
    assert [each["id"] for each in Axe().run(page, {"include": [["main"]]}).response["violations"]] == []


def test_a_number_is_typed_and_kept_by_enter(page):
    question = Number("00.bytes", "How much is sent, in `GB`?", {17: "You forgot the layers."}, unit="GB")
    question.compare(290)
    status = show(page, question)
    assert "does not count as a prediction." in status.inner_text()
    page.get_by_role("button", name="Keep my answer").click()
    assert question.last() is None  # an empty answer is not one
    page.get_by_role("textbox", name="answer in GB").focus()
    page.keyboard.type("17")
    page.keyboard.press("Enter")
    page.get_by_text("You forgot the layers.").wait_for()
    assert status.locator("b").inner_text() == "✗ not right yet"
    assert_axe_finds_nothing(page)
    page.get_by_role("textbox").fill("2,5")
    page.keyboard.press("Enter")
    assert question.last() == 17, "a comma is refused"
    page.get_by_role("textbox").fill("290")
    page.get_by_role("textbox").dispatch_event("keydown", {"key": "Enter"})  # of which JupyterLab leaves no more
    page.get_by_text("Your first answer was: 17 GB.").wait_for()
    assert page.locator("code").inner_text() == "GB"


def test_a_choice_is_made_by_keys_and_kept_only_by_the_button(page):
    question = Choice("00.worst", "Which is worse?", ["<b>t</b> = 16", "t = 8", "t = 4"], {"t = 8": "It fits."})
    status = show(page, question)
    page.get_by_role("radio", name="<b>t</b> = 16").focus()
    page.keyboard.press("ArrowDown")
    assert page.get_by_role("radio", name="t = 8").is_checked() and question.last() is None
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Run the next cell to see.").wait_for()
    assert status.locator("b").inner_text() == "○ kept"
    assert_axe_finds_nothing(page)
    question.compare("<b>t</b> = 16")
    page.get_by_label("<b>t</b> = 16").click()
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("✓ correct").wait_for()
    assert question._kept()["first"] == "t = 8"


def test_an_order_is_made_by_keys_and_by_mouse(page):
    question = Order("00.order", "What sends most?", {"pp": "pipeline", "dp": "data", "tp": "tensor"})
    question.compare(["tp", "dp", "pp"])
    show(page, question)
    up = page.get_by_role("button", name="Move tensor up")
    assert page.get_by_role("button", name="Move tensor down").get_attribute("aria-disabled") == "true"
    up.focus()
    for _ in range(3):  # once more than there are places
        page.keyboard.press("Enter")
    assert page.get_by_text("tensor is now number 1.").count() == 1
    assert up.evaluate("up => up === document.activeElement") and up.get_attribute("aria-disabled") == "true"
    assert_axe_finds_nothing(page)
    page.get_by_role("button", name="Keep my answer").click()
    page.get_by_text("In the right place: 1 of 3.").wait_for()
    page.get_by_role("button", name="Move pipeline down").click()
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("✓ correct").wait_for()
    assert question.last() == ["tensor", "data", "pipeline"]
