"""Draw layouts again and again, as PNG bytes: what the widget shows while a slider moves.

One figure for ever, outside pyplot's list of figures, so that a thousand redraws leave nothing behind; axes stay,
only what was drawn in them goes.
"""

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from labkit.layout import ParallelLayout
from labkit.plots.layout import FIGURE_INCHES, draw_layout, three_axes


class LayoutPainter:
    """Paints the three grids of one layout after another.

    >>> LayoutPainter().png(ParallelLayout(8, tp_size=2))[1:4]
    b'PNG'
    """

    def __init__(self, dpi: float = 100):
        self._canvas = FigureCanvasAgg(Figure(figsize=FIGURE_INCHES, dpi=dpi))
        self._axes = three_axes(self._canvas.figure)

    def png(self, layout: ParallelLayout, gpus_per_node: int = 8, *, follow: int | None = None, dimmed=False) -> bytes:
        """The picture that `draw_layout` draws, as a PNG file's bytes."""
        for ax in self._axes:
            for artist in [*ax.collections, *ax.texts]:
                artist.remove()
        draw_layout(layout, gpus_per_node, self._axes, follow=follow, dimmed=dimmed)
        self._canvas.draw()
        picture = Image.fromarray(np.asarray(self._canvas.buffer_rgba())).convert("RGB")
        file = io.BytesIO()
        picture.save(file, "png", compress_level=1)  # three times as fast as level 6, for half as many bytes again
        return file.getvalue()
