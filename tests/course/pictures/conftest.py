"""What the tests of pictures share."""

from importlib import import_module
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection


class Label(NamedTuple):
    ax: Axes
    text: str
    x: float
    y: float
    em_inches: float


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def written(request, monkeypatch):
    """Every label that is written by the module which the test's module is named after, or which it calls WRITER."""
    name = request.module.__name__.rpartition(".test_")[2]
    writer = getattr(request.module, "WRITER", None) or import_module(f"course.pictures.{name}")
    labels, draw_labels = [], writer.draw_labels

    def remember(ax, texts, centres, em_inches, *args, **kwargs):
        labels.extend(Label(ax, text, x, y, em_inches) for text, (x, y) in zip(texts, centres))
        return draw_labels(ax, texts, centres, em_inches, *args, **kwargs)

    monkeypatch.setattr(writer, "draw_labels", remember)
    return labels


@pytest.fixture
def assert_inside():
    """See that no box and no label leaves the figure."""

    def check(ax):
        ax.figure.draw_without_rendering()
        renderer = ax.figure.canvas.get_renderer()
        for artist in ax.collections:
            for path, offset in zip(artist.get_paths(), artist.get_offsets()):
                place = artist.get_transform().transform(path.vertices)
                if not isinstance(artist, PolyCollection):  # a label: its outline is moved to its place
                    place = place + artist.get_offset_transform().transform(offset)
                assert place.min() >= -1
                assert place.max(axis=0)[0] <= renderer.width + 1
                assert place.max(axis=0)[1] <= renderer.height + 1

    return check
