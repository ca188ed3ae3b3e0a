"""The lab as its reader has it: JupyterLab in a browser, the widget moved by keyboard.

The notebooks are copies without outputs, so that all that is seen was made in this run. Screenshots go to screenshots/.
"""

import pytest

from tests.support import browser

pytestmark = pytest.mark.skipif(not browser.find_chromium(), reason="needs Chromium or Chrome, and none is installed")

SCREENSHOTS = browser.ROOT / "screenshots"
WIDTHS = (1400, 1024)


@pytest.fixture(scope="module")
def page():
    with browser.chromium(WIDTHS[0]) as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    browser.copy_notebooks(folder)
    with browser.jupyterlab(folder) as address:
        yield address


@pytest.fixture(scope="module")
def explorer(page, address):
    """The layout explorer of notebook 01, after all its cells have run."""
    browser.open_notebook(page, address, "notebooks/01_group_layout.ipynb")
    browser.run_all_cells(page)
    browser.scroll_to_cell(page, "layout_explorer(")
    explorer = page.locator(".widget-vbox", has=page.locator("img.labkit-grids")).first
    explorer.locator("img.labkit-grids").wait_for()
    return explorer


def press(explorer, control, key, times=1):
    """Move a slider as somebody without a mouse does."""
    handle = explorer.locator(".widget-slider", has_text=control).get_by_role("slider")
    for _ in range(times):
        handle.press(key)


def picture(explorer):
    return explorer.locator("img.labkit-grids").get_attribute("src")


def wait_for_another_picture(page, before):
    """Until the browser shows a picture that it did not show before."""
    page.wait_for_function(
        """before => {
            const image = document.querySelector("img.labkit-grids");
            return image && image.src !== before && image.complete && image.naturalWidth > 0;
        }""",
        arg=before,
        timeout=20 * browser.SECONDS,
    )


def message(explorer):
    return explorer.locator(".labkit-says")


def test_arrow_keys_redraw_the_grids_and_the_table(page, explorer):
    before = picture(explorer)
    assert "2 copies of the model" in message(explorer).inner_text()  # 16 GPUs, t = 2, p = 4
    press(explorer, "tensor t", "ArrowRight", times=2)
    wait_for_another_picture(page, before)
    message(explorer).get_by_text("1 copy of the model").wait_for()
    explorer.locator(".labkit-facts").get_by_text("[0, 1, 2, 3]").wait_for()


def test_sizes_that_do_not_fit_are_explained_in_place(page, explorer):
    press(explorer, "tensor t", "ArrowLeft")
    misfit = explorer.get_by_role("alert")
    misfit.wait_for()
    assert "tp_size=3 * pp_size=4 = 12 does not divide world_size=16" in misfit.inner_text()
    assert "use tp_size 1, 2 or 4" in misfit.inner_text()
    assert explorer.locator(".labkit-stale").count() == 1
    page.screenshot(path=SCREENSHOTS / "group_layout_misfit.png")
    shown = picture(explorer)
    press(explorer, "tensor t", "ArrowLeft")
    wait_for_another_picture(page, shown)
    explorer.get_by_role("status").get_by_text("2 copies of the model").wait_for()
    assert explorer.locator(".labkit-stale").count() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_fits_the_width_of_the_window(page, explorer, width):
    page.set_viewport_size({"width": width, "height": 1000})
    explorer.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"group_layout_{width}.png")
    box, image = explorer.bounding_box(), explorer.locator("img.labkit-grids").bounding_box()
    assert box["x"] + box["width"] <= width
    margin = 4  # of two nested widgets
    assert image["x"] + image["width"] <= box["x"] + box["width"] + margin
    assert explorer.evaluate("element => element.scrollWidth - element.clientWidth") <= margin


def test_start_here_runs_in_the_browser(page, address):
    page.set_viewport_size({"width": WIDTHS[0], "height": 1000})
    browser.open_notebook(page, address, "Start_Here.ipynb")
    browser.run_all_cells(page)
    browser.scroll_to_cell(page, "def hello()")
    page.get_by_text("[rank 3] hello, I am rank 3 of 4").wait_for()
    page.screenshot(path=SCREENSHOTS / "start_here.png")
