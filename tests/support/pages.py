"""Write the notebooks, as stored, as pages for a web server or a folder: build/site/index.html is Start_Here.

Links between notebooks lead to their pages; a source file that a notebook links to becomes a page too. Nothing is
loaded from the network. A link to what the site lacks is an error, and all of them are listed.
"""

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

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'(<a\s[^>]*?href=")(?!\w+:|#|//)([^"#]+)')
NARROW = """<meta name="viewport" content="width=device-width">
<style>body { margin: 8px 16px; } h1 { font-size: 1.5em; overflow-wrap: anywhere; }
pre { overflow-x: auto; }</style></head>"""

KEYS = """<script>
// What is wider than its box scrolls: keys reach it there, and it says what it is.
function reach() {
  for (const box of document.querySelectorAll("main, main *")) {
    const scrolls = box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX);
    if (!scrolls || box.hasAttribute("tabindex")) continue;
    box.tabIndex = 0;
    if (box.tagName !== "TABLE") box.setAttribute("role", "group");
    const hasTable = box.matches("table") || box.querySelector("table");
    const what = box.querySelector("img") ? "picture" : hasTable ? "table" : "text";
    box.setAttribute("aria-label", `${what}: scrolls sideways`);
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
</script></body>"""


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
        return link[1] + posixpath.relpath(as_page(target), posixpath.dirname(name) or ".")

    if name.endswith(".ipynb"):
        exporter = HTMLExporter(raw_template=Path(__file__).with_suffix(".html.j2").read_text())
        notebook = nbformat.read(ROOT / name, as_version=4)
        page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": Path(name).stem}})
        page = LINK.sub(lead, page).replace("</body>", KEYS)
    else:
        lexer = get_lexer_for_filename(name.replace(".sbatch", ".sh"))
        page = highlight((ROOT / name).read_text(), lexer, HtmlFormatter(full=True, title=name))
        for tag, better in {"<html>": '<html lang="en">', "h2>": "h1>", "<body>": "<body><main>"}.items():
            page = page.replace(tag, better, 2)
        page = page.replace("</head>", NARROW).replace("</body>", f"</main>{KEYS}")
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
    ids = {page: {unquote(tag["id"]) for tag in soup.find_all(id=True)} for page, soup in pages.items()}
    dead = []
    for page, soup in pages.items():
        for tag in soup.select("a[href], link[href], [src]"):
            link = tag.get("src") or tag.get("href")
            if re.match(r"\w+:|//", link):  # elsewhere, where a reader may go, but from where no page may load
                is_dead = tag.name != "a" and not link.startswith("data:")
            else:
                address, fragment = map(unquote, urldefrag(link))  # nbconvert quotes ids too
                target = (page.parent / address).resolve() if address else page
                is_dead = not target.is_file() or (fragment and fragment not in ids.get(target, ()))
            if is_dead:
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead


def main() -> int:
    site = ROOT / "build" / "site"
    write_site(["Start_Here.ipynb", *(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))], site)
    dead = dead_links(site)
    print(*dead, f"{len(list(site.rglob('*.html')))} pages, {len(dead)} dead links: {site / 'index.html'}", sep="\n")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
