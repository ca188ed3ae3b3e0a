"""Draw many short labels as one artist.

A matplotlib Text takes about a millisecond to draw, most of it for layout that a number in a box does not need. Here
a label's outline is made once and kept, and any number of labels is one PathCollection.
"""

from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Affine2D

from course.pictures.style import EM, INK, TITLE_PT

_FONTS = {bold: FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal") for bold in (False, True)}
_CAP_HEIGHT = 0.729  # ems, of DejaVu Sans: the font that matplotlib brings along


def draw_labels(ax: Axes, texts, centres, em_inches: float, colors, bold: bool = False, align: str = "center"):
    """Write ``texts[i]`` at ``centres[i]`` (data coordinates) in one artist; ``em_inches`` is the font size."""
    labels = PathCollection(
        [label_path(text, bold, align) for text in texts],
        offsets=centres,
        offset_transform=ax.transData,
        transform=Affine2D().scale(em_inches) + ax.figure.dpi_scale_trans,
        facecolors=colors,
        linewidths=0,
        clip_on=False,
        snap=False,  # snapped to whole pixels, letters of straight lines lose some: a small F its middle bar
    )
    ax.add_collection(labels, autolim=False)
    return labels


def draw_heading(ax: Axes, left: float, title: str, title_y: float, says: str, says_y: float, color, ink=INK) -> None:
    """Write a title, and below it a line about it: matplotlib's own titles would slow down every redraw."""
    draw_labels(ax, [title], [(left, title_y)], TITLE_PT / 72, color, bold=True, align="left")
    draw_labels(ax, [says], [(left, says_y)], EM, ink, align="left")


@lru_cache(maxsize=8192)
def label_path(text: str, bold: bool = False, align: str = "center") -> Path:
    """Return the outline of a label in ems: its middle is at the origin, or with align="left" its left edge.

    >>> box = label_path("64").get_extents()
    >>> bool(abs(box.x0 + box.x1) < 0.01 and abs(box.y0 + box.y1) < 0.05)
    True
    """
    vertices, codes = text_to_path.get_text_path(_FONTS[bold], text)
    points = np.asarray(vertices) / text_to_path.FONT_SCALE
    box = Path(points, codes).get_extents()
    left = box.x0 if align == "left" else (box.x0 + box.x1) / 2
    return Path(points - (left, _CAP_HEIGHT / 2), codes)
