"""Figures in inches, and one figure redrawn for ever."""

import struct

import pytest
from matplotlib import pyplot

from course.pictures.layout import FIGURE_INCHES, THREE_PLACES, draw_layout
from course.pictures.painter import Canvas, add_axes, inches, new_figure, use_inches
from labkit.layout import ParallelLayout


def test_a_canvas_gives_pngs_and_keeps_no_figure():
    canvas = Canvas(FIGURE_INCHES, THREE_PLACES)

    def painted(layout, follow=None):
        return canvas.png(lambda *axes: draw_layout(layout, axes=axes, follow=follow))

    first = painted(ParallelLayout(16, 2, 4))
    width, height = struct.unpack(">II", first[16:24])
    assert (width, height) == (1100, 520)
    assert painted(ParallelLayout(64, 4, 4), follow=3) != first
    assert painted(ParallelLayout(16, 2, 4)) == first  # nothing of the other one is left
    assert pyplot.get_fignums() == []


def test_whatever_is_drawn_on_a_canvas_goes_before_the_next_drawing():
    canvas = Canvas((2, 1))
    empty = canvas.png(lambda ax: None)
    canvas.png(lambda ax: (ax.text(0, 0, "text"), ax.scatter([0.5], [0.5]), ax.add_patch(pyplot.Circle((0, 0)))))
    assert canvas.png(lambda ax: None) == empty


def test_places_are_in_inches_down_from_the_upper_left_corner():
    figure = new_figure(8, 4)
    ax = add_axes(figure, left=1, down=0.5, width=6, height=2)
    assert ax.get_position().bounds == pytest.approx((1 / 8, 1.5 / 4, 6 / 8, 2 / 4))
    assert inches(ax) == pytest.approx((6, 2))
    _, width, height = use_inches(ax)
    assert (width, height) == pytest.approx((6, 2))
    assert ax.transData.transform((0, 0)) == pytest.approx(figure.dpi * pyplot.np.array((1, 3.5)))
    assert ax.transData.transform((6, 2)) == pytest.approx(figure.dpi * pyplot.np.array((7, 1.5)))


def test_without_axes_a_figure_of_that_size_is_made():
    ax, width, height = use_inches(None, 5, 3)
    assert (width, height) == pytest.approx((5, 3))
    assert tuple(ax.figure.get_size_inches()) == (5, 3)
