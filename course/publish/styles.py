"""Takes out of the theme's style sheets what no page of the site uses: most of them is for what other sites have."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|url\([^"\')]*\)|\\.|.', re.DOTALL)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
IN_PAGE = re.compile(r'\b(?:class|id)="([^"]*)"')
TAG = re.compile(r"<([a-z][a-z0-9]*)")
WORD = re.compile(r"[\w-]+")
ANY_OF = re.compile(r"::?[\w-]+(?:\((?:[^()]|\([^()]*\))*\))?|\[[^\]]*\]")
"""What of a selector names nothing that must be there."""
NAME = re.compile(r"[.#]((?:\\.|[\w-])+)|(?<![\w.#\\-])([a-z][a-z0-9]*)")
HOLDS_RULES = re.compile(r"@(?:media|supports|layer|container)\b")
FONTS = "@font-face"  # pages have those of the system
WITHOUT = "searchindex.js"  # words of the text


def drop_unused(site: Path, sheets: Iterable[Path], scripts: Iterable[Path]) -> None:
    """Write style sheets anew, without the rules for what no page of the site and none of the scripts names."""
    used = names(site, scripts)
    for sheet in sheets:
        sheet.write_text(needed(sheet.read_text(), used))


def names(site: Path, scripts: Iterable[Path]) -> set[str]:
    """Return the tags, classes and ids of a site's pages, and all words of scripts, which may make more of them."""
    found = set()
    for page in site.rglob("*.html"):
        text = page.read_text()
        found |= set(TAG.findall(text))
        for classes in IN_PAGE.findall(text):
            found |= set(classes.split())
    for script in (*site.rglob("*.js"), *scripts):
        if script.name != WITHOUT:
            found |= set(WORD.findall(script.read_text()))
    return found


def needed(text: str, used: set[str]) -> str:
    """Return the rules of a style sheet that are for what has these names."""
    return "".join(_needed(COMMENT.sub("", text), used))


def _needed(text: str, used: set[str]) -> Iterator[str]:
    for head, inside in _rules(text):
        if inside is None:
            yield f"{head};"
        elif HOLDS_RULES.match(head):
            kept = "".join(_needed(inside, used))
            yield f"{head}{{{kept}}}" * bool(kept)
        elif head.startswith("@"):
            yield f"{head}{{{inside}}}" * (head != FONTS)
        else:
            selectors = ",".join(each for each in _selectors(head) if _names_in(each) <= used)
            yield f"{selectors}{{{inside}}}" * bool(selectors)


def _rules(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield what stands before each pair of braces, and what is in it; None after what ends with a semicolon."""
    head = inside = ""
    depth = 0
    for piece in PIECE.findall(text):
        depth -= piece == "}"
        if piece == "}" and depth == 0:
            yield head.strip(), inside
            head = inside = ""
        elif piece == ";" and depth == 0:
            yield head.strip(), None
            head = ""
        elif depth:
            inside += piece
        elif piece != "{":
            head += piece
        depth += piece == "{"


def _selectors(head: str) -> list[str]:
    """Return what stands between commas that are in no parentheses."""
    found = [""]
    depth = 0
    for piece in PIECE.findall(head):
        depth += (piece in "([") - (piece in ")]")
        if piece == "," and depth == 0:
            found.append("")
        else:
            found[-1] += piece
    return [each.strip() for each in found]


def _names_in(selector: str) -> set[str]:
    """Return the names that must be in a page for a selector to find anything."""
    plain = ANY_OF.sub("", selector)
    return {re.sub(r"\\(.)", r"\1", name or tag) for name, tag in NAME.findall(plain)}
