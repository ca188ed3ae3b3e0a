"""From pressing an arrow key on a slider to the new grids on the screen: in JupyterLab, and on a page of the site.

The time is what a reader waits: the key event, the message to the kernel, the drawing, the message back, and the
browser's next frame after the picture has changed. The first peer has the same control and sends a PNG drawn by
matplotlib. On the site's page Python runs in the browser; there JupyterLab is the peer, also in the time until the
first explorer is alive: on the page from the first touch, in JupyterLab from opening its address.

A frame of an animation has 1/30 s: a rack that regroups on the page is played, and the browser says when it paints.
"""

import http.server
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import nbformat
from playwright.sync_api import Page

from course.publish import living, pages
from tests.support import browser

WORLD_SIZES, RACK_SIZES = (64, 1024), (16, 64)
PRESSES = 60
FRAME_SECONDS = 1 / 30
PLAYED_SECONDS = 6  # a rack's three steps

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
COUNT_FRAMES = """seconds => new Promise(done => {
    const times = [];
    const frame = now => {
        times.push(now);
        if (now - times[0] < 1000 * seconds) requestAnimationFrame(frame);
        else done(times.slice(1).map((time, i) => (time - times[i]) / 1000));
    };
    requestAnimationFrame(frame);
})"""
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
        (alive, ours, our_bytes), (_, theirs, their_bytes) = (
            _slider_to_paint(source.format(world_size=world_size), image=source is PEER) for source in (OURS, PEER)
        )
        what = f"slider to paint, {world_size} GPUs, "
        sent = f" ({our_bytes / 1e3:.0f} kB a step, PNG {their_bytes / 1e3:.0f})"
        yield f"{what}median{sent}, against PNG", statistics.median(ours), statistics.median(theirs)
        yield f"{what}p95 of {PRESSES} keys, against PNG", _p95(ours), _p95(theirs)
        page_alive, on_page, megabytes = _on_page(world_size)
        loaded = f" ({megabytes:.1f} MB with gzip)"
        yield f"first explorer alive on a page{loaded}, against JupyterLab", page_alive, alive
        yield f"{what}median on a page, against JupyterLab", statistics.median(on_page), statistics.median(ours)
        yield f"{what}p95 on a page, against JupyterLab", _p95(on_page), _p95(ours)
    for world_size in RACK_SIZES:
        what = f"a frame while {world_size} GPUs regroup on a page, p95, against 1/30 s"
        yield what, _p95(_frames(world_size)), FRAME_SECONDS


def _p95(durations: list[float]) -> float:
    return statistics.quantiles(durations, n=20)[18]


@contextmanager
def _site() -> Iterator[tuple[str, Path]]:
    """Serve the page of notebook 01; yields its address, and the folder of what its explorer loads."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        pages.write_site(["notebooks/01_group_layout.ipynb"], site, follow=False)
        living.put_files(site / "lab", pages.CACHE)
        handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=site))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/notebooks/01_group_layout.html", site / "lab"
        finally:
            server.shutdown()
            server.server_close()


def _on_page(world_size: int) -> tuple[float, list[float], float]:
    """Return the seconds until the explorer is alive and those of each key press, and the megabytes loaded."""
    with _site() as (address, folder), browser.chromium() as blank:
        page = blank.context.browser.new_page(bypass_csp=True)  # waiting for a function evaluates text
        page.goto(address)
        explorer, start = page.locator("[data-explorer]"), time.perf_counter()
        explorer.scroll_into_view_if_needed()
        explorer.locator(".labkit-choice :enabled").first.wait_for(timeout=60 * browser.SECONDS)
        alive = time.perf_counter() - start
        page.goto(f"{address}#n={world_size}&t=1&p=4")
        page.get_by_text(f"= {world_size} = n").wait_for()
        durations = []
        for number in range(PRESSES + 1):
            page.locator("[data-explorer]:not([aria-busy])").wait_for()
            durations.append(_press(page, number, image=False))
        return alive, durations[1:], pages.num_bytes_loaded(folder) / 1e6


def _frames(world_size: int) -> list[float]:
    """Return the seconds from frame to frame while a rack of so many GPUs is played on a page."""
    with _site() as (address, _), browser.chromium() as blank:
        page = blank.context.browser.new_page(bypass_csp=True)
        page.goto(f"{address}#n={world_size}&t=2&p=4&one_rack=on")
        page.get_by_text("step 1 of 4").wait_for(timeout=60 * browser.SECONDS)
        page.locator("[data-explorer]:not([aria-busy])").wait_for()
        page.wait_for_timeout(2 * browser.SECONDS)  # until Python has tried what the menus' options would change
        page.get_by_role("button", name="Play").click()
        return page.evaluate(COUNT_FRAMES, PLAYED_SECONDS)


def _slider_to_paint(source: str, image: bool) -> tuple[float, list[float], float]:
    """Return the seconds until it is alive and those of each key press, and the bytes that one sends to the browser."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(notebook, Path(folder) / "explorer.ipynb")
        with browser.jupyterlab(Path(folder)) as address, browser.chromium() as page:
            start = time.perf_counter()
            browser.open_notebook(page, address, "explorer.ipynb")
            browser.run_all_cells(page)
            page.get_by_role("slider", name="tensor t").wait_for()
            alive = time.perf_counter() - start
            _press(page, 0, image)
            page.evaluate(COUNT_BYTES)
            durations = [_press(page, number, image) for number in range(1, PRESSES + 1)]
            return alive, durations, page.evaluate("window.num_bytes") / PRESSES


def _press(page: Page, number: int, image: bool) -> float:
    """Press a key that moves t between 1 and 2, and return the seconds until the grids are painted."""
    page.evaluate(WATCH_ONE_PRESS, image)
    page.get_by_role("slider", name="tensor t").press("ArrowLeft" if number % 2 else "ArrowRight")
    page.wait_for_function("window.paint_ms !== null", timeout=20 * browser.SECONDS)
    return page.evaluate("window.paint_ms") / browser.SECONDS
