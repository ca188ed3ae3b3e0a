"""A real JupyterLab, and a headless Chromium that looks at it: for tests and benchmarks."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WITHOUT = (  # Chromium takes the last such list, so what Playwright leaves out comes first
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades", "MediaRouter"),
    *("HttpsFirstBalancedModeAutoEnable", "LensOverlay", "PaintHolding", "ThirdPartyStoragePartitioning"),
    *("AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled"),
    "PreconnectToSearch",
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),  # pages under an address bar: nobody sees them, each window has two
)
CHROMIUM_FLAGS = [
    f"--disable-features={','.join(WITHOUT)}",
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),  # also runs as root, in a container
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),  # nothing leaves the machine
]
SECONDS = 1000
"""Playwright counts in milliseconds."""


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextmanager
def jupyterlab(folder: Path, theme: str = "JupyterLab Light") -> Iterator[str]:
    """Serve ``folder`` by JupyterLab on a free loopback port; yields its address, ending in the token's query.

    What JupyterLab writes (settings, workspaces, logs) goes to a hidden folder beside the notebooks.
    """
    private = folder / ".jupyter"
    settings = private / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    no_news = {"fetchNews": "false", "checkForUpdates": False}  # else a dialog asks
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(no_news))
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    places = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    )
    environment = os.environ | {name: str(private / name) for name in places}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(private / "settings")}
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}", "--expose-app-in-browser"]
    log = private / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield f"{_address(server, private / 'JUPYTER_RUNTIME_DIR', log)}lab/tree/{{}}?token={token}"
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen, runtime: Path, log: Path) -> str:
    """The address that the server wrote down once it was listening."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob(f"jpserver-{server.pid}.json"):
            with suppress(json.JSONDecodeError):  # the server makes the file first, and then writes it
                return json.loads(path.read_text())["url"]
        time.sleep(0.05)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextmanager
def chromium(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """A page of a headless Chromium with a new, empty profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=CHROMIUM_FLAGS)
        try:
            yield browser.new_page(viewport={"width": width, "height": height})
        finally:
            browser.close()


def open_notebook(page: Page, address: str, path: str) -> None:
    """Open a notebook and wait until its kernel is ready; in a page that has JupyterLab, in place of the one there."""
    if page.evaluate("() => !window.jupyterapp"):
        page.goto(address.format(path))  # loading JupyterLab takes ten times as long as a notebook
    else:
        page.evaluate(_in_notebook("(panel.context.model.dirty = false, panel.close())"))  # else a dialog asks
        page.evaluate("path => void window.jupyterapp.commands.execute('docmanager:open', {path})", path)
    ready = f"panel.context.path === {path!r} && panel.sessionContext.session?.kernel?.status === 'idle'"
    _wait_for(page, ready, 90)


def run_all_cells(page: Page, timeout_seconds: float = 120) -> None:
    """Run all cells from the menu and wait until each has run; raises where one failed that was not meant to."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    _wait_for(page, "cells.every(hasRun) || cells.some(failed)", timeout_seconds)
    errors = page.evaluate(_in_notebook("cells.filter(failed).map(cell => cell.sharedModel.getSource())"))
    if errors:
        raise AssertionError("these cells raised an error:\n" + "\n---\n".join(errors))


def scroll_to_cell(page: Page, text: str) -> None:
    """Bring the first code cell whose source contains ``text`` into view; cells out of view may not be in the page."""
    has_text = f"cell => cell.type === 'code' && cell.sharedModel.getSource().includes({text!r})"
    index = f"[...panel.content.model.cells].findIndex({has_text})"
    page.evaluate(_in_notebook(f"panel.content.scrollToItem({index}, 'start')"))


def _wait_for(page: Page, condition: str, seconds: float) -> None:
    """Look ten times a second: by default Playwright asks for frame after frame, which Chromium paints on the CPU."""
    page.wait_for_function(_in_notebook(condition), timeout=seconds * SECONDS, polling=100)


def _in_notebook(expression: str) -> str:
    """JavaScript that looks at the open notebook's model: the page itself holds only the cells in view."""
    return f"""() => {{
        const panel = window.jupyterapp?.shell.currentWidget;
        if (!panel?.content?.model?.cells) return false;
        const hasCode = cell => cell.type === "code" && cell.sharedModel.getSource();
        const cells = [...panel.content.model.cells].filter(hasCode);
        const hasRun = cell => cell.executionCount !== null && cell.executionState !== "running";
        const meant = cell => (cell.getMetadata("tags") ?? []).includes("raises-exception");
        const failed = cell => !meant(cell) && cell.outputs.toJSON().some(output => output.output_type === "error");
        return {expression};
    }}"""
