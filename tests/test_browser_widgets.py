"""Every explorer of the lab in JupyterLab's dark theme, moved by keys alone: on one page, with no other cells."""

import json
import time

import nbformat
import pytest

from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

EXPLORERS = {
    "layout_explorer()": "course.explorers.layout",
    "collective_explorer()": "course.explorers.collectives",
    "shard_explorer()": "course.explorers.sharding",
    "batch_explorer()": "course.explorers.batch",
    "schedule_explorer()": "course.explorers.schedule",
    "sizing_explorer()": "course.explorers.sizing",
    "training_explorer(TrainConfig(steps=1000, micro_batch_size=1))": "course.explorers.training",
}
CONTROLS = "[role=slider], select, button, input:not([type=hidden])"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    cells = [
        nbformat.v4.new_code_cell(f"from {module} import {call.partition('(')[0]}\n{call}")
        for call, module in EXPLORERS.items()
    ]
    cells[-1].source = f"from labkit.train import TrainConfig\n{cells[-1].source}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}  # else a dialog asks for one
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "all.ipynb")
    with browser.jupyterlab(folder, theme="JupyterLab Dark") as address:
        yield address


@pytest.fixture(scope="module")
def page(address):
    with browser.chromium() as page:
        browser.open_notebook(page, address, "all.ipynb")
        browser.run_all_cells(page)
        yield page


@pytest.fixture(params=EXPLORERS)
def explorer(request, page):
    browser.scroll_to_cell(page, request.param)
    cell = page.locator(".jp-CodeCell", has_text=request.param)
    cell.locator(".widget-vbox").first.wait_for()
    return cell.locator(".widget-vbox").first


def test_tab_reaches_every_control(page, explorer):
    controls = explorer.locator(CONTROLS).locator("visible=true")
    controls.first.focus()
    reached = 1
    while explorer.evaluate("cell => cell.contains(document.activeElement)"):
        page.keyboard.press("Tab")
        reached += explorer.evaluate(f"cell => cell.contains(document.activeElement.closest({json.dumps(CONTROLS)}))")
    assert reached == controls.count() > 1


def test_the_toolbars_stop_button_stops_a_training(page):
    browser.scroll_to_cell(page, "training_explorer(")
    page.locator(".widget-vbox button", has_text="Train").click()
    page.get_by_text(" of 1000: loss").wait_for(timeout=120 * browser.SECONDS)
    page.get_by_title("Interrupt the kernel").first.click()
    page.get_by_text("Stopped.").wait_for(timeout=60 * browser.SECONDS)


def shown(explorer):
    """What Python has drawn and written, not what the browser makes of a control."""
    texts = explorer.locator(".widget-html-content").all_inner_texts()
    return texts, explorer.locator("img").first.get_attribute("src")


def test_keys_change_what_is_shown(page, explorer):
    before, controls = shown(explorer), explorer.locator(CONTROLS).locator("visible=true")
    if explorer.locator("[role=slider]").count():
        explorer.locator("[role=slider]").locator("visible=true").first.press("ArrowRight")
    else:
        controls.nth(1).press("Space")  # of a row of buttons
    deadline = time.monotonic() + 20
    while shown(explorer) == before and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert shown(explorer) != before


def test_words_stand_out_from_the_dark_page(page, explorer):
    """The contrast of every word that the lab writes, by WCAG 2.2, success criterion 1.4.3: at least 4.5."""
    name = explorer.evaluate("cell => cell.closest('.jp-CodeCell').innerText.match(/\\w+_explorer/)[0]")
    explorer.screenshot(path=browser.ROOT / "screenshots" / f"dark_{name}.png")
    contrast, words = explorer.evaluate(LOWEST_CONTRAST)
    assert contrast >= 4.5, words


def test_without_its_kernel_an_explorer_is_a_picture(page, address):
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    browser.open_notebook(page, address, "all.ipynb")
    for call in EXPLORERS:
        browser.scroll_to_cell(page, call)
        explorer = page.locator(".jp-CodeCell", has_text=call).locator(".labkit-explorer")
        explorer.locator("img").first.wait_for()
        before = explorer.evaluate("explorer => getComputedStyle(explorer, '::before').content")
        assert before == '"From an earlier session. Run the cell to change it."'
    page.screenshot(path=browser.ROOT / "screenshots" / "without_a_kernel.png")
    assert page.get_by_text("Error displaying widget").count() == 0


LOWEST_CONTRAST = """root => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const linear = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = parts(getComputedStyle(element).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const words = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    let lowest = [21, ""];
    while (words.nextNode()) {
        const element = words.currentNode.parentElement;
        if (!words.currentNode.data.trim() || element.closest("style") || !element.checkVisibility()) continue;
        const pair = [light(parts(getComputedStyle(element).color)), light(behind(element))];
        const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        if (contrast < lowest[0]) lowest = [contrast, words.currentNode.data.trim()];
    }
    return lowest;
}"""
