"""Lays out tables: as text, as HTML that a notebook shows even if it is not trusted, and as Markdown.

It imports nothing that is slow, because ranks import it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import NamedTuple

TINT, INK = "#FFE3D1", "#1F2933"
LEFT = "text-align: left"


class Cell(NamedTuple):
    """What a cell says, and whether something else would be right; a notebook then has a tint, a sign and a word."""

    text: str
    is_wrong: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """Rows below ``heads``, and a ``caption``.

    In text, columns are as wide as what they hold, or as ``widths`` says, in letters. Heads ``above`` the others stand
    over the columns that begin at their number; in HTML such a table is aligned left, and its caption comes after it.
    HTML folds all rows but the first ``num_shown``.

    >>> print(Table(["rank", "does"], [["0", "computes"], ["1", "waits"]]))
    rank  does
    0     computes
    1     waits
    """

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str | Cell]] = ()
    caption: str = ""
    above: Mapping[int, str] = field(default_factory=dict)
    widths: Sequence[int] = ()
    num_shown: int | None = None

    @property
    def num_wrong(self) -> int:
        """How many cells are marked as wrong."""
        return sum(isinstance(cell, Cell) and cell.is_wrong for row in self.rows for cell in row)

    def __str__(self) -> str:
        lines = [list(map(str, row)) for row in (self.heads, *self.rows) if row]
        widths = self.widths or [max(map(len, column)) + 2 for column in zip(*lines)]
        spans = [sum(widths[start:end]) for start, end in self._spans()]
        text = [_joined(line, widths) for line in lines]
        text = [_joined(self.above.values(), spans), *text] if self.above else text
        return "\n".join([*text, self.caption] if self.caption else text)

    def _repr_mimebundle_(self, **_) -> dict[str, str]:
        """Return what a cell shows that ends with the table."""
        return {"text/plain": str(self), "text/html": self.html}

    @property
    def html(self) -> str:
        """The table in HTML; "" if it has no rows."""
        if not self.rows:
            return ""
        if self.num_shown is not None and self.num_shown < len(self.rows):
            first = replace(self, rows=self.rows[: self.num_shown], num_shown=None)
            folded = replace(self, rows=self.rows[self.num_shown :], caption="", num_shown=None)
            words = f"The other {len(folded.rows)} rows"
            return f"{first.html}<details><summary>{words}</summary>{folded.html}</details>"
        head = _row(f'<th scope="col" style="{LEFT}">' if self.above else "<th>", self.heads)
        body = "".join(_row(f'<td style="{LEFT}">' if self.above else "<td>", row) for row in self.rows)
        caption = escape(self.caption)
        if not self.above:
            return f"<table><caption>{caption}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
        over = [
            f'<{tag} colspan="{end - start}" style="{LEFT}">{escape(text)}</{tag}>'
            for text, (start, end) in zip(self.above.values(), self._spans())
            for tag in ["th" if text else "td"]
        ]
        table = f"<table><thead><tr>{''.join(over)}</tr>{head}</thead><tbody>{body}</tbody></table>"
        return table + f"<p>{caption}</p>" * bool(caption)

    @property
    def markdown(self) -> str:
        """The table in Markdown, without its caption."""
        lines = (self.heads, *self.rows)
        head, *rows = ("|" + "".join(f" {cell} |" if str(cell) else " |" for cell in line) for line in lines)
        return "\n".join([head, "|---" * len(self.heads) + "|", *rows])

    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise([*self.above, len(self.heads)]))


def _joined(line, widths) -> str:
    return "".join(map(str.ljust, line, widths)).rstrip()


def _row(tag: str, cells) -> str:
    """Return a row; a corner without words heads nothing."""
    return f"<tr>{''.join(_cell(tag if str(cell) else '<td>', cell) for cell in cells)}</tr>"


def _cell(tag: str, cell: str | Cell) -> str:
    text = escape(str(cell))
    if isinstance(cell, Cell) and cell.is_wrong:
        return f'<td style="{LEFT}; background-color: {TINT}; color: {INK}">✗ {text} <b>wrong</b></td>'
    return f"{tag}{text}</{tag[1:3]}>"
