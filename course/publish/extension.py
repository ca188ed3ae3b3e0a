"""What pages have beside what Sphinx and myst-nb do: folded answers, symbols that lead to their card.

And what a docstring draws, or shows as code, stays as it is drawn: it is indented, as in Markdown.

Sphinx loads it by its name; see pages.py.
"""

import re
from pathlib import Path

from docutils import nodes

CARD = Path(__file__).with_name("site") / "symbols.md"
SYMBOLS = dict(re.findall(r'^\| <span id="symbol-(\w+)">\1</span> \| ([^|]+?) \|', CARD.read_text(), re.MULTILINE))
"""What each symbol of the card means, in a few words."""
LETTERS = "|".join(sorted(SYMBOLS, key=len, reverse=True))
IN_FORMULA = re.compile(
    rf"(?<![\w'’.])({LETTERS})(?= ?[·=/+−]| - |\))|(?<=[·=/(+−] )({LETTERS})(?![\w'’])|^({LETTERS})$", re.ASCII
)
"""A letter that stands for a number: beside a sign, or alone in its cell or its emphasis."""
OTHERWISE = {
    "02_collectives": "B",  # a bandwidth
    "04_row_parallel": "bp",  # a bias, a product
    "05_data_parallel": "nb",  # window number n; b and B of the noise scale
    "06_tensor_parallel": "Bbh",  # a matrix; numbers of a batch
    "07_pipeline_parallel": "B",  # a backward pass
    "13_context_parallel": "nh",  # tokens of a rank; times
    "14_fully_sharded": "b",  # bytes
}
"""Letters to which a page gives a meaning of its own."""
WITHOUT = "symbols", "glossary"
APART = nodes.strong, nodes.emphasis
NOT_PROSE = nodes.title, nodes.reference, nodes.literal_block, nodes.raw, nodes.literal


def fold_answers(app, doctree: nodes.document) -> None:
    """Fold the outputs that answer a question; see `course.publish.living`."""
    for cell in list(doctree.findall(nodes.container)):
        key = (cell.get("cell_metadata") or {}).get("answers")
        if key is None:
            continue
        for output in cell.children:
            if isinstance(output, nodes.container) and output.get("nb_element") == "cell_code_output":
                begin = f'<details data-answers="{key}"><summary>The result</summary>'
                output.insert(0, nodes.raw("", begin, format="html"))
                output.append(nodes.raw("", "</details>", format="html"))


def link_symbols(app, doctree: nodes.document, page: str) -> None:
    """Lead from the first use of each symbol in a page's formulas to the card of symbols."""
    if not page.startswith("notebooks/") or "symbols" not in app.env.found_docs:
        return
    card = app.builder.get_relative_uri(page, "symbols")
    to_link = set(SYMBOLS) - set(OTHERWISE.get(page.rpartition("/")[2], ""))
    for text in list(doctree.findall(nodes.Text)):
        if any(isinstance(above, NOT_PROSE) for above in _above(text)):
            continue
        parts = []
        begin = 0
        has_place = isinstance(text.parent, APART) or isinstance(text.parent.parent, nodes.entry)
        is_apart = has_place and len(text.parent.children) == 1
        for found in IN_FORMULA.finditer(text):
            if found[0] not in to_link or (found[0] == text and not is_apart):  # between tags, it is an index
                continue
            to_link.remove(found[0])
            link = nodes.reference("", found[0], internal=True, refuri=f"{card}#symbol-{found[0]}")
            link["reftitle"] = SYMBOLS[found[0]]
            parts += [nodes.Text(text[begin : found.start()]), link]
            begin = found.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(text[begin:])])


def keep_drawings(app, what, name, obj, options, lines: list[str]) -> None:
    """Mark what is indented below a paragraph of a docstring as literal, for reStructuredText."""
    kept = []
    is_literal = False
    for before, line in zip(["", *lines], lines):
        if line.startswith("    ") and not before and not is_literal and any(kept):
            kept += ["::", ""]
            is_literal = True
        is_literal = is_literal and (not line or line.startswith("    "))
        kept.append(line)
    lines[:] = [] if lines and lines[0].startswith("Alias for field number") else kept


def _above(node: nodes.Node):
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", keep_drawings, priority=400)  # before Napoleon indents anything
    app.connect("doctree-read", fold_answers)
    app.connect("doctree-resolved", link_symbols)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
