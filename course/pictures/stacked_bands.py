"""Draws the bands of a narrow picture: row names, columns, and the lines across them.

The words are explained in `course.pictures.stacked`.
"""

from collections.abc import Sequence

from course.pictures.narrow import LETTERS, LINE, WIDTH
from course.pictures.scene import Mark, text_width
from course.pictures.stacked_column import Fit, NarrowColumn
from course.pictures.stacked_layout import MOST_LOST_LINES, STRETCH, Layout, layouts
from course.pictures.stacked_wide import APART, WidePicture, is_word


def draw_bands(wide: WidePicture, fit: Fit | None, is_low: bool) -> tuple[list[list[Mark]], Fit | None]:
    """Return the marks of each band and their fit, which is this one if it can be; [] if there is no narrow form."""
    for layout in layouts(wide, fit, is_low):
        bands = [draw_band(wide, layout, number) for number in range(len(layout.bands))]
        if _num_lost(wide, bands) <= MOST_LOST_LINES:
            return [*bands, *_live_band(wide)], layout.fit
    return [], fit


def _num_lost(wide: WidePicture, bands: Sequence[Sequence[Mark]]) -> int:
    """Return how many lines are in no band."""
    drawn = {mark.key.partition("~")[0] for band in bands for mark in band}
    return sum(mark.key not in drawn for mark in wide.lines)


def draw_band(wide: WidePicture, layout: Layout, number: int) -> list[Mark]:
    """Return the marks of a band, from back to front; what a band before it has, too, gets a key of its own."""
    columns = [layout.columns[each] for each in layout.bands[number]]
    if all(is_word(mark) for column in columns for mark in column.wide.marks):
        return [_word_between_bands(columns[0])]
    names = [layout.row_names] if layout.row_names else []
    shown = [*names, *columns]
    marks = [mark for column in shown for mark in column.marks()]
    for line in wide.lines:
        marks += _line_in_band(line, names, columns, number, layout.fit.stretch)
    marks.sort(key=lambda mark: wide.order[mark.key])
    repeated = {mark.key for mark in wide.lines} | {mark.key for column in names for mark in column.wide.marks}
    return [mark.changed(key=f"{mark.key}~{number}") if number and mark.key in repeated else mark for mark in marks]


def _word_between_bands(column: NarrowColumn) -> Mark:
    """Return the word of arrows that lead from the band above to the one below."""
    word = column.wide.marks[0]
    text = f"↓ {word.text}"
    width = text_width(text, LETTERS)
    return word.changed(text=text, x=column.start, y=0.0, width=width, height=LINE, size=LETTERS)


def _live_band(wide: WidePicture) -> list[list[Mark]]:
    """Return what is there to be clicked as one more band, as wide as the picture; [] if there is nothing."""
    if not wide.live:
        return []
    left = min(mark.x for mark in wide.live)
    right = max(mark.right for mark in wide.live)
    scale = WIDTH / (right - left)
    band = []
    for mark in wide.live:
        across = dict(x=(mark.x - left) * scale, width=mark.width * scale)
        down = dict(y=mark.y * STRETCH, height=mark.height * STRETCH)
        band.append(mark.changed(**across, **down, size=LETTERS))
    return [band]


# -- lines across columns


def _line_in_band(
    line: Mark, names: Sequence[NarrowColumn], columns: Sequence[NarrowColumn], number: int, stretch: float
) -> list[Mark]:
    """Return a line if it is in this band: among its columns, or among the row names.

    In the first band, columns follow the row names as in the wide picture: a line can lead from one to the other.
    """
    is_first = number == 0
    places = [[*names, *columns] if is_first else columns, names]
    for place in places:
        if place and (drawn := _line(line, place, stretch)):
            return [drawn]
    return []


def _line(line: Mark, columns: Sequence[NarrowColumn], stretch: float) -> Mark | None:
    """Return a line among these columns; None if it leaves them. A level line is cut where they end."""
    xs = [line.x + x for x, _ in line.points]
    is_level = len(xs) == 2 and line.points[1][1] == 0
    if is_level:
        left, right = columns[0].wide.left, columns[-1].wide.right
        xs = [min(max(x, left), right) for x in xs]
    if is_level and xs[0] == xs[1]:
        return None
    points = []
    for wide_x, (_, y) in zip(xs, line.points):
        x = narrow_x(columns, wide_x)
        if x is None:
            return None
        points.append((x, (line.y + y) * stretch))
    x, y = points[0]
    return line.changed(x=x, y=y, points=tuple((px - x, py - y) for px, py in points))


def narrow_x(columns: Sequence[NarrowColumn], x: float) -> float | None:
    """Return where a place of the wide picture is in a band of these columns; None if it is not there."""
    first = columns[0]
    if x < first.wide.left - APART:
        is_there = x > first.wide.left - first.start - APART
        return first.start + x - first.wide.left if is_there else None
    for column, following in zip(columns, [*columns[1:], None]):
        if x <= column.wide.right + APART:
            return column.start - column.left + (x - column.wide.left) * column.scale
        if following and x < following.wide.left:
            share = (x - column.wide.right) / (following.wide.left - column.wide.right)
            return column.end + share * (following.start - column.end)
    return None
