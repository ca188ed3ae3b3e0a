"""Reads a wide picture from its marks: header, legend, row names, columns and lines.

The words are explained in `course.pictures.stacked`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from course.pictures.narrow import LINE
from course.pictures.scene import LARGE, Mark, text_width
from course.pictures.style import FRAME_FILL

# Lengths in pixels of the wide picture.
APART = 2.0  # two columns have more than this between them; what is less far from a place stands at that place
LARGEST_SWATCH = 16.0  # the side of a swatch in a legend, and its distance from its word
HEADER_HEIGHT = 36.0  # a title and the line below it
PAPER = "none", "#ffffff", FRAME_FILL  # the fills of a word that hides the arrow behind it
LEFT_SHARE = {"start": 0.0, "middle": 0.5, "end": 1.0}  # of a text's width: how much is to the left of its anchor


@dataclass
class Column:
    """Marks of a wide picture from top to bottom, with a gap before and after them."""

    left: float
    right: float
    marks: list[Mark]

    @property
    def width(self) -> float:
        return self.right - self.left


class WidePicture:
    """The marks of a wide picture by what they are.

    The ``header`` stands above the boxes; the ``legend`` has pairs of a swatch and its word; ``live`` marks are there
    to be clicked. The rest is the body: ``labels`` and ``boxes`` in ``all_columns``, and ``lines`` across them.
    """

    def __init__(self, marks: Sequence[Mark]):
        self.live = [mark for mark in marks if mark.live]
        still = [mark for mark in marks if not mark.live]
        self.left = min(mark.x for mark in still)
        self.header = _header(still, self.left)
        self.legend = [pair for pair in pairwise(still) if _is_legend(*pair)]
        apart = {mark.key for pair in [*self.legend, self.header] for mark in pair}
        body = [mark for mark in still if mark.key not in apart]
        self.order = {mark.key: number for number, mark in enumerate(body)}  # from back to front
        self.lines = [mark for mark in body if mark.shape == "line"]
        self.labels = [mark for mark in body if mark.shape == "label"]
        self.boxes = [mark for mark in body if mark.shape == "box"]
        self.all_columns = columns_of([*self.labels, *self.boxes])

    @cached_property
    def row_names(self) -> Column | None:
        """The first column if it has nothing but the names of rows."""
        if len(self.all_columns) < 2:
            return None
        first = self.all_columns[0]
        is_text = len(first.marks) > 1 and all(mark.text for mark in first.marks)
        is_aligned = all(mark.x - first.left <= APART for mark in first.marks)
        return first if is_text and is_aligned else None

    @cached_property
    def columns(self) -> list[Column]:
        """The columns after the row names."""
        return self.all_columns[1:] if self.row_names else self.all_columns

    @cached_property
    def lead(self) -> float:
        """How far lines stand out to the left of the first column."""
        first = self.all_columns[0].left
        ends = [mark.x + x for mark in self.lines for x, _ in mark.points]
        return max(0.0, first - min(ends, default=first))


def panels(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Return the marks of each panel: those below its title. A picture with at most one title is one panel."""
    titles = [mark for mark in marks if mark.shape == "label" and mark.bold and mark.size == LARGE]
    if len(titles) < 2:
        return [[*marks]]
    found: dict[str, list[Mark]] = {title.key: [] for title in titles}
    for mark in marks:
        found[_title_of(mark, titles).key].append(mark)
    return [*found.values()]


def _title_of(mark: Mark, titles: Sequence[Mark]) -> Mark:
    """Return the nearest title to the left in the nearest row of titles above."""
    above = [title.y for title in titles if title.y < mark.y + LARGE]
    row = max(above, default=titles[0].y)
    before = [title for title in titles if title.y == row and title.x < mark.x + LARGE]
    return max(before, key=_left, default=titles[0])


def columns_of(marks: Sequence[Mark]) -> list[Column]:
    """Return the columns from left to right: between two of them is a gap from top to bottom."""
    columns: list[Column] = []
    for mark in sorted(marks, key=_left):
        left, right = extent_across(mark)
        if columns and left < columns[-1].right + APART:
            columns[-1].right = max(columns[-1].right, right)
            columns[-1].marks.append(mark)
        else:
            columns.append(Column(left, right, [mark]))
    return columns


def _header(marks: Sequence[Mark], left: float) -> list[Mark]:
    """Return the title and what is said below it: labels above all boxes, at the left or right of the picture."""
    top = min(mark.y for mark in marks)
    first_box = min((mark.y for mark in marks if mark.shape == "box"), default=top)
    above = [mark for mark in marks if mark.shape == "label" and mark.y < min(first_box, top + HEADER_HEIGHT)]
    return [mark for mark in above if mark.anchor == "end" or abs(mark.x - left) < APART]


def _is_legend(swatch: Mark, word: Mark) -> bool:
    """Return whether these are a small square and the word after it."""
    is_square = swatch.shape == "box" and not swatch.text and swatch.width == swatch.height <= LARGEST_SWATCH
    if not is_square or word.shape != "label":
        return False
    is_level = abs(word.y - (swatch.y + swatch.height / 2)) < 1
    return is_level and 0 < word.x - swatch.right < LARGEST_SWATCH


def is_word(mark: Mark) -> bool:
    """Return whether this is a word on a box without an edge, which hides the arrow behind it."""
    return mark.shape == "box" and bool(mark.text) and mark.edge == "none" and mark.fill in PAPER


def extent_across(mark: Mark) -> tuple[float, float]:
    """Return the left and right of a box or of a text."""
    if mark.shape == "box":
        return mark.x, mark.right
    return text_extent(mark.x, text_width(mark.text, mark.size, mark.bold), mark.anchor)


def text_extent(x: float, width: float, anchor: str) -> tuple[float, float]:
    """Return the left and right of a text of this width that is anchored at x."""
    left = x - LEFT_SHARE[anchor] * width
    return left, left + width


def extent_down(mark: Mark) -> tuple[float, float]:
    """Return the top and bottom of a mark; of a label, as the narrow picture writes it."""
    if mark.shape == "box":
        return mark.y, mark.bottom
    if mark.shape == "line":
        ys = [mark.y + y for _, y in mark.points]
        return min(ys), max(ys)
    half = (mark.text.count("\n") + 1) * LINE / 2
    return mark.y - half, mark.y + half


def _left(mark: Mark) -> float:
    return extent_across(mark)[0]
