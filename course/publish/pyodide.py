"""Fetches Pyodide's core from npm, once, and puts into a folder what a page needs to run Python in a browser.

Pyodide is CPython compiled to WebAssembly, under the Mozilla Public License 2.0. The packages that it offers stay
where they are: the lab's plain files need only the standard library, and of that not all.
"""

import base64
import hashlib
import json
import tarfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from course.publish import npm

VERSION = "314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""What `npm view pyodide@VERSION dist.integrity` prints: a new version needs its own."""
LOADER, CORE, WASM = "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"
LIBRARY, LOCK = "python_stdlib.zip", "pyodide-lock.json"
LEFT_OUT = (
    "_pyrepl", "doctest", "email", "imaplib", "mailbox", "multiprocessing", "optparse", "pdb", "pydoc", "smtplib",
    "sqlite3", "unittest", "wsgiref", "xml", "xmlrpc",
)  # fmt: skip
"""What of the standard library no page needs: half a megabyte."""
ENCODINGS = ("__init__", "aliases", "ascii", "cp437", "idna", "latin_1", "utf_8")


def fetch(folder: Path) -> Path:
    """Return the path of npm's package in ``folder``, fetched if it is not there.

    Raises:
        RuntimeError: npm is missing or cannot fetch it, or it is not the package that was pinned.
    """
    path = npm.pack(f"pyodide@{VERSION}", folder)
    found = "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise RuntimeError(f"{path} has the checksum {found}, but {INTEGRITY} is pinned: delete it")
    return path


def unpack(package: Path, folder: Path) -> None:
    """Put Pyodide's core into ``folder``, with the part of the standard library that pages need."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as files:
        # nginx, as it is installed, does not know that an .mjs is JavaScript: browsers then refuse it.
        loader = _read(files, LOADER).decode().replace(CORE, CORE.replace(".mjs", ".js"))
        (folder / LOADER).with_suffix(".js").write_text(loader.partition("//# sourceMappingURL")[0])
        (folder / CORE).with_suffix(".js").write_bytes(_read(files, CORE))
        (folder / WASM).write_bytes(_read(files, WASM))
        lock = json.loads(_read(files, LOCK))
        (folder / LOCK).write_text(json.dumps({"info": lock["info"], "packages": {}}))
        (whole := folder / "whole.zip").write_bytes(_read(files, LIBRARY))
    with ZipFile(whole) as library, ZipFile(folder / LIBRARY, "w", ZIP_DEFLATED, compresslevel=9) as kept:
        for info in library.infolist():
            top, _, rest = info.filename.removesuffix(".py").partition("/")
            if top not in LEFT_OUT and (top != "encodings" or rest in ENCODINGS):
                kept.writestr(info, library.read(info), compresslevel=9)
    whole.unlink()


def _read(files: tarfile.TarFile, name: str) -> bytes:
    file = files.extractfile(f"package/{name}")
    if file is None:
        raise RuntimeError(f"pyodide@{VERSION} has no {name}")
    return file.read()
