"""Draws one column of a narrow picture: its marks at a new scale, with texts that fit their boxes.

The words are explained in `course.pictures.stacked`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import wrap
from typing import NamedTuple

from course.pictures.narrow import LETTERS
from course.pictures.scene import LARGE, Mark, text_width
from course.pictures.stacked_wide import Column, is_word, text_extent

SPACING = 1.25  # the height of a line in a box, in sizes of its letters
NARROWEST_NAME = 24.0  # pixels: the box of a row name that is one digit
NARROWEST_HEADING = 60.0  # pixels: a heading of a narrower column may have this width
ESTIMATED = 8.0  # pixels: `text_width` has some to spare, so a heading may seem this much too wide
OVER_EDGE = 1.5  # pixels: and a text in a box this much
NUMBER = re.compile(r"[\d.,]+%?")
RANK = re.compile(r"rank (\d+)")


class Fit(NamedTuple):
    """How a wide picture is made narrow. All columns have the same fit, and all steps if they can."""

    scale: float  # times lengths across
    stretch: float  # times lengths down
    has_numbers: bool  # the names of ranks are their numbers alone
    may_squeeze: bool  # a column that is too wide has a scale of its own


class Drawn(NamedTuple):
    """Where a mark is drawn in its column, and its text there; a text may go further left and right than its box."""

    x: float
    y: float
    width: float
    height: float
    text: str
    left: float
    right: float


@dataclass
class NarrowColumn:
    """A column of the wide picture with each of its marks as ``drawn``; it stands at ``start`` in its band."""

    wide: Column
    drawn: list[Drawn]
    scale: float
    start: float = 0.0

    @property
    def left(self) -> float:
        return min(each.left for each in self.drawn)

    @property
    def width(self) -> float:
        return max(each.right for each in self.drawn) - self.left

    @property
    def end(self) -> float:
        return self.start + self.width

    @property
    def pairs(self) -> list[tuple[Mark, Drawn]]:
        return [*zip(self.wide.marks, self.drawn)]

    def marks(self) -> Iterator[Mark]:
        """Yield the marks at their places in the band."""
        left = self.left
        for mark, each in self.pairs:
            x = each.x - left + self.start
            yield mark.changed(x=x, y=each.y, width=each.width, height=each.height, text=each.text, size=LETTERS)


# -- a column


def draw_column(column: Column, fit: Fit, room: float) -> NarrowColumn | None:
    """Return a column as it is drawn where this room is left; None if a text does not fit its box."""
    squeezed = room / max(1.0, column.width)
    scale = min(fit.scale, squeezed) if fit.may_squeeze else fit.scale
    drawn = _draw_marks(column, scale, fit.stretch)
    return NarrowColumn(column, drawn, scale) if drawn else None


def draw_row_names(names: Column, fit: Fit) -> NarrowColumn:
    """Return the row names, in boxes as wide as they need."""
    drawn = []
    for mark in names.marks:
        text = mark.text.removeprefix("rank ") if fit.has_numbers else mark.text
        if mark.shape == "label":
            drawn.append(_label(mark, 0.0, mark.y * fit.stretch, text))
        else:
            width = max(NARROWEST_NAME, text_width(text, LETTERS, mark.bold) + 2)
            drawn.append(_box(mark, 0.0, width, fit.stretch, text))
    column = NarrowColumn(names, drawn, fit.scale)
    column.scale = column.width / names.width  # for lines that lead to a name
    return column


def _draw_marks(column: Column, scale: float, stretch: float) -> list[Drawn]:
    """Return how the marks of a column are drawn; [] if a text does not fit its box."""
    boxes = [mark for mark in column.marks if mark.shape == "box"]
    boxes_width = max(mark.right for mark in boxes) - min(mark.x for mark in boxes) if boxes else 0.0
    heading_width = max(boxes_width * scale, NARROWEST_HEADING)
    drawn = []
    for mark in column.marks:
        x = (mark.x - column.left) * scale
        if mark.shape == "label":
            each = _draw_label(mark, x, stretch, heading_width)
        else:
            each = _draw_box(mark, x, scale, stretch)
        if not each:
            return []
        drawn.append(each)
    return drawn


def _draw_label(mark: Mark, x: float, stretch: float, heading_width: float) -> Drawn:
    """Return a label; the last line of a heading stands where its only line stood, and others above it."""
    text = _heading_in_lines(mark, heading_width) if _is_heading(mark) else mark.text
    num_more = text.count("\n") - mark.text.count("\n")
    return _label(mark, x, mark.y * stretch - num_more * LETTERS * SPACING / 2, text)


def _draw_box(mark: Mark, x: float, scale: float, stretch: float) -> Drawn | None:
    """Return a box with its text; None if that does not fit. A word makes its box as wide as it needs."""
    width = mark.width * scale
    if is_word(mark):
        needed = text_width(mark.text, LETTERS, mark.bold)
        x -= max(0.0, needed - width) / 2  # to both sides
        width = max(width, needed)
    text = text_for_box(mark.text, mark.bold, round(width, 1), round(mark.height * stretch, 1))
    return None if text is None else _box(mark, x, width, stretch, text)


def _box(mark: Mark, x: float, width: float, stretch: float, text: str) -> Drawn:
    return Drawn(x, mark.y * stretch, width, mark.height * stretch, text, x, x + width)


def _label(mark: Mark, x: float, y: float, text: str) -> Drawn:
    left, right = text_extent(x, text_width(text, LETTERS, mark.bold), mark.anchor)
    return Drawn(x, y, 0.0, 0.0, text, left, right)


# -- columns beside each other


def hang_over(column: NarrowColumn, following: NarrowColumn) -> list[Drawn]:
    """Return what is drawn in a column, with labels that end where its boxes end if they may hang over the next column.

    A label may if the next column has none at the same height; the bold name of a matrix may not.
    """
    labels = [mark.y for mark in following.wide.marks if mark.shape == "label"]
    box_ends = [each.right for mark, each in column.pairs if mark.shape == "box"]
    drawn = []
    for mark, each in column.pairs:
        is_plain_label = mark.shape == "label" and not mark.bold
        is_beside_label = any(abs(y - mark.y) < LARGE for y in labels)
        if is_plain_label and box_ends and not is_beside_label:
            each = each._replace(right=min(each.right, max(box_ends)))
        drawn.append(each)
    return drawn


# -- texts


@lru_cache(maxsize=4096)
def text_for_box(text: str, bold: bool, width: float, height: float) -> str | None:
    """Return how a text fits a box: whole, in lines, or shorter; else "" for a number, None for words.

    >>> text_for_box("all-reduce over tp", False, 120.0, 40.0)
    'all-reduce\\nover tp'
    >>> text_for_box("rank 3", False, 20.0, 20.0), text_for_box("4096", False, 20.0, 20.0)
    ('3', '')
    >>> text_for_box("indivisible", False, 20.0, 20.0)
    """
    if not text:
        return ""
    for way in _ways_to_write(text):
        num_lines = way.count("\n") + 1
        line_height = LETTERS * SPACING if num_lines > 1 else LETTERS
        if text_width(way, LETTERS, bold) <= width + OVER_EDGE and num_lines * line_height <= height:
            return way
    return "" if NUMBER.fullmatch(text) else None


def _ways_to_write(text: str) -> Iterator[str]:
    """Yield a text as it is, and then in shorter and shorter ways."""
    yield text
    if RANK.fullmatch(text):
        yield text.removeprefix("rank ")
    yield from _ways_in_lines(text.split())
    yield text.replace("from ", "r")  # "from 3" is rank 3
    first, *more = text.split("\n")
    if more and NUMBER.fullmatch(first):
        yield first


def _ways_in_lines(words: Sequence[str]) -> Iterator[str]:
    """Yield words in lines, the longest lines first."""
    if len(words) < 2:
        return
    text = " ".join(words)
    longest = max(map(len, words))
    for num_letters in range(len(text) - 1, longest - 1, -1):
        yield _in_lines(text, num_letters)


def _is_heading(mark: Mark) -> bool:
    """Return whether a label names its column, in bold or as "what: how"."""
    return mark.bold or ": " in mark.text


def _heading_in_lines(mark: Mark, width: float) -> str:
    """Return a heading in two lines if it is wider than this: before the shape of a matrix, or in the middle."""
    text = mark.text
    if text_width(text, LETTERS, True) < width + ESTIMATED:
        return text
    if " [" in text:
        return text.replace(" [", "\n[")
    return _in_lines(text, len(text) // 2 + 2)


def _in_lines(text: str, num_letters: int) -> str:
    """Return a text in lines of at most so many letters; only spaces become ends of lines."""
    return "\n".join(wrap(text, num_letters, break_long_words=False, break_on_hyphens=False))
