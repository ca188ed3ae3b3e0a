"""Labels made of outlines: small ones stay readable."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from course.pictures.glyphs import draw_labels


def ink_of(letter, em_inches, y):
    """How dark the picture is in which a letter stands at y inches: in pixels, if they were black."""
    figure = Figure(figsize=(1, 1), dpi=100)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.axis("off")
    draw_labels(ax, [letter], [(0.5, y)], em_inches, ["black"])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return (255 - np.asarray(canvas.buffer_rgba())[:, :, 0].astype(float)).sum() / 255


@pytest.mark.parametrize("y", [0.5, 0.502, 0.505, 0.508])
@pytest.mark.parametrize("em_inches", [0.085, 0.1, 0.12])
def test_a_small_f_keeps_its_middle_bar_wherever_it_stands(em_inches, y):
    assert ink_of("F", em_inches, y) > 1.15 * ink_of("Γ", em_inches, y)
