"""Boxes in rows, a row a rank, and labels that fit into them: what pictures of timelines are made of.

A handful of collections whatever the number of boxes, because a widget redraws them at every step of a slider.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course.pictures.glyphs import draw_labels, label_path
from course.pictures.style import text_on

LARGEST, COMFORTABLE, SMALLEST = 0.17, 0.13, 0.085
"""Sizes of labels, in inches an em: no larger; another way of writing is tried below; left out below."""
PAD_INCHES = 0.04
"""Between a label and its box's sides, together."""


def draw_boxes(ax: Axes, lefts, rights, tops, height: float, **look) -> PolyCollection:
    """Draw rectangles as one artist: ``lefts``, ``rights`` and ``tops`` [n], all of one height."""
    corners = np.empty((len(lefts), 4, 2))
    corners[:, 0, 0] = corners[:, 1, 0] = lefts
    corners[:, 2, 0] = corners[:, 3, 0] = rights
    corners[:, 0, 1] = corners[:, 3, 1] = tops
    corners[:, 1, 1] = corners[:, 2, 1] = np.asarray(tops) + height
    boxes = PolyCollection(corners, **look)  # pyright: ignore[reportArgumentType] -- an array is faster than a list
    ax.add_collection(boxes, autolim=False)
    return boxes


def write_labels(ax: Axes, labels: Sequence[str], lefts, rights, tops, height: float, fills) -> None:
    """Write labels into boxes, all in one size: whole, or without the chunk, or the letter above the number.

    The first way of these that is comfortable to read, or else the one that finds room for most labels. Those that do
    not fit even so are left out: the text beside the picture says the same facts.
    """
    width, box_inches = inches(ax) * (1.0, height) / (abs(np.diff(ax.get_xlim())[0]), abs(np.diff(ax.get_ylim())[0]))
    room = np.maximum((rights - lefts) * width - PAD_INCHES, 0)
    ways = []
    for write in (_whole, _without_chunk, _stacked):
        lines = [write(label) for label in labels]
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


def _whole(label: str) -> tuple[str, ...]:
    return (label,)


def _without_chunk(label: str) -> tuple[str, ...]:
    """Without the chunk, which the tint shows, and without the word before, which the lane shows.

    >>> _without_chunk("F3.1"), _without_chunk("send F3"), _without_chunk("all_reduce")
    (('F3',), ('F3',), ('all_reduce',))
    """
    return (re.sub(r"^.* |\.\d+$", "", label),)


def _stacked(label: str) -> tuple[str, ...]:
    """The letter of an op above its number.

    >>> _stacked("F3.1"), _stacked("step")
    (('F', '3'), ('step', ''))
    """
    op = re.fullmatch(r"([A-Z])(\d+)(\.\d+)?", label)
    return (op[1], op[2]) if op else (label, "")


def width_ems(text: str) -> float:
    """About the width of a label, from its letters' own: a label's outline takes a millisecond to make, unlike this.

    >>> text = "rank 12"
    >>> bool(abs(width_ems(text) - label_path(text).get_extents().width) < 0.3)
    True
    """
    return sum(map(_letter_ems, text)) - 0.08


@lru_cache(maxsize=1024)
def _letter_ems(letter: str) -> float:
    like = "0" if letter.isdigit() else letter  # numbers of one length are one width
    return 0.08 + (label_path(like).get_extents().width if letter.strip() else 0.24)


def inches(ax: Axes) -> np.ndarray:
    """Width and height of the axes: [2]."""
    extent, dpi = ax.get_window_extent(), ax.figure.dpi
    return np.array([extent.width / dpi, extent.height / dpi])


def add_axes(figure: Figure, left: float, down: float, width: float, height: float) -> Axes:
    """Axes at a place in inches, ``down`` from the figure's top."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, 1 - (down + height) / h, width / w, height / h))


def new_figure(width: float, height: float) -> Figure:
    """A figure of pyplot's, which is shown below its cell; a widget brings its own."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height))
    # A notebook crops a figure to its artists, and takes a label's size for nothing: give it one that fills the figure.
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, facecolor="none"))
    return figure
