"""A plot of numbers: a figure of matplotlib, shown as SVG with an alternative text. Diagrams are Scenes instead."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course.pictures.scene import image_html
from course.pictures.style import IDLE, INK, MUTED

LABEL_PT = 13  # the size of words in points, on plots 11 to 13 inches wide: legible from the back of a room


class Plot:
    """A figure, and what it says in words: ``alt``. The same numbers give the same bytes.

    The figure is not one of pyplot's, so a thousand plots leave nothing behind.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt, file = figure, alt, io.StringIO()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it would lay out again, a little differently
        with matplotlib.rc_context({"svg.hashsalt": "labkit", "svg.fonttype": "none"}):  # its words stay text
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        self._svg = file.getvalue()

    def __repr__(self) -> str:
        return self.alt

    def svg(self) -> str:
        return self._svg

    def html(self) -> str:
        """Return the plot as HTML that a notebook shows even if it is not trusted."""
        return image_html({self.svg(): round(72 * self.figure.get_figwidth())}, self.alt)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": self.alt, "text/html": self.html(), "image/svg+xml": self._svg}


def label_plot(ax: Axes, title: str, x: str, y: str) -> None:
    """Give a plot its title, the names of its axes and a grid."""
    ax.set_title(title, loc="left", size=LABEL_PT + 4, weight="bold", color=INK)
    ax.set_xlabel(x, size=LABEL_PT, color=INK)
    ax.set_ylabel(y, size=LABEL_PT, color=INK)
    ax.tick_params(labelsize=LABEL_PT - 1, colors=MUTED)
    ax.grid(which="major", color=IDLE)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
