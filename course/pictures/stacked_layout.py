"""Chooses how the columns of a wide picture stand in bands: at which scale, and which columns in which band.

The words are explained in `course.pictures.stacked`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from course.pictures.narrow import MOST_BANDS, WIDTH
from course.pictures.stacked_column import RANK, Fit, NarrowColumn, draw_column, draw_row_names, hang_over
from course.pictures.stacked_wide import APART, WidePicture, is_word

SCALES = 1.2, 1.07, 1.0, 0.94, 0.88, 0.8, 0.7  # letters grow by 16 / 13: at 1.2, texts fit as they did
SMALL_SCALES = *SCALES, 0.65, 0.6, 0.52, 0.46  # at the smallest, few boxes have room for a text
STRETCH = 1.23  # 16 / 13, too: a line of text has the room that it had
LARGE_STRETCH = 1.45  # room for a second line in more boxes
LEAST_GAP, MOST_GAP = 5.0, 16.0  # pixels between columns of a band: they stay apart, and no room is wasted
MOST_LOST_LINES = 2  # from band to band, which the narrow picture cannot draw
ROUNDING = 1.0  # pixels that a band may be too wide, as lengths in stored pictures are rounded


@dataclass
class Layout:
    """Columns at their places in bands; ``bands`` has the numbers of the columns of each."""

    fit: Fit
    row_names: NarrowColumn | None
    columns: list[NarrowColumn]
    bands: list[range]

    @property
    def num_shorter(self) -> int:
        """How many texts in its columns are shorter than in the wide picture."""
        pairs = [pair for column in self.columns for pair in column.pairs]
        return sum(mark.text.split() != each.text.split() for mark, each in pairs)


def layouts(wide: WidePicture, fit: Fit | None, is_low: bool) -> list[Layout]:
    """Return how a picture can stand in bands, the best first.

    With this fit, that of the step before, if it can. Else with the fewest bands, then the fewest shorter texts, then
    the first fit in order: whole names before numbers, large before small.
    """
    if fit and (layout := lay_out(wide, fit)):
        return [layout]
    for fits in _fits(wide, is_low):
        tried = [lay_out(wide, each) for each in fits]
        found = [layout for layout in tried if layout]
        if found:
            return sorted(found, key=_num_bands_and_shorter)
    return []


def _num_bands_and_shorter(layout: Layout) -> tuple[int, int]:
    return len(layout.bands), layout.num_shorter


def _fits(wide: WidePicture, is_low: bool) -> Iterator[list[Fit]]:
    """Yield fits to try together, and then those to try if none of them will do.

    The columns of matrices all keep one scale, and are never small: their lengths can be compared.
    """
    has_matrices = any("[" in mark.text for mark in [*wide.labels, *wide.boxes])
    tries: list[tuple[Sequence[float], float]] = [(SMALL_SCALES, STRETCH), (SMALL_SCALES, LARGE_STRETCH)]
    if has_matrices:
        tries = [(SCALES, STRETCH)]
    elif not is_low:
        tries.insert(0, (SCALES, STRETCH))
    for scales, stretch in tries:
        yield [
            Fit(scale, stretch, has_numbers, may_squeeze=not has_matrices)
            for has_numbers in _ways_to_name(wide)
            for scale in scales
        ]


def _ways_to_name(wide: WidePicture) -> list[bool]:
    """Return whether ranks are named by their numbers alone: no, yes, or both to be tried.

    A name in a box always is the number, as the box of a whole name would take the room of a column.
    """
    names = wide.row_names.marks if wide.row_names else []
    if not names or not all(RANK.fullmatch(mark.text) for mark in names):
        return [False]
    return [False, True] if names[0].shape == "label" else [True]


def lay_out(wide: WidePicture, fit: Fit) -> Layout | None:
    """Return the columns with this fit in as few bands as can be; None if they need too many or lose too much."""
    names = draw_row_names(wide.row_names, fit) if wide.row_names else None
    if names:
        names.start = wide.lead
    start = names.end + LEAST_GAP if names else wide.lead
    columns = _draw_columns(wide, fit, WIDTH - start)
    gaps = [following.left - column.right for column, following in pairwise(wide.columns)]
    gaps.append(0.0)  # after the last column
    narrow_gaps = [_narrow_gap(gap, fit.scale) for gap in gaps]
    bands = cut([column.width for column in columns], gaps, narrow_gaps, WIDTH - start + ROUNDING)
    if not columns or len(bands) > MOST_BANDS or _num_cut(wide, bands) > MOST_LOST_LINES:
        return None
    if not all(_can_be_band(wide, band) for band in bands):
        return None
    for band in bands:
        x = start
        for number in band:
            columns[number].start = x
            x += columns[number].width + narrow_gaps[number]
    return Layout(fit, names, columns, bands)


def _narrow_gap(gap: float, scale: float) -> float:
    """Return how wide a gap is in the narrow picture; one that is small is kept."""
    least = min(LEAST_GAP, gap)
    return min(max(gap * scale, least), MOST_GAP)


def _draw_columns(wide: WidePicture, fit: Fit, room: float) -> list[NarrowColumn]:
    """Return the drawn columns; [] if one does not fit."""
    columns = []
    for each in wide.columns:
        column = draw_column(each, fit, room)
        if not column or column.width > room + ROUNDING:
            return []
        columns.append(column)
    for column, following in pairwise(columns):
        column.drawn = hang_over(column, following)
    return columns


def _can_be_band(wide: WidePicture, band: range) -> bool:
    """Return whether columns have a box, without which they say nothing, or are words of arrows and nothing else."""
    marks = [mark for number in band for mark in wide.columns[number].marks]
    has_box = any(mark.shape == "box" and not is_word(mark) for mark in marks)
    return has_box or all(is_word(mark) for mark in marks)


def _num_cut(wide: WidePicture, bands: Sequence[range]) -> int:
    """Return how many arrows lead from band to band."""
    ends = [wide.columns[band.stop - 1].right for band in bands[:-1]]
    num_cut = 0
    for mark in wide.lines:
        xs = [mark.x + x for x, _ in mark.points]
        is_cut = any(min(xs) < end - APART and end + APART < max(xs) for end in ends)
        num_cut += is_cut and mark.heads > 0
    return num_cut


class _Cut(NamedTuple):
    """How the first columns are cut into bands; the least is the best."""

    num_bands: int
    minus_gaps: float  # the widths of the gaps where bands are parted
    last: int  # the number of the column that begins the last band


def cut(widths: Sequence[float], gaps: Sequence[float], narrow_gaps: Sequence[float], room: float) -> list[range]:
    """Return the numbers of the columns in each band: as few bands as have room, parted at the widest gaps.

    Args:
        widths: of the columns in the narrow picture.
        gaps: after each column, in the wide picture.
        narrow_gaps: the same, in the narrow picture.
        room: how wide a band can be.

    >>> cut([100, 100, 100], [10, 40, 0], [5, 5, 0], room=210)
    [range(0, 2), range(2, 3)]
    """
    best = [_Cut(0, 0.0, 0)]  # of the first 0, 1, 2, ... columns
    for end in range(1, len(widths) + 1):
        best.append(min(_one_more_band(best[begin], begin, gaps) for begin in _begins(end, widths, narrow_gaps, room)))
    bands = []
    end = len(widths)
    while end:
        begin = best[end].last
        bands.insert(0, range(begin, end))
        end = begin
    return bands


def _one_more_band(before: _Cut, begin: int, gaps: Sequence[float]) -> _Cut:
    gap = gaps[begin - 1] if begin else 0.0
    return _Cut(before.num_bands + 1, before.minus_gaps - gap, begin)


def _begins(end: int, widths: Sequence[float], narrow_gaps: Sequence[float], room: float) -> Iterator[int]:
    """Yield where a band can begin whose last column is the one before ``end``."""
    last = end - 1
    yield last
    width = widths[last]
    for begin in reversed(range(last)):
        width += widths[begin] + narrow_gaps[begin]
        if width > room:
            return
        yield begin
