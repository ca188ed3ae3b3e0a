"""Show a table of symptoms: as text, and in a notebook with a tint, a sign and a word where something is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

TINT, INK = "#FFE3D1", "#1F2933"  # not from `style`, which imports matplotlib: ranks import this file too


class Cell(NamedTuple):
    """What a cell says, and whether a right run would say something else."""

    text: str
    is_wrong: bool = False


@dataclass(frozen=True)
class Grid:
    """A table with two rows of heads; those ``above`` stand over the columns that begin at their number."""

    above: Mapping[int, str]
    heads: Sequence[str]
    widths: Sequence[int]  # of the columns of the text, in letters
    rows: Sequence[Sequence[Cell]]
    below: str = ""

    @property
    def num_wrong(self) -> int:
        return sum(cell.is_wrong for row in self.rows for cell in row)

    def __str__(self) -> str:
        starts = [*self.above, len(self.heads)]
        spans = [sum(self.widths[start:end]) for start, end in pairwise(starts)]
        lines = [(self.above.values(), spans), (self.heads, self.widths)]
        lines += [([cell.text for cell in row], self.widths) for row in self.rows]
        text = ["".join(f"{word:<{width}}" for word, width in zip(*line)).rstrip() for line in lines]
        return "\n".join([*text, self.below] if self.below else text)

    def html(self) -> str:
        """Return the table in HTML that a notebook shows even if it is not trusted."""
        starts = [*self.above, len(self.heads)]
        above = zip(self.above.values(), pairwise(starts))
        over = [(text, f'colspan="{end - start}" {_LEFT}') for text, (start, end) in above]
        heads = "".join(f"<th {look}>{escape(text)}</th>" if text else f"<td {look}></td>" for text, look in over)
        heads += "</tr><tr>" + "".join(f'<th scope="col" {_LEFT}>{escape(text)}</th>' for text in self.heads)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        below = f"<p>{escape(self.below)}</p>" if self.below else ""
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}"


_LEFT = 'style="text-align: left"'


def _cell(cell: Cell) -> str:
    if not cell.is_wrong:
        return f"<td {_LEFT}>{escape(cell.text)}</td>"
    return (
        f'<td style="text-align: left; background-color: {TINT}; color: {INK}">✗ {escape(cell.text)} <b>wrong</b></td>'
    )
