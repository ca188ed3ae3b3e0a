"""A plot of numbers: a figure of matplotlib, shown as SVG with an alternative text. Diagrams are Scenes instead."""

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image


class Plot:
    """A figure, and what it says in words: ``alt``. The same numbers give the same bytes.

    It is no figure of pyplot's, so a thousand plots leave nothing behind.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # each format would lay it out again

    def __repr__(self) -> str:
        return self.alt

    def svg(self) -> str:
        """Return the plot as SVG, with its words as text."""
        file = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": "labkit", "svg.fonttype": "none"}):
            self.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        return file.getvalue()

    def html(self) -> str:
        """Return the plot as HTML that a notebook shows even if it is not trusted."""
        source = base64.b64encode(self.svg().encode()).decode()
        width = round(72 * self.figure.get_figwidth())
        return f'<img alt="{escape(self.alt)}" width="{width}" src="data:image/svg+xml;base64,{source}">'

    def png(self) -> bytes:
        """Return the plot as PNG, for viewers that show no SVG of a notebook that is not trusted."""
        painted, file = io.BytesIO(), io.BytesIO()
        self.figure.savefig(painted, format="png", dpi=100)
        Image.open(painted).convert("RGB").quantize(64).save(file, "png", optimize=True)
        return file.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        only_html = {"text/plain": self.alt, "text/html": self.html()}
        if include and set(include) <= set(only_html):  # a plot that the next one replaces at once
            return only_html
        return {**only_html, "image/svg+xml": self.svg(), "image/png": base64.b64encode(self.png()).decode()}


def new_figure(width: float, height: float, **options) -> Figure:
    """Return a figure of pyplot's, which is shown below its cell and freed there; the size is in inches."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, height), **options)
    # A notebook crops a figure to its artists, and takes a label's size for nothing: give it one that fills the figure.
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, facecolor="none"))
    return figure


def add_axes(figure: Figure, left: float, down: float, width: float, height: float) -> Axes:
    """Add axes at a place in inches, ``down`` from the figure's top."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, 1 - (down + height) / h, width / w, height / h))


def inches(ax: Axes) -> np.ndarray:
    """Return the width and height of the axes: [2]."""
    extent = ax.get_window_extent()
    return np.array([extent.width, extent.height]) / ax.figure.dpi


def use_inches(ax: Axes | None, *figure_inches: float) -> tuple[Axes, float, float]:
    """Measure the data of axes in inches, down from the upper left corner; return them with their width and height.

    Without axes, those of a new figure of ``figure_inches``.
    """
    ax = ax or new_figure(*figure_inches).add_axes((0, 0, 1, 1))
    width, height = inches(ax)
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(height, 0))
    return ax, float(width), float(height)


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file's bytes, written quickly: it is not sent far."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "png", compress_level=1)  # three times as fast as level 6, for half as many bytes again
    return file.getvalue()


class Canvas:
    """A figure for one drawing after another: its axes stay, and what was drawn in them goes.

    >>> Canvas((2, 1)).png(lambda ax: ax.text(0, 0, "one"))[1:4]
    b'PNG'
    """

    def __init__(self, figure_inches: tuple[float, float], places: Sequence[tuple] = ((0, 0, 1, 1),)):
        """``places`` are those of the axes in the figure, as `Figure.add_axes` takes them."""
        self._figure = Figure(figsize=figure_inches, dpi=100)
        self.axes = [self._figure.add_axes(place) for place in places]

    def png(self, draw: Callable[..., Any]) -> bytes:
        """Clear the axes, call ``draw(*axes)``, and return the picture as a PNG file's bytes."""
        for ax in self.axes:
            for artist in [*ax.collections, *ax.texts, *ax.patches]:
                artist.remove()
        draw(*self.axes)
        return png(self._figure)
