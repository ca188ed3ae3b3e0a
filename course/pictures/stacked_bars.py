"""Draws a picture of bars for a phone: bars as long as the screen allows, each below its name and its sum.

A wide picture, and the narrow one that is made of it:

    wide:   plan A  [==|====]      7 GB        narrow:  plan A           7 GB
            plan B  [==|==]        5 GB                 [=====|========]
                                                        plan B           5 GB
                                                        [=====|====]
"""

from collections.abc import Sequence
from typing import NamedTuple

from course.pictures.narrow import LETTERS, LINE, WIDTH
from course.pictures.scene import Mark, text_width
from course.pictures.stacked_wide import WidePicture

# Lengths in pixels.
WIDE_BAR = 26.0  # the height of a bar in the wide picture, as `course.pictures.sizing` draws it
BAR = 28.0  # and in the narrow one, where a line of text has room in it
BELOW_BAR = 8.0
OVER_BAR = 2.0  # how far a line across bars stands out of each
ABOVE = 20.0  # what is this far above the first name, in the wide picture, is above all bars
TO_SUM = 5.0  # at least, from a name to its sum


class _Across(NamedTuple):
    """Places and lengths across: bars begin at ``left`` in the wide picture, and at 0 in the narrow one."""

    left: float
    scale: float  # times lengths in the wide picture

    def x(self, wide_x: float) -> float:
        return (wide_x - self.left) * self.scale


def draw_bars(wide: WidePicture) -> list[Mark]:
    """Return the marks of a picture of bars, each with its name and sum beside it; [] if it is a different picture."""
    names = [mark for mark in wide.labels if mark.x == wide.left and mark.anchor == "start" and not mark.bold]
    sums = [mark for mark in wide.labels if mark.bold]
    are_in_rows = [mark.y for mark in names] == [mark.y for mark in sums]
    if not names or not wide.boxes or not are_in_rows:
        return []
    above = [mark for mark in wide.labels if mark.y < names[0].y - ABOVE]
    across = _across(wide)
    marks = []
    y = LINE if above else 0.0
    for name, total in zip(names, sums):
        marks += _words(name, total, y)
        y = marks[-1].y + LINE / 2  # below the sum
        marks += [_part(mark, across, name.y, y) for mark in wide.boxes if mark.y < name.y < mark.bottom]
        marks += _lines(wide.lines, across, y, "" if name is names[0] else f"~{name.key}")
        y += BAR + BELOW_BAR
    return [*marks, *(_above(mark, across) for mark in above)]


def _across(wide: WidePicture) -> _Across:
    """Return lengths across with which the longest bar, or the last line, ends where the screen does."""
    left = min(mark.x for mark in wide.boxes)
    right = max([mark.right for mark in wide.boxes] + [mark.x for mark in wide.lines])
    return _Across(left, WIDTH / (right - left))


def _words(name: Mark, total: Mark, y: float) -> list[Mark]:
    """Return a name and its sum in one line from y on, or in two if they are too long."""
    widths = [text_width(mark.text, LETTERS, mark.bold) for mark in (name, total)]
    is_long = sum(widths) + TO_SUM > WIDTH
    sum_y = y + LINE if is_long else y
    return [
        name.changed(x=0.0, y=y + LINE / 2, size=LETTERS),
        total.changed(x=WIDTH, y=sum_y + LINE / 2, size=LETTERS, anchor="end"),
    ]


def _part(mark: Mark, across: _Across, middle: float, y: float) -> Mark:
    """Return a part of the bar from y on, with its number if that has room; ``middle`` is that of the wide bar."""
    width = mark.width * across.scale
    height = mark.height * BAR / WIDE_BAR
    below_middle = (mark.y + mark.height / 2 - middle) * BAR / WIDE_BAR
    top = y + BAR / 2 + below_middle - height / 2
    text = mark.text if text_width(mark.text, LETTERS) + 2 <= width else ""
    return mark.changed(x=across.x(mark.x), y=top, width=width, height=height, text=text, size=LETTERS)


def _lines(lines: Sequence[Mark], across: _Across, y: float, key_ends: str) -> list[Mark]:
    """Return the lines at the bar from y on: each is as high as the bar, so that it does not go through words."""
    points = (0.0, 0.0), (0.0, BAR + 2 * OVER_BAR)
    return [each.changed(key=each.key + key_ends, x=across.x(each.x), y=y - OVER_BAR, points=points) for each in lines]


def _above(mark: Mark, across: _Across) -> Mark:
    """Return a label above all bars, moved aside if it would stand out of the picture."""
    half = text_width(mark.text, LETTERS) / 2
    x = max(half, min(WIDTH - half, across.x(mark.x)))
    return mark.changed(x=x, y=LINE / 2, size=LETTERS, anchor="middle")
