"""Writes the lab as a book of web pages, as stored: `make site`. build/site/index.html is its door.

Sphinx makes the pages, with myst-nb and sphinx-book-theme; nothing is executed. Explorers are alive, and nothing is
loaded from elsewhere: what the theme would run or load beside its own files is taken out. A link to what the site lacks
is an error, and all of them are listed.
"""

import gzip
import io
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag

from course import working_copy
from course.pictures.narrow import VIEW
from course.pictures.stacked import narrow_svgs
from course.publish import living, pyodide, source, styles
from labtrain.command_line import run_command

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "npm"
README = Path(__file__).with_name("site") / "README.txt"
SPHINX = {
    "project": "Megatron lab",
    "html_title": "Megatron lab",
    "extensions": ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "course.publish.extension"],
    "nb_execution_mode": "off",
    "nb_merge_streams": True,
    "myst_enable_extensions": [],  # a dollar is a dollar
    "myst_heading_anchors": 4,
    "myst_heading_slug_func": "course.publish.source.anchor",
    "default_role": "code",  # what docstrings have in `backticks`
    "autodoc_member_order": "bysource",
    "html_theme": "sphinx_book_theme",
    "html_theme_options": {
        "logo": {"text": "Megatron lab"},
        "toc_title": "On this page",
        "search_bar_text": "Search",
        "back_to_top_button": False,
        "use_download_button": False,
        "use_fullscreen_button": False,
        "footer_content_items": "",
        "show_navbar_depth": 1,
        "collapse_navbar": True,  # else each page has the whole tree
    },
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_use_index": False,
    "html_domain_indices": False,
}

POLICY = {
    "default-src": "'none'",
    "script-src": "'self' 'wasm-unsafe-eval'",  # the second for Python, which is WebAssembly
    "worker-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "style-src-elem": "'self'",
    "style-src-attr": "'unsafe-inline'",  # the places of marks in a picture are styles
    "base-uri": "'none'",
    "form-action": "'self'",  # the search
}
"""What a page may load and run (Content-Security-Policy); all else is refused by the browser."""
STYLES = ("stage.css", "choice.css", "predict.css", "page.css")
FIRST = """<head><meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,"><script src="{root}lab/scheme.js"></script>"""
LAST = """{styles}<script defer src="{root}lab/wake.js"></script></head>"""
INLINE = re.compile(r"<script(?![^>]* src=)[^>]*>.*?</script>|<style.*?</style>", re.DOTALL)
UNUSED = re.compile(r'<script[^>]* src="[^"]*fontawesome[^"]*"></script>')  # page.css has the icons
COLOURS = re.compile(r"\x1b\[[\d;]*m")
MENDED = {
    r'_static/styles/theme\.css[^"]*': "_static/basic.css",  # all that it imports
    r'<th class="[^"]*"><p></p></th>': "<td></td>",  # heads nothing
    r'<summary>(?=<span class="toctree-toggle")': '<summary aria-label="the pages below">',
    r'<div id="pst-primary-sidebar"': r'\g<0> role="region" aria-label="Site"',  # all of a page is in some landmark
}
"""In the theme's HTML: what is a request too many, and what a screen reader would stumble on."""
NOSCRIPT = """<noscript><p>Without JavaScript, everything stays as it was stored.</p></noscript>"""
SEARCHES = re.compile(r'<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>')
PICTURE = re.compile(r'<img ([^>]*)src="([^"]*_images/[^"]*)\.svg"([^>]*>)')
LINKED = re.compile(r'<(a|link|script|img)\s(?:[^>]*?\s)?(?:href|src)="([^"]*)"')
ID = re.compile(r'\sid="([^"]*)"')
LEFT_OUT = ("_sources", ".buildinfo", "*.map", "fontawesome*", "vendor", "locales", "*macros.html")
"""What no page loads."""


def write_site(names: list[str], site: Path, follow: bool = True) -> list[str]:
    """Write these files of the project as pages into a new folder, with what they link to; return Sphinx's warnings."""
    from sphinx.application import Sphinx  # late: an installation of the lab alone lacks it
    from sphinx.util.docutils import docutils_namespace

    book = site.with_name(f"{site.name}-source")
    source.write_source(["index.md", *names], book, follow)
    shutil.rmtree(site, ignore_errors=True)
    warnings = io.StringIO()
    doctrees = book / ".doctrees"
    with docutils_namespace():
        Sphinx(book, None, site, doctrees, "html", SPHINX, status=None, warning=warnings, freshenv=True).build()
    for pattern in LEFT_OUT:
        for path in [*site.rglob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for page in site.rglob("*.html"):
        finish(page, site)
    styles.drop_unused(site, (site / "_static").rglob("*.css"), (path for path in living.FILES if path.suffix == ".js"))
    return COLOURS.sub("", warnings.getvalue()).splitlines()


def finish(page: Path, site: Path) -> None:
    """Take out of a page what POLICY refuses and what is not used, and put in what makes it live."""
    root = "../" * (len(page.relative_to(site).parts) - 1)
    text = UNUSED.sub("", INLINE.sub("", page.read_text()))
    if page.name != "search.html":
        text = SEARCHES.sub("", text)
    for found, better in MENDED.items():
        text = re.sub(found, better, text)
    if "data-explorer" in text or "data-question" in text:
        text = text.replace('<article class="bd-article">', f'<article class="bd-article">{NOSCRIPT}', 1)
    text = PICTURE.sub(lambda found: _picture(found, page), text)
    policy = "; ".join(map(" ".join, POLICY.items()))
    styles = "".join(f'<link rel="stylesheet" href="{root}lab/{style}">' for style in STYLES)
    text = text.replace("<head>", FIRST.format(policy=policy, root=root), 1)
    page.write_text(text.replace("</head>", LAST.format(styles=styles, root=root), 1))


def _picture(found: re.Match, page: Path) -> str:
    """Return a picture with its size, so that a page keeps its place, and with its narrow form, if it has one."""
    about, name, rest = found.groups()
    svg = (page.parent / f"{name}.svg").read_text()
    view = VIEW.search(svg[:1000])
    if not view:
        return found[0]
    image = f'<img {about}width="{view[1]}" height="{view[2]}" src="{name}.svg"{rest}'
    [narrow] = narrow_svgs([svg])
    if not narrow:
        return image
    (page.parent / f"{name}-narrow.svg").write_text(narrow)
    return living.with_narrow(image, f"{name}-narrow.svg")


def dead_links(site: Path) -> list[str]:
    """Return the links of all pages that lead nowhere in the site, and what a page would load from elsewhere."""
    site = site.resolve()
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    ids = {page: {unescape(found) for found in ID.findall(text)} for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        for tag, quoted in set(LINKED.findall(text)):
            link = unescape(quoted)
            if re.match(r"\w+:|//", link):  # elsewhere, where a reader may go, but from where no page may load
                is_dead = tag != "a" and not link.startswith("data:")
            else:
                address, fragment = map(unquote, urldefrag(link.partition("?")[0] if tag != "a" else link))
                target = (page.parent / address).resolve() if address else page
                is_dead = not target.is_file() or (fragment and fragment not in ids.get(target, ()))
            if is_dead:
                dead.append(f"{page.relative_to(site)}: {link}")
        dead += [f"{page.relative_to(site)}: {found[:20]} that POLICY refuses" for found in INLINE.findall(text)]
    return sorted(dead)


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
    names = [*source.OF_THE_SITE, *source.GUIDES, *map(str, working_copy.notebooks(ROOT)), *source.modules()]
    warnings = write_site(list(dict.fromkeys(names))[1:], site)
    living.put_files(site / "lab", CACHE)
    megabytes = num_bytes_loaded(site / "lab") / 1e6
    (site / "README.txt").write_text(README.read_text().format(version=pyodide.VERSION, megabytes=megabytes))
    dead = dead_links(site)
    num_pages = len(list(site.rglob("*.html")))
    print(*warnings, *dead, f"{num_pages} pages, {len(dead)} dead links: {site / 'index.html'}", sep="\n")
    return 1 if dead or warnings else 0


if __name__ == "__main__":
    run_command(main)
