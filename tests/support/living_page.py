"""Serves one explorer as a page of the site has it, but with this process in place of the Python in the browser."""

import functools
import http.server
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from course.explorers.page import answer
from course.publish.living import copy_files, explorer_place
from course.publish.pages import STYLES

WORKER = """addEventListener("message", async ({ data }) => {
  const got = await fetch("/answer", { method: "POST", body: JSON.stringify(data) });
  postMessage([data.view, await got.json()]);
});"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>An explorer</title>{styles}
<style>body {{ font: 15px 'DejaVu Sans', sans-serif; margin: 8px; }}</style></head>
<body><main><h1 style="font-size: 20px; margin: 0">An explorer</h1><div {place}></div></main>
<script type="module" src="lab/page.js"></script></body></html>"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        text = answer(self.rfile.read(int(self.headers["Content-Length"])).decode()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serve(name: str, *values, **named) -> Iterator[str]:
    """Serve an explorer with these values; yields the page's address."""
    styles = "".join(f'<link rel="stylesheet" href="lab/{style}">' for style in STYLES)
    with tempfile.TemporaryDirectory() as folder:
        place = explorer_place(name, list(values), named, name.removesuffix("_explorer"))
        (Path(folder) / "index.html").write_text(PAGE.format(styles=styles, place=place))
        with serve_folder(Path(folder)) as address:
            yield f"{address}/index.html"


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve pages with explorers, whose files this puts into the folder's ``lab``; yields the folder's address."""
    copy_files(folder / "lab")
    (folder / "lab/worker.js").write_text(WORKER)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
