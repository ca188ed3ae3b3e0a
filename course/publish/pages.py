"""Writes the notebooks, as stored, as web pages: `make site`. build/site/index.html is Start_Here.

Links between notebooks lead to their pages; a source file that a notebook links to becomes a page too. Explorers are
alive, on a page of their own, too: play.html. Nothing is loaded from elsewhere. A link to what the site lacks is an
error, and all of them are listed.
"""

import gzip
import posixpath
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
from bs4 import BeautifulSoup
from nbconvert.exporters import HTMLExporter
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from course import working_copy
from course.publish import living, play, pyodide
from labtrain.command_line import run_command

ROOT = Path(__file__).parents[2]
PLAY = "play.ipynb"
CACHE = ROOT / "build" / "npm"
LINK = re.compile(r'(<a\s[^>]*?href=")(?!\w+:|#|//)([^"#]+)(#[^"]*)?')
NARROW = """<meta name="viewport" content="width=device-width">
<style>body { margin: 8px 16px; } h1 { font-size: 1.5em; overflow-wrap: anywhere; }
pre { overflow-x: auto; }</style></head>"""

POLICY = {
    "default-src": "'none'",
    "script-src": "'self' 'wasm-unsafe-eval'",  # the second for Python, which is WebAssembly
    "worker-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "style-src-elem": "'self'",
    "style-src-attr": "'unsafe-inline'",  # the places of marks in a picture are styles
    "base-uri": "'none'",
    "form-action": "'none'",
}
"""What a page may load and run (Content-Security-Policy); all else is refused by the browser."""
HEAD = """<head><meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">{styles}<script defer src="{root}lab/wake.js"></script>"""
STYLE = re.compile(r"<style.*?>(.*?)</style>", re.DOTALL)
INLINE = "script:not([src]), style"
STYLES = ("stage.css", "choice.css", "predict.css", "page.css")
README = Path(__file__).with_name("site") / "README.txt"


def as_page(name: str) -> str:
    """Return where a file of the project lies in the site."""
    stem = "index" if name == "Start_Here.ipynb" else name.removesuffix(".ipynb")
    return name if name.startswith("pics/") else f"{stem}.html"


def write_page(name: str, site: Path) -> set[str]:
    """Write one notebook or source file; return the project's files that it links to."""
    linked = set()

    def lead(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(link[2])))
        if not (ROOT / target).is_file():
            return link[0]  # to be found dead
        linked.add(target)
        heading = link[3] if link[3] and target.endswith(".ipynb") else ""  # a source file's page has none
        return link[1] + posixpath.relpath(as_page(target), posixpath.dirname(name) or ".") + heading

    root = "../" * name.count("/")
    if name.endswith(".ipynb"):
        notebook = play.notebook() if name == PLAY else nbformat.read(ROOT / name, as_version=4)
        template = Path(__file__).with_suffix(".html.j2").read_text()
        without_code = dict.fromkeys(("exclude_input", "exclude_input_prompt", "exclude_output_prompt"), name == PLAY)
        exporter = HTMLExporter(raw_template=template, **without_code)
        about = {"metadata": {"name": Path(name).stem}, "root": root}
        page, _ = exporter.from_notebook_node(living.enliven(notebook), about)
        page = LINK.sub(lead, page)
        styles = "notebook.css", *STYLES
    else:
        lexer = get_lexer_for_filename(name.replace(".sbatch", ".sh"))
        page = highlight((ROOT / name).read_text(), lexer, HtmlFormatter(full=True, title=name))
        for tag, better in {"<html>": '<html lang="en">', "h2>": "h1>", "<body>": "<body><main>"}.items():
            page = page.replace(tag, better, 2)
        page = page.replace("</head>", NARROW).replace("</body>", "</main></body>")
        styles = ("code.css",)
    head, body = page.split("</head>", 1)
    (site / "lab").mkdir(parents=True, exist_ok=True)
    (site / "lab" / styles[0]).write_text("".join(STYLE.findall(head)))
    links = "".join(f'<link rel="stylesheet" href="{root}lab/{style}">' for style in styles)
    policy = "; ".join(map(" ".join, POLICY.items()))
    page = STYLE.sub("", head).replace("<head>", HEAD.format(policy=policy, styles=links, root=root)) + "</head>" + body
    written = site / as_page(name)
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(page)
    return linked


def write_site(names: list[str], site: Path) -> None:
    """Write these files, and what they link to, into a new folder."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "pics", site / "pics")
    to_write, written = set(names), set()
    while to_write:
        written.add(name := to_write.pop())
        to_write |= {linked for linked in write_page(name, site) - written if not linked.startswith("pics/")}


def dead_links(site: Path) -> list[str]:
    """Return the links of all pages that lead nowhere in the site, and what a page would load from elsewhere."""
    site = site.resolve()
    pages = {page: BeautifulSoup(page.read_text(), "html.parser") for page in site.rglob("*.html")}
    ids = {page: {unquote(str(tag["id"])) for tag in soup.find_all(id=True)} for page, soup in pages.items()}
    dead = []
    for page, soup in pages.items():
        for tag in soup.select("a[href], link[href], [src]"):
            link = str(tag.get("src") or tag.get("href"))
            if re.match(r"\w+:|//", link):  # elsewhere, where a reader may go, but from where no page may load
                is_dead = tag.name != "a" and not link.startswith("data:")
            else:
                address, fragment = map(unquote, urldefrag(link))  # nbconvert quotes ids too
                target = (page.parent / address).resolve() if address else page
                is_dead = not target.is_file() or (fragment and fragment not in ids.get(target, ()))
            if is_dead:
                dead.append(f"{page.relative_to(site)}: {link}")
        dead += [f"{page.relative_to(site)}: <{tag.name}> that POLICY refuses" for tag in soup.select(INLINE)]
    return dead


def num_bytes_loaded(folder: Path) -> int:
    """Return how many bytes a browser loads for the first explorer, if the server compresses them with gzip."""
    return sum(len(gzip.compress(path.read_bytes())) for path in folder.iterdir())


def main() -> int:
    site = ROOT / "build" / "site"
    try:
        pyodide.fetch(CACHE)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    write_site([PLAY, *map(str, working_copy.notebooks(ROOT))], site)
    living.put_files(site / "lab", CACHE)
    megabytes = num_bytes_loaded(site / "lab") / 1e6
    (site / "README.txt").write_text(README.read_text().format(version=pyodide.VERSION, megabytes=megabytes))
    dead = dead_links(site)
    print(*dead, f"{len(list(site.rglob('*.html')))} pages, {len(dead)} dead links: {site / 'index.html'}", sep="\n")
    return 1 if dead else 0


if __name__ == "__main__":
    run_command(main)
