"""From pressing an arrow key on a slider to the new grids on the screen, in JupyterLab in a browser.

The time is what a reader waits: the key event, the message to the kernel, the drawing, the message back, and the
browser's next frame after the picture has changed. The peer has the same control and sends a PNG drawn by matplotlib.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from playwright.sync_api import Page

from tests.support import browser

WORLD_SIZES = 64, 1024
PRESSES = 60

OURS = """from course.explorers.jupyter import layout_explorer
layout_explorer({world_size}, tp_size=1, pp_size=4)"""
PEER = """import ipywidgets
from benchmarks.png_grids import png_grids
from course.explorers.choice import Choice
from course.explorers.control import slider
from labkit.layout import ParallelLayout
size, image = Choice(slider("tensor t", [1, 2, 4], 1)), ipywidgets.Image()
def draw(_=None):
    image.value = png_grids(ParallelLayout({world_size}, size.value, 4), 8)
size.observe(draw, "index")
draw()
ipywidgets.VBox([size, image])"""

WATCH_ONE_PRESS = """image => {
    let pressed;
    window.paint_ms = null;
    document.addEventListener("keydown", () => { pressed = performance.now(); }, { capture: true, once: true });
    const painted = () => { window.paint_ms = performance.now() - pressed; };
    const changed = () => requestAnimationFrame(() => setTimeout(painted));  // the timer fires after that frame's paint
    const picture = document.querySelector(image ? ".widget-image" : ".labkit-stage svg");
    if (image) picture.addEventListener("load", changed, { once: true });
    else {
        const watch = new MutationObserver(() => {
            if (pressed === undefined) return;  // marks that have faded go later
            watch.disconnect();
            changed();
        });
        watch.observe(picture, { subtree: true, childList: true, attributes: true });
    }
}"""
COUNT_BYTES = """() => {
    window.num_bytes = 0;
    const socket = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    socket.iopubMessage.connect((_, message) => {
        window.num_bytes += JSON.stringify(message.content).length;
        for (const buffer of message.buffers ?? []) window.num_bytes += buffer.byteLength;
    });
}"""


def rows() -> Iterator[tuple[str, float, float]]:
    if not browser.find_chromium():
        return
    for world_size in WORLD_SIZES:
        (ours, our_bytes), (theirs, their_bytes) = (
            _slider_to_paint(source.format(world_size=world_size), image=source is PEER) for source in (OURS, PEER)
        )
        what = f"slider to paint, {world_size} GPUs, "
        sent = f" ({our_bytes / 1e3:.0f} kB a step, PNG {their_bytes / 1e3:.0f})"
        yield f"{what}median{sent}, against PNG", statistics.median(ours), statistics.median(theirs)
        yield f"{what}p95 of {PRESSES} keys, against PNG", _p95(ours), _p95(theirs)


def _p95(durations: list[float]) -> float:
    return statistics.quantiles(durations, n=20)[18]


def _slider_to_paint(source: str, image: bool) -> tuple[list[float], float]:
    """Return the seconds of each key press, and the bytes that one sends to the browser."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(notebook, Path(folder) / "explorer.ipynb")
        with browser.jupyterlab(Path(folder)) as address, browser.chromium() as page:
            browser.open_notebook(page, address, "explorer.ipynb")
            browser.run_all_cells(page)
            _press(page, 0, image)
            page.evaluate(COUNT_BYTES)
            durations = [_press(page, number, image) for number in range(1, PRESSES + 1)]
            return durations, page.evaluate("window.num_bytes") / PRESSES


def _press(page: Page, number: int, image: bool) -> float:
    """Press a key that moves t between 1 and 2, and return the seconds until the grids are painted."""
    page.evaluate(WATCH_ONE_PRESS, image)
    page.get_by_role("slider", name="tensor t").press("ArrowLeft" if number % 2 else "ArrowRight")
    page.wait_for_function("window.paint_ms !== null", timeout=20 * browser.SECONDS)
    return page.evaluate("window.paint_ms") / browser.SECONDS
