"""stage.js in a browser, without Jupyter: who takes clicks, and how keys reach them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from course.explorers import choice
from course.pictures import stage
from course.pictures.layout import axes_in_use, draw_layout
from course.pictures.scene import Scene, box
from course.pictures.steps import differences
from course.pictures.timeline import draw_timelines
from course.sizing import simulate
from labkit.layout import ParallelLayout
from labkit.schedules import gpipe, interleaved
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

CODE, CSS = (Path(stage.__file__).with_suffix(suffix).read_text() for suffix in (".js", ".css"))
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


def test_a_mark_that_is_dragged_stays_under_the_mouse(page):
    page.set_content(f"<style>body {{ margin: 0; }} {CSS}</style>")
    before = page.viewport_size
    page.set_viewport_size({"width": 588, "height": 800})  # where a picture is condensed
    page.evaluate(SHOW, [CODE, {"steps": differences([Scene("T", "S", MARKS, 50)]), "seconds": 1, "clicks": True}])
    op = page.locator("[data-key=op]")
    place = op.bounding_box()
    page.mouse.move(place["x"] + 3, place["y"] + 4)
    page.mouse.down()
    page.mouse.move(300, 140, steps=3)
    now = op.bounding_box()
    page.mouse.up()
    page.set_viewport_size(before)
    assert (now["x"] + 3, now["y"] + 4) == pytest.approx((300, 140), abs=1)


def test_a_mouse_that_rests_dims_nothing_any_longer_and_facts_are_above_the_picture(page):
    page.set_content("")
    marks = [box(name, 60 * x, 0, 40, 40, "#ffffff", fact=name, same="one" * (x < 2), tags=(name,), lights=(name,))
             for x, name in enumerate("abc")]  # fmt: skip
    page.evaluate(SHOW, [CODE, {"steps": differences([Scene("T", "S", marks, 50)]), "seconds": 1, "clicks": False}])
    page.locator("[data-key=a]").dispatch_event("mouseover")
    assert page.locator("g.lit").evaluate_all("all => all.map(each => each.dataset.key)") == [
        "a",
        "b",
    ]  # the same thing
    page.wait_for_function("() => !document.querySelector('svg.lighting')", timeout=10_000)
    assert page.locator("g.lit").count() == 2
    assert page.locator(".fact").bounding_box()["y"] < page.locator(".paper").bounding_box()["y"]


PANELS = (
    "() => ['left', 'right'].map(key => document.querySelector(`[data-key=${key}]`).getBoundingClientRect().toJSON())"
)


def test_panels_stand_below_each_other_on_a_narrow_screen_and_go_back(page):
    marks = [box(name, x, 0, 200, 40, "#ffffff", name) for name, x in (("left", 0), ("right", 480))]
    scene = Scene("T", "S", marks, 50, panels=[(0, 0, 460, 50), (480, 0, 460, 50)])
    before = page.viewport_size
    page.set_content("<style>.paper { overflow-x: auto; } svg { width: 100%; }</style>")
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate(SHOW, [CODE, {"steps": differences([scene]), "seconds": 1, "clicks": False}])
    for width in (390, 1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(
            f"document.querySelector('svg').viewBox.baseVal.width === {476 if width == 390 else 956}"
        )
        left, right = page.evaluate(PANELS)
        assert (left["x"] == right["x"], left["y"] == right["y"]) == (width == 390, width != 390)
        assert right["right"] <= width and (width != 390 or right["top"] > left["bottom"])
    page.set_viewport_size(before)


def test_a_picture_that_is_a_little_too_wide_is_condensed_sideways_and_letters_keep_their_height(page):
    scene = draw_timelines([simulate(gpipe(2, 2))], ["GPipe"], in_flight=True)
    before = page.viewport_size
    page.set_content(f"<style>body {{ margin: 0; }} {CSS}</style>")
    page.evaluate(SHOW, [CODE, {"steps": differences([scene]), "seconds": 1, "clicks": False}])
    paper, handle = page.locator(".paper"), page.get_by_role("slider", name="moment")
    for width, condensed in ((588, 0.84), (760, 1.0), (450, None)):  # JupyterLab in 768 pixels, a tablet, a telephone
        page.set_viewport_size({"width": width, "height": 800})
        across, down, scrolls = paper.evaluate(
            "p => [p.firstChild.getScreenCTM().a, p.firstChild.getScreenCTM().d, p.scrollWidth > p.clientWidth]"
        )
        assert scrolls == (condensed is None) and down >= 0.729
        assert condensed is None or across / down == pytest.approx(condensed, abs=0.01)
    page.set_viewport_size({"width": 588, "height": 800})
    place = handle.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    page.mouse.down()
    op = page.locator("[data-key='0.B0']").bounding_box()
    page.mouse.move(op["x"] + op["width"] / 2, op["y"], steps=3)
    page.mouse.up()
    assert page.locator(".moment li").nth(1).inner_text() == "rank 0: B0 · holds 2"  # the playhead is where one points
    page.set_viewport_size(before)


def test_what_a_mark_says_follows_it_from_step_to_step(page):
    """As in the schedule builder, where a click puts an op into its row: it has a place then."""
    op, other = (box(name, 60, 0, 40, 40, "#ffffff", fact=f"{name} has no place") for name in ("op", "other"))
    placed = replace(op, fact="op runs at 0")
    page.set_content("")
    page.mouse.move(5, 700)
    steps = [Scene("T", "S", [op, other], 50), Scene("T", "S", [placed, other], 50), Scene("T", "S", [other], 50)]
    page.evaluate(SHOW, [CODE, {"steps": differences(steps), "seconds": 1, "clicks": False}])
    fact, forward = page.locator(".fact"), page.get_by_role("button", name="Forward")
    page.locator("[data-key=op]").dispatch_event("mouseover")
    assert fact.inner_text() == "op has no place"
    forward.dispatch_event("click")
    assert fact.inner_text() == "op runs at 0"
    forward.dispatch_event("click")
    assert fact.inner_text() == ""  # it is gone


def test_a_hint_leaves_a_menu_as_wide_as_it_was(page):
    code, widths = Path(choice.__file__).with_suffix(".js").read_text(), []
    for hints in ([], ["", "would set chunks v to 1 and pipeline p to 8"]):
        page.set_content("")
        state = {"words": ["none", "selective"], "index": 0, "description": "recompute", "hints": hints, "look": "menu"}
        page.evaluate(SHOW, [code, state])
        widths.append(page.locator("select").evaluate("menu => menu.getBoundingClientRect().width"))
    assert widths[0] == widths[1] > 60 and page.locator("option").nth(1).inner_text().endswith("p to 8)")


def test_what_is_clicked_is_followed_from_step_to_step_until_escape(page):
    def scene(x):
        marks = [box("one", x, 0, 40, 40, "#ffffff", "1", fact="One", tags=("x", "row1"))]
        marks += [box("copy", x, 60, 40, 40, "#ffffff", "1", fact="Copy", tags=("row1",))]
        marks += [box("two", 300, 0, 40, 40, "#ffffff", "2", fact="Two", tags=("row2",))]
        return Scene("T", "S", marks, 120, journeys={"": "Click one.", "row1": "Row 1 travels.", "row2": "Row 2."})

    page.set_content("")
    page.evaluate(SHOW, [CODE, {"steps": differences([scene(0), scene(100)]), "seconds": 1, "clicks": False}])
    lit = "() => [...document.querySelectorAll('svg.following g.lit')].map(mark => mark.dataset.key)"
    fact = page.locator(".fact")
    assert fact.inner_text() == "Click one." and page.locator("g[role=button]").count() == 3
    page.locator("[data-key=one]").click()
    page.get_by_role("button", name="Forward").click()
    page.mouse.move(5, 700)
    assert fact.inner_text() == "Row 1 travels." and page.evaluate(lit) == ["one", "copy"]
    page.locator("g[tabindex='0']").focus()
    assert fact.inner_text() == "One"
    page.keyboard.press("Escape")
    assert fact.inner_text() == "Click one." and page.evaluate(lit) == []


def test_a_playhead_that_one_drags_says_what_each_rank_does_and_points_to_what_is_awaited(page):
    page.set_content("")
    scene = draw_timelines([simulate(gpipe(2, 2), message_seconds=0.5)], ["GPipe"], in_flight=True)
    page.evaluate(SHOW, [CODE, {"steps": differences([scene]), "seconds": 1, "clicks": False}])
    handle, texts = page.get_by_role("slider", name="moment"), page.locator(".moment li")
    start = ["At 0 time units", "rank 0: F0 · holds 1"]
    waits = "rank 1: idle: F0 waits for F0 of rank 0 until 1.5 time units · holds 0"
    assert texts.all_inner_texts() == [*start, waits]
    bar = page.locator("[data-key='held0.now'] rect")
    page.keyboard.press("Tab")
    handle.focus()
    before, place = float(bar.get_attribute("width")), handle.bounding_box()
    left, right, _, _, end, *_ = scene.clock
    scale = page.evaluate("document.querySelector('.clock').getScreenCTM().a")
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 1.25 / end * (right - left) * scale, y, steps=3)
    page.mouse.up()
    page.mouse.move(x, y)  # it was let go
    assert texts.all_inner_texts() == ["At 1.25 time units", "rank 0: F1, send F0 under way · holds 2", waits]
    assert float(bar.get_attribute("width")) == pytest.approx(2 * before)
    to_x, to_y = page.locator(".clock > path").nth(1).get_attribute("d").split("L")[1].split("M")[0].split()
    message = scene.by_key["message0.0.0"]
    assert message.x <= float(to_x) <= message.right
    assert message.y <= float(to_y) <= message.bottom
    page.keyboard.press("ArrowRight")  # the next moment at which something starts
    assert handle.get_attribute("aria-valuetext") == "1.5 time units; rank 0: F1 · holds 2; rank 1: F0 · holds 1"
    page.keyboard.press("End")
    assert texts.all_inner_texts()[2] == "rank 1: idle: it has done all its work · holds 0"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert texts.all_inner_texts()[0] == "At 1 time unit"


DRAWN = """() => [...document.querySelectorAll("svg > g > [data-key]:not([data-key^=held])")].map(mark =>
    [mark.dataset.key, new DOMMatrix(mark.style.transform).toString(), mark.innerHTML])"""


def test_time_is_zoomed_by_keys_wheel_and_buttons_with_the_axis_and_the_playhead(page):
    page.set_content(f"<style>{CSS}</style>")
    scene = draw_timelines([simulate(interleaved(8, 24, 4))], ["interleaved"], in_flight=True)
    page.evaluate(SHOW, [CODE, {"steps": differences([scene]), "seconds": 1, "clicks": False}])
    left, right, _, _, end, *_ = scene.clock
    op, start, words = (
        page.locator("[data-key='0.F12.1']"),
        scene.by_key["0.F12.1"],
        page.locator("[data-name^=F] text"),
    )
    whole, handle = page.evaluate(DRAWN), page.get_by_role("slider", name="moment")

    def middle():
        x, wide = op.evaluate(
            "op => [new DOMMatrix(op.style.transform).e, Number(op.firstChild.getAttribute('width'))]"
        )
        return x + wide / 2, wide

    assert words.count() == 0  # hairlines
    op.evaluate("op => { op.setAttribute('tabindex', 0); op.focus(); }")
    for _ in range(5):
        page.keyboard.press("+")
    assert op.text_content() == "F12.1" and words.count() > 20
    assert middle() == pytest.approx((start.x + start.width / 2, 32 * start.width), rel=0.03)  # it stays where it is
    ticks = [float(text) for text in page.locator(".ticks text").all_text_contents()]
    assert len(ticks) > 3 and end / 64 < ticks[-1] - ticks[0] <= end / 32
    assert page.locator("[data-key^=tick] >> visible=true").count() == 0
    at = float(handle.get_attribute("aria-valuetext").partition(" ")[0])
    assert at == pytest.approx(ticks[0], abs=ticks[1] - ticks[0])  # what is shown has the playhead in it
    handle.focus()
    for _ in range(60):
        page.keyboard.press("ArrowRight")  # and goes with it
    assert left < float(re.findall(r"[\d.]+", handle.get_attribute("transform"))[0]) < right
    assert float(page.locator(".ticks text").last.text_content()) > ticks[-1]
    page.keyboard.press("0")
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom out").click()
    box = page.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.wheel(0, 30)
    assert page.locator("svg.zoomed").count() == 0  # the page scrolls
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    page.keyboard.up("Control")
    page.locator("svg.zoomed").wait_for()
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.move(0, 0)
    assert page.locator("svg.zoomed").count() == 0 and page.get_by_role("button", name="Zoom out").is_disabled()
    assert page.evaluate(DRAWN) == whole


def test_after_a_click_on_a_gpu_its_peers_stay_lit_in_all_grids_until_a_second(page):
    layout, after = ParallelLayout(16, 2, 4), ParallelLayout(16, 4, 2)
    page.set_content(f"<style>{CSS}</style>")
    page.evaluate(SHOW, [CODE, {"steps": differences([draw_layout(layout), draw_layout(after)]), "seconds": 1}])

    def lit():
        same = "all => all.map(each => [each.dataset.key.split('.')[0], each.dataset.same])"
        return {tuple(each) for each in page.locator("svg.lighting g.lit[data-same]").evaluate_all(same)}

    def peers(layout):
        axes = axes_in_use(layout)
        return {(axis, f"gpu{rank}") for axis in axes for rank in layout.group_of(5, axis)}

    gpu = page.locator("[data-same=gpu5]").nth(1)
    gpu.click()
    page.mouse.move(5, 900)
    page.wait_for_timeout(2100)  # longer than a mouse rests
    assert lit() == peers(layout) and "GPU 5: tensor group C" in page.locator(".fact").inner_text()
    page.get_by_role("button", name="Forward").click()
    page.mouse.move(5, 900)
    assert lit() == peers(after) != peers(layout)
    gpu.click()
    page.mouse.move(5, 900)
    assert lit() == set() and page.locator(".fact").inner_text().startswith("Outlined")


TIMELINE = draw_timelines([simulate(gpipe(2, 2))], ["GPipe"], in_flight=True)
SEEN = """() => ({ line: getComputedStyle(document.querySelector(".clock > path")).display,
  states: [...document.querySelectorAll(".states text")].map((text) => text.textContent),
  future: document.querySelectorAll(".future").length,
  travellers: [...document.querySelectorAll(".travellers text")].map((text) => text.textContent),
  places: [...document.querySelectorAll(".travellers > g")].map((each) => each.getAttribute("transform")),
  heard: document.querySelector(".heard").textContent, hour: document.querySelector(".hour").textContent })"""


def show_timeline(page, scene=TIMELINE):
    page.set_content(f"<style>{CSS}</style>")
    page.evaluate(SHOW, [CODE, {"steps": differences([scene]), "seconds": 1, "clicks": False}])


def test_a_timeline_opens_calmly_and_shows_its_playhead_from_the_first_touch(page):
    show_timeline(page)
    assert page.evaluate(SEEN)["line"] == "none"
    assert not page.locator(".states").is_visible()
    assert page.locator(".moment li").count() == 3  # for those who hear the page
    page.get_by_role("button", name="Forward").click()
    seen = page.evaluate(SEEN)
    assert seen["line"] != "none" and seen["hour"] == "At 1 time unit"
    assert seen["states"] == ["F1", "", "F0", "idle 1"]
    assert page.locator("[data-key='held0.now']").evaluate("bar => getComputedStyle(bar).visibility") == "hidden"


def test_a_clock_plays_pauses_and_says_in_words_where_it_is_but_not_on_each_frame(page):
    show_timeline(page)
    page.evaluate("""() => { window.said = []; new MutationObserver(() => window.said.push(1)).observe(
        document.querySelector(".heard"), { childList: true, characterData: true, subtree: true }); }""")
    page.get_by_role("combobox", name="speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => document.querySelectorAll('.travellers > g').length > 2", polling=10)
    before = page.evaluate(SEEN)
    assert before["future"] > 0 and before["heard"] == "" and page.evaluate("window.said") == []
    page.wait_for_function("place => document.querySelector('.hour').textContent !== place", arg=before["hour"])
    page.get_by_role("button", name="Pause").click()
    paused = page.evaluate(SEEN)
    assert paused["heard"].startswith(paused["hour"]) and "rank 1: " in paused["heard"]
    page.wait_for_timeout(100)
    assert page.evaluate(SEEN) == paused
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Play").wait_for(timeout=30_000)  # at the end
    end = page.evaluate(SEEN)
    assert end["hour"] == "At 9 time units" and end["future"] == 0 and end["travellers"] == []
    assert end["states"] == ["B1", "idle 3", "done", "idle 3"]


def test_whom_motion_is_too_much_gets_steps(page):
    page.emulate_media(reduced_motion="reduce")
    show_timeline(page)
    page.evaluate("""() => { window.places = new Set(); window.hours = []; new MutationObserver(() => {
        window.hours.push(document.querySelector(".hour").textContent);
        const flying = document.querySelectorAll(".travellers > g");
        for (const each of flying) window.places.add(each.getAttribute("transform"));
    }).observe(document.querySelector(".hour"), { childList: true }); }""")
    page.get_by_role("combobox", name="speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Play").wait_for(timeout=30_000)
    page.emulate_media(reduced_motion="no-preference")
    hours = page.evaluate("[...new Set(window.hours)].map((text) => Number(text.split(' ')[1]))")
    starts = sorted({mark.x for mark in TIMELINE.marks if mark.name})
    left, right, _, _, end, *_ = TIMELINE.clock
    assert hours == pytest.approx([(x - left) / (right - left) * end for x in starts[1:]] + [end])
    places = {tuple(map(float, re.findall(r"[-\d.]+", place))) for place in page.evaluate("[...window.places]")}
    assert places <= {(round(x, 1), round(y, 1)) for each in TIMELINE.travellers for _, x, y in each.frames}


def test_without_a_column_beside_it_a_row_says_its_state_on_a_slip_at_its_end(page):
    show_timeline(page, draw_timelines([simulate(gpipe(2, 2))], ["GPipe"]))
    handle, slips = page.get_by_role("slider", name="moment"), page.locator(".states rect")
    lefts = []
    for key in ("ArrowRight", "End"):
        handle.press(key)
        lefts.append(slips.first.bounding_box()["x"])
        assert abs(lefts[-1] - handle.bounding_box()["x"]) > 200  # not over what it is about
    assert lefts[1] < lefts[0] and page.evaluate(SEEN)["states"] == ["B1", "", "done", ""]


def test_steps_that_last_longer_are_played_longer_and_heard_only_now_and_then(page):
    scenes = [
        Scene("T", f"at {x}", [box("one", 300 * x, 0, 40, 40, "#ffffff")], 50, lasts=(0, 0.5, 1)[x]) for x in range(3)
    ]
    page.set_content(f"<style>{CSS}</style>")
    page.evaluate(SHOW, [CODE, {"steps": differences(scenes), "seconds": 0.4, "clicks": False}])
    page.evaluate("""() => { window.said = []; const svg = document.querySelector("svg");
        const heard = document.querySelector(".controls [aria-live]");
        const look = getComputedStyle(svg.querySelector("g[data-key]"));
        const live = () => heard.getAttribute("aria-live");
        const tell = () => window.said.push([heard.textContent, live(), look.transitionDuration]);
        const all = { childList: true, characterData: true, subtree: true };
        new MutationObserver(tell).observe(document.querySelector(".controls"), all); }""")
    page.get_by_role("button", name="Play").click()
    page.get_by_text("step 3 of 3").wait_for()
    page.get_by_role("button", name="Play").wait_for()
    said = page.evaluate("window.said")
    assert {"0.2s", "0.4s"} <= {lengths.split(",")[0] for *_, lengths in said}
    assert ("step 2 of 3: at 1", "polite") not in {(text, live) for text, live, _ in said}  # on the way
    assert said[-1][:2] == ["step 3 of 3: at 2", "polite"]
    page.get_by_role("button", name="Back").click()
    assert page.locator("[aria-live=polite]", has_text="step 2 of 3: at 1").count() == 1


def test_a_way_that_is_lit_sends_slowly_where_it_leaves_its_node_and_not_for_whom_motion_is_too_much(page):
    layout = ParallelLayout(16, 2, 4, order="pp-tp-dp")
    page.set_content(f"<style>{CSS}</style>")
    page.evaluate(SHOW, [CODE, {"steps": differences([draw_layout(layout, gpus_per_node=8)]), "seconds": 1}])
    sends = """() => [...document.querySelectorAll("g[data-line].lit > path")].map((path) => {
        const { animationName, animationDuration } = getComputedStyle(path);
        return [path.hasAttribute("stroke-dasharray"), animationName, animationDuration];
    })"""
    page.locator("[data-same=gpu5]").first.dispatch_event("mouseover")
    seen = {tuple(each) for each in page.evaluate(sends)}
    assert seen == {(True, "labkit-send", "1.5s"), (False, "labkit-send", "0.5s")}
    page.emulate_media(reduced_motion="reduce")
    assert {name for _, name, _ in page.evaluate(sends)} == {"none"}
    page.emulate_media(reduced_motion="no-preference")
