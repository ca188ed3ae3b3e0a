"""The lab as its reader has it: JupyterLab in a browser, moved by keys, in both themes, with and without a kernel.

One server and one page serve all tests of this file: both take seconds to start. Screenshots go to screenshots/.
"""

import json
import os
import re
import time
from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe

from course import working_copy
from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

SCREENSHOTS = browser.ROOT / "screenshots"
EXPLORERS = {
    "layout_explorer()": "course.explorers.jupyter",
    "collective_explorer()": "course.explorers.collectives_on_ranks",
    "shard_explorer()": "course.explorers.jupyter",
    "batch_explorer()": "course.explorers.jupyter",
    "schedule_explorer()": "course.explorers.jupyter",
    "schedule_builder()": "course.explorers.jupyter",
    "sizing_explorer()": "course.explorers.jupyter",
    "training_explorer(TrainConfig(steps=1000, micro_batch_size=1))": "course.explorers.training",
}
OF_EACH_KIND = [call for call in EXPLORERS if re.match("shard|sizing|schedule_builder|training", call)]
"""Of sliders, menus, buttons and boxes, of a picture that takes clicks, and of a button beside the controls."""
CONTROLS = ", ".join(f".labkit-choice {tag}:enabled" for tag in ("input", "select", "button"))
STEPS = """from course.pictures.scene import Scene, box
from course.pictures.stage import Stage
from course.pictures.style import DP, TP
def scene(x, fill):
    marks = [box("one", x, 20, 60, 40, fill, "one", fact=f"One is at {x}.", tags=("a",), lights=("b",))]
    return Scene("Steps", f"at {x}", [*marks, box("two", 400, 20, 60, 40, DP, "two", fact="Two.", tags=("b",)),
                                      box("three", 600, 20, 60, 40, DP, "three", fact="Three.", tags=("c",))], 80)
Stage(scene(10, TP), scene(100, TP), scene(200, DP), seconds=0.3)"""
RELOADED = [
    "from course.explorers.jupyter import shard_explorer\nshard_explorer()",
    "from course.predict import Number\nNumber('00.reloaded', 'How many?')",
]
COPY = "my_copy"
IMAGES = "[...document.querySelectorAll('.jp-Notebook .jp-MarkdownOutput img')]"
CELLS = """from course.explorers.jupyter import View
print(len(View._made), "cells made explorers")"""
RANKS = """from labkit.launch import launch
import torch.distributed as dist
launch(lambda: print("I am rank", dist.get_rank()), world_size=4)"""


@pytest.fixture(scope="module")
def page():
    with browser.chromium() as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    nbformat.write(one_of_each_kind(), folder / "stored.ipynb")
    cells = [f"from {module} import {call.partition('(')[0]}\n{call}" for call, module in EXPLORERS.items()]
    cells[-1] = f"from labtrain import TrainConfig\n{cells[-1]}"
    notebook = new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in (*cells, STEPS, CELLS, RANKS)]
    nbformat.write(notebook, folder / "all.ipynb")
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in RELOADED]
    nbformat.write(notebook, folder / "reloaded.ipynb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))  # where notebooks are signed
        working_copy.make(folder / COPY)
    with browser.jupyterlab(folder) as address:
        yield address


def new_notebook():
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # else a dialog asks for one
    return nbformat.v4.new_notebook(metadata={"kernelspec": kernel})


def stored_outputs():
    """All outputs with HTML that the notebooks have stored, by the name of their notebook."""
    for path in working_copy.notebooks(browser.ROOT)[1:]:
        for cell in nbformat.read(browser.ROOT / path, as_version=4).cells:
            for output in cell.get("outputs", []):
                if "text/html" in output.get("data", {}):
                    yield path.name, output


def one_of_each_kind():
    """A notebook of the stored outputs that have a tag, class or colour which none before had: each takes a while."""
    notebook, known = new_notebook(), set()
    for name, output in stored_outputs():
        html = re.sub(r'\b(src|alt|title|aria-label|id|data-[\w-]+)="[^"]*"', "", output.data["text/html"])
        tags = {re.sub(r"(?<![#\w])[\d.]+", "", tag) for tag in re.findall(r"<[a-z]\w*[^>]*>", html)}
        if tags - known:
            known |= tags
            notebook.cells.append(nbformat.v4.new_code_cell("# " + name, outputs=[output]))
    return notebook


def use_theme(page, name):
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", f"JupyterLab {name}")
    page.wait_for_function("dark => document.body.dataset.jpThemeLight === String(!dark)", arg=name == "Dark")


# -- notebooks ---------------------------------------------------------------------------------------------------------


def test_a_readers_copy_shows_each_picture(page, address):
    """As `make lab` opens it: two notebooks in JupyterLab, one of each folder, and then each picture by itself."""
    for name in working_copy.notebooks(browser.ROOT)[:2]:
        browser.open_notebook(page, address, f"{COPY}/{name}")
        page.wait_for_function(f"() => {IMAGES}.length && {IMAGES}.every(image => image.complete)", polling=100)
        assert page.evaluate(f"() => {IMAGES}.filter(image => !image.naturalWidth).map(image => image.src)") == []
    loaded = {path: natural_width(page, path) for path in linked_pictures()}
    assert len(loaded) > 15 and not [path for path, width in loaded.items() if not width]


def linked_pictures():
    """The path within a copy of each picture that a notebook or README shows."""
    paths = set()
    for name in (*working_copy.notebooks(browser.ROOT), Path("README.md")):
        text = (browser.ROOT / name).read_text()
        links = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'<img[^>]* src=\\?"([\w./]+)\\?"', text)
        paths |= {os.path.normpath(name.parent / link) for link in links}
    return sorted(paths)


def natural_width(page, path):
    """The width of a picture of the copy as the browser gets it from Jupyter's server; 0 if it does not get it."""
    load = """async address => {
        const image = new Image();
        image.src = address;
        await image.decode().catch(() => {});
        return image.naturalWidth;
    }"""
    return page.evaluate(load, re.sub("/lab/.*", f"/files/{COPY}/{path}", page.url))


def test_stored_notebooks_show_their_pictures_with_words_in_both_themes(page, address):
    """As somebody opens them who has not run them, and does not trust them."""
    images = [tag for _, output in stored_outputs() for tag in re.findall("<img[^>]*>", output.data["text/html"])]
    assert len(images) > 100 and all(re.search(r'\balt="[^"]', image) for image in images)
    browser.open_notebook(page, address, "stored.ipynb")
    assert page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.get(1).trusted") is False
    for number in range(page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.length")):
        page.evaluate(f"() => window.jupyterapp.shell.currentWidget.content.scrollToItem({number})")
    pictures = page.locator(".jp-OutputArea-output img").all()
    assert pictures and all(image.get_attribute("alt") for image in pictures)
    assert page.get_by_text("Error displaying widget").count() == 0
    for theme in ("Light", "Dark"):
        assert violations(page, ".jp-Notebook .jp-OutputArea-output", theme) == []


def violations(page, where, theme):
    """What axe-core finds to be serious or worse in what the lab makes. Dark differs from Light in colours only."""
    use_theme(page, theme)
    only = {"runOnly": {"type": "rule", "values": ["color-contrast"]}} if theme == "Dark" else {}
    found = Axe().run(page, {"include": [[where]]}, {"resultTypes": ["violations"], **only}).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in serious]


# -- explorers, on one page --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explorers(page, address):
    """The notebook of all explorers, run. Pictures move only where a test asks for it: each frame takes time."""
    page.emulate_media(reduced_motion="reduce")
    browser.open_notebook(page, address, "all.ipynb")
    browser.run_all_cells(page)
    return page


def cell_of(page, call):
    browser.scroll_to_cell(page, call)
    cell = page.locator(".jp-CodeCell", has_text=call)
    cell.locator(".labkit-stage").first.wait_for(timeout=90 * browser.SECONDS)
    return cell


@pytest.fixture(params=OF_EACH_KIND)
def explorer(request, explorers):
    return cell_of(explorers, request.param)


def shown(explorer):
    """What Python has drawn and written, not what the browser makes of a control."""
    texts = explorer.locator(".widget-html-content").all_inner_texts()
    return texts, explorer.locator("svg").first.inner_html()


def wait_until(page, condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert condition()


def test_tab_reaches_every_control_and_the_picture(page, explorer):
    controls = explorer.locator(CONTROLS)
    controls.first.focus()
    reached, in_picture = 1, False
    for _ in range(100):
        page.keyboard.press("Tab")
        if not explorer.evaluate("cell => cell.contains(document.activeElement)"):
            break
        reached += explorer.evaluate(f"() => document.activeElement.matches({json.dumps(CONTROLS)})")
        in_picture = explorer.evaluate("() => !!document.activeElement.closest('.labkit-stage svg')")
        if in_picture:
            assert explorer.locator(".fact").first.inner_text()  # says what has the focus
            break
    assert in_picture and reached == controls.count() > 1


def test_keys_change_what_is_shown(page, explorer):
    before = shown(explorer)
    control = explorer.locator(CONTROLS).first
    control.press("ArrowDown" if control.evaluate("control => control.tagName") == "SELECT" else "ArrowRight")
    if control.evaluate("control => control.tagName") == "BUTTON":
        explorer.locator(".labkit-choice button").nth(1).press("Space")
    wait_until(page, lambda: shown(explorer) != before)


@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_axe_finds_nothing_serious_in_an_explorer(page, explorers, theme):
    use_theme(page, theme)
    for call in EXPLORERS:
        name, cell = call.partition("(")[0], cell_of(page, call)
        cell.screenshot(path=SCREENSHOTS / f"{theme.lower()}_{name}.png")
        assert cell.locator(".labkit-stage svg [tabindex='0']").count(), f"no key reaches the picture of {name}"
    assert violations(page, ".labkit-explorer", theme) == []


@pytest.mark.parametrize("width", [1400, 1024])
def test_everything_fits_the_width_of_the_window(page, explorers, width):
    page.set_viewport_size({"width": width, "height": 1000})
    cell = cell_of(page, "layout_explorer()")
    cell.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"group_layout_{width}.png")
    box, picture = cell.bounding_box(), cell.locator(".paper").first.bounding_box()
    assert picture["x"] + picture["width"] <= box["x"] + box["width"] <= width
    sizes = cell.locator("svg text").evaluate_all("all => all.map(text => text.getBoundingClientRect().height)")
    assert min(sizes) >= 9  # of letters set in 11 pixels, at the width of this column
    page.set_viewport_size({"width": 1400, "height": 1000})


# -- pictures that one can touch ---------------------------------------------------------------------------------------


def test_pointing_at_a_gpu_says_its_groups_and_lights_its_peers(page, explorers):
    cell = cell_of(page, "layout_explorer()")
    gpu = cell.locator("svg [data-same]").first
    gpu.hover()
    wait_until(page, lambda: cell.locator(".fact").inner_text().startswith("GPU 0: tensor group A"))
    lit = cell.locator("svg g.lit[data-same]")
    assert lit.count() == sum(1 for _ in lit.all()) > 3
    faded = cell.locator("svg g[data-same]:not(.lit)").first
    wait_until(page, lambda: float(faded.evaluate("mark => getComputedStyle(mark).opacity")) < 0.5)


def test_a_picture_of_steps_is_played_and_stepped_through(page, explorers):
    page.emulate_media(reduced_motion="no-preference")
    cell = cell_of(page, "seconds=0.3")
    one = cell.locator("[data-key=one]")

    def place():
        return one.evaluate("one => new DOMMatrix(getComputedStyle(one).transform).e")

    assert cell.get_by_text("step 1 of 3: at 10").count() and place() == 10
    cell.get_by_role("button", name="Forward").click()
    assert 10 <= place() <= 100  # on its way
    wait_until(page, lambda: place() == 100)
    cell.get_by_role("button", name="Back").click()
    wait_until(page, lambda: place() == 10)
    cell.get_by_role("button", name="Play").click()
    wait_until(page, lambda: cell.get_by_text("step 3 of 3: at 200").count() == 1)
    assert cell.locator("[data-key=one] rect").get_attribute("fill") == "#009E73"
    assert cell.get_by_role("button", name="Play").count() == 1  # it has stopped at the end
    page.emulate_media(reduced_motion="reduce")


def test_the_keys_go_from_mark_to_mark(page, explorers):
    cell = cell_of(page, "seconds=0.3")
    cell.locator("[data-key=one]").focus()
    wait_until(page, lambda: "One is at" in cell.locator(".fact").inner_text())
    page.keyboard.press("ArrowRight")
    wait_until(page, lambda: cell.locator(".fact").inner_text() == "Two.")
    page.keyboard.press("ArrowRight")
    wait_until(page, lambda: cell.locator(".fact").inner_text() == "Three.")


def test_who_wants_no_motion_gets_none(page, explorers):
    cell = cell_of(page, "seconds=0.3")

    def moves():
        one = cell.locator("[data-key=one]")
        return set(one.evaluate("one => getComputedStyle(one).transitionDuration").split(", "))

    page.emulate_media(reduced_motion="no-preference")
    cell.get_by_role("button", name=re.compile("Back|Forward"), disabled=False).first.click()  # draws it anew
    assert moves() != {"0s"}
    page.emulate_media(reduced_motion="reduce")
    assert moves() == {"0s"}


def test_an_op_is_dragged_into_its_row_and_back(page, explorers):
    cell = cell_of(page, "schedule_builder()")
    cell.scroll_into_view_if_needed()

    def drag(key, zone):
        marks = [cell.locator(f"[data-key='{each}']").bounding_box() for each in (key, zone)]
        start, end = [(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2) for mark in marks]
        page.mouse.move(*start)
        page.mouse.down()
        page.mouse.move(*end, steps=5)
        page.mouse.up()

    op, says = cell.locator("[data-key='op.0.F0']"), cell.locator(".labkit-says")
    num_ops = cell.locator("[data-key^='op.']").count()
    drag("op.0.F0", "row.0")
    wait_until(page, lambda: says.inner_text() == f"{num_ops - 1} ops to place.")
    wait_until(page, lambda: op.get_attribute("aria-label") == "F0 of rank 0 runs at 0")
    drag("op.0.F0", "tray.0")
    wait_until(page, lambda: "click an op, or drag it" in says.inner_text())
    wait_until(page, lambda: "has no place yet" in op.get_attribute("aria-label"))


def test_a_button_that_would_move_others_says_so_before_the_click(page, explorers):
    cell = cell_of(page, "training_explorer(")
    button = cell.locator(".labkit-choice button.gives-way").first
    said = button.get_attribute("aria-description")
    assert button.inner_text() == "8" and said == "does not fit: tensor t = 8 does not divide num attention heads = 4"
    button.press("Space")
    wait_until(page, lambda: said.partition(": ")[2] in cell.locator(".labkit-says.moved").inner_text())
    assert button.evaluate("button => button === document.activeElement")


def test_what_ranks_print_is_in_the_cell(page, explorers):
    browser.scroll_to_cell(page, "I am rank")
    for rank in range(4):
        page.get_by_text(f"[rank {rank}] I am rank {rank}").wait_for()


def test_jupyterlab_says_which_cell_makes_an_explorer(page, explorers):
    """Else a cell that runs again could not end what it made before."""
    browser.scroll_to_cell(page, "cells made explorers")
    page.get_by_text(f"{len(EXPLORERS)} cells made explorers").wait_for()


# -- a training, and the page afterwards -------------------------------------------------------------------------------


def test_the_toolbars_stop_button_stops_a_training(page, explorers):
    cell = cell_of(page, "training_explorer(")
    cell.get_by_role("button", name="Train").click()
    page.get_by_text(" of 1000: loss").wait_for(timeout=120 * browser.SECONDS)
    page.locator("[data-command='notebook:interrupt-kernel'] >> visible=true").first.click()
    page.get_by_text("Stopped.").wait_for(timeout=60 * browser.SECONDS)


def open_with_stored_widgets(page, address):
    """Open all.ipynb anew. Where JupyterLab is busy for 2 s with its 200 models, it gives up on some, and says so."""
    for _ in range(5):
        browser.open_notebook(page, address, "all.ipynb")
        for call in EXPLORERS:
            browser.scroll_to_cell(page, call)
            shown = page.locator(".jp-CodeCell", has_text=call).locator(".labkit-stage, :text('model not found')")
            shown.first.wait_for(timeout=90 * browser.SECONDS)
        if page.get_by_text("Error displaying widget: model not found").count() == 0:
            return


def test_without_its_kernel_an_explorer_is_a_picture(page, address, explorers):
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")  # with the widgets' state
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    open_with_stored_widgets(page, address)
    for call in EXPLORERS:
        explorer = cell_of(page, call).locator(".labkit-explorer")
        explorer.locator("svg text").first.wait_for()
        before = explorer.evaluate("explorer => getComputedStyle(explorer, '::before').content")
        assert before == '"From an earlier session. Run the cell to change it."'
    page.screenshot(path=SCREENSHOTS / "without_a_kernel.png")
    assert page.get_by_text("Error displaying widget").count() == 0


def test_what_was_saved_is_there_again_after_a_reload(page, address):
    browser.open_notebook(page, address, "reloaded.ipynb")
    browser.run_all_cells(page)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    page.reload()
    page.locator(".labkit-choice input:enabled").first.wait_for(timeout=60 * browser.SECONDS)
    page.get_by_role("button", name="Keep my answer").wait_for()
    for sign in (".labkit-explorer", ".labkit-predict"):  # JupyterLab may open other notebooks' tabs again, too
        assert page.locator(f".jp-NotebookPanel:not(.lm-mod-hidden) {sign}").count() == 1
    page.screenshot(path=SCREENSHOTS / "reloaded.png")
