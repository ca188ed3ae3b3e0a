"""Draw boxes in rows, one row per rank, and labels that fit into them: what pictures of timelines are made of.

They are a handful of collections however many boxes there are, because an explorer redraws them as its sliders move.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from course.pictures.glyphs import draw_labels, label_path
from course.pictures.painter import inches
from course.pictures.style import text_on
from labkit.schedules.schedule import LETTER
from labkit.timeline.spans import Span

LARGEST, COMFORTABLE, SMALLEST = 0.17, 0.13, 0.085
"""Sizes of labels in inches per em: the largest; below the second a shorter way is tried; none is below the third."""
PAD_INCHES = 0.04
"""The room between a label and its box's sides, both together."""


def draw_boxes(ax: Axes, lefts, rights, tops, height, **look) -> PolyCollection:
    """Draw rectangles as one artist: ``tops`` are [n], and each of the others is [n] or one number for all."""
    corners = np.empty((len(tops), 4, 2))
    corners[:, 0, 0] = corners[:, 1, 0] = lefts
    corners[:, 2, 0] = corners[:, 3, 0] = rights
    corners[:, 0, 1] = corners[:, 3, 1] = tops
    corners[:, 1, 1] = corners[:, 2, 1] = np.asarray(tops) + height
    boxes = PolyCollection(corners, **look)  # pyright: ignore[reportArgumentType] -- an array is faster than a list
    ax.add_collection(boxes, autolim=False)
    return boxes


def write_labels(ax: Axes, spans: Sequence[Span], lefts, rights, tops, height: float, fills) -> None:
    """Write labels into boxes, all in one size: whole, or without the chunk, or with the letter above the number.

    The first of these ways that is comfortable to read is taken, or else the one that finds room for most labels. Those
    that still do not fit are left out: the text beside the picture says the same facts.
    """
    width, box_inches = inches(ax) * (1.0, height) / (abs(np.diff(ax.get_xlim())[0]), abs(np.diff(ax.get_ylim())[0]))
    room = np.maximum((rights - lefts) * width - PAD_INCHES, 0)
    ways = []
    for write in (_whole, _without_chunk, _stacked):
        lines = [write(span) for span in spans]
        fits = room / np.array([max(map(width_ems, line)) for line in lines])
        tallest = box_inches * (0.39 if write is _stacked else 0.72)
        usual = np.quantile(fits, 0.1)  # a few that are much smaller go without
        size = min(LARGEST, tallest, max(SMALLEST, fits[fits >= 0.7 * usual].min()))
        shown = np.flatnonzero(fits >= size) if size >= SMALLEST else []
        ways.append((len(shown), size, lines, shown))
        if size >= COMFORTABLE:
            break
    way = ways[-1] if ways[-1][1] >= COMFORTABLE else max(ways, key=lambda way: way[:2])
    _, size, lines, shown = way
    if not len(shown):
        return
    num_lines = len(lines[0])
    line_height = 1.2 * size / box_inches * height
    for number in range(num_lines):
        middles = tops[shown] + height / 2 + (number - (num_lines - 1) / 2) * line_height
        places = np.stack([(lefts + rights)[shown] / 2, middles], axis=1)
        draw_labels(ax, [lines[i][number] for i in shown], places, size, [text_on(fills[i]) for i in shown])


def _whole(span: Span) -> tuple[str, ...]:
    return (span.label,)


def _without_chunk(span: Span) -> tuple[str, ...]:
    """Without the chunk, which the tint shows, and without the word before, which the lane shows.

    >>> from labkit.schedules import Op
    >>> _without_chunk(Span(0, "communication", "send F3.1", 0, 1, op=Op("forward", 3, 1)))
    ('F3',)
    """
    return (str(span.op._replace(chunk=0)) if span.op else span.label,)


def _stacked(span: Span) -> tuple[str, ...]:
    """The letter of an op above its number.

    >>> from labkit.schedules import Op
    >>> _stacked(Span(0, "forward", "F3.1", 0, 1, op=Op("forward", 3, 1))), _stacked(Span(0, "optimizer", "step", 0, 1))
    (('F', '3'), ('step', ''))
    """
    return (LETTER[span.op.kind], str(span.op.micro_batch)) if span.op else (span.label, "")


def width_ems(text: str) -> float:
    """Estimate the width of a label from the widths of its letters: making its outline would take a millisecond.

    >>> text = "rank 12"
    >>> bool(abs(width_ems(text) - label_path(text).get_extents().width) < 0.3)
    True
    """
    return sum(map(_letter_ems, text)) - 0.08


@lru_cache(maxsize=1024)
def _letter_ems(letter: str) -> float:
    like = "0" if letter.isdigit() else letter  # numbers of equal length then have equal width
    return 0.08 + (label_path(like).get_extents().width if letter.strip() else 0.24)
