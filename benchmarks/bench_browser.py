"""From pressing an arrow key on a slider to the new grids on the screen, in JupyterLab in a browser.

There is no peer to compare with, so the rows name a goal instead. The time is what a reader waits: the key event, the
message to the kernel, the drawing, the message back, its decoding, and the browser's next frame.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from playwright.sync_api import Page

from tests.support import browser

GOAL_SECONDS = {64: 0.1, 1024: 0.2}
PRESSES = 60

WATCH_ONE_PRESS = """() => {
    let pressed;
    window.paint_ms = null;
    document.addEventListener("keydown", () => { pressed = performance.now(); }, { capture: true, once: true });
    const painted = () => { window.paint_ms = performance.now() - pressed; };
    const loaded = () => requestAnimationFrame(() => setTimeout(painted));  // the timer fires after that frame's paint
    document.querySelector("img.labkit-grids").addEventListener("load", loaded, { once: true });
}"""


def rows() -> Iterator[tuple[str, float, float]]:
    if not browser.find_chromium():
        return
    for world_size, goal in GOAL_SECONDS.items():
        durations = _slider_to_paint_seconds(world_size)
        for what, value in (
            ("median", statistics.median(durations)),
            ("p95", statistics.quantiles(durations, n=20)[18]),
        ):
            aim = f", goal {goal * 1000:.0f} ms" if what == "p95" else ""
            yield f"slider to paint, {world_size} GPUs, {what} of {PRESSES} key presses{aim}", value, math.nan


def _slider_to_paint_seconds(world_size: int) -> list[float]:
    call = f"layout_explorer({world_size}, tp_size=1, pp_size=4)"
    source = f"from course.explorers.layout import layout_explorer\n\n{call}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(notebook, Path(folder) / "explorer.ipynb")
        with browser.jupyterlab(Path(folder)) as address, browser.chromium() as page:
            browser.open_notebook(page, address, "explorer.ipynb")
            browser.run_all_cells(page)
            return [_press(page, number) for number in range(PRESSES)]


def _press(page: Page, number: int) -> float:
    """Press a key that moves t between 1 and 2, and return the seconds until the grids are painted."""
    page.evaluate(WATCH_ONE_PRESS)
    slider = page.locator(".widget-slider", has_text="tensor t").get_by_role("slider")
    slider.press("ArrowLeft" if number % 2 else "ArrowRight")
    page.wait_for_function("window.paint_ms !== null", timeout=20 * browser.SECONDS)
    return page.evaluate("window.paint_ms") / browser.SECONDS
