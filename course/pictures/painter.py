"""Draw again and again, as PNG bytes: what an explorer shows while a slider moves.

Figures outside pyplot's list, so that a thousand redraws leave nothing behind. Where one figure serves for ever, its
axes stay, and only what was drawn in them goes.
"""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from course.pictures.layout import FIGURE_INCHES, draw_layout, three_axes
from labkit.layout import ParallelLayout


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes, written quickly: it is not sent far."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "png", compress_level=1)  # three times as fast as level 6, for half as many bytes again
    return file.getvalue()


def clear(*axes: Axes) -> None:
    """Remove what was drawn, and keep the axes."""
    for ax in axes:
        for artist in [*ax.collections, *ax.texts]:
            artist.remove()


class LayoutPainter:
    """Paints the three grids of one layout after another.

    >>> LayoutPainter().png(ParallelLayout(8, tp_size=2))[1:4]
    b'PNG'
    """

    def __init__(self, dpi: float = 100):
        self._figure = Figure(figsize=FIGURE_INCHES, dpi=dpi)
        self._axes = three_axes(self._figure)

    def png(self, layout: ParallelLayout, gpus_per_node: int = 8, *, follow: int | None = None, dimmed=False) -> bytes:
        """The picture that `draw_layout` draws, as a PNG file's bytes."""
        clear(*self._axes)
        draw_layout(layout, gpus_per_node, self._axes, follow=follow, dimmed=dimmed)
        return png(self._figure)
