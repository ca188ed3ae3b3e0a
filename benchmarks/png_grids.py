"""The grids of notebook 01 as PNG by matplotlib, each a few collections: the quick way to draw pictures for sliders.

It is a peer of the scenes in `bench_browser`.
"""

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Affine2D
from PIL import Image

from course.pictures.floor_plan import floor_plan
from course.pictures.layout import BOX, axes_in_use
from course.pictures.style import AXIS_COLOR, TINTS, group_letter, tint
from labkit.layout import ParallelLayout

INCHES = 11.0, 5.2
_outlines: dict[str, Path] = {}


def png_grids(layout: ParallelLayout, gpus_per_node: int) -> bytes:
    """Return the grids of a layout: boxes in their group's tint, with letters where they can be read."""
    figure, axes = Figure(figsize=INCHES, dpi=100), axes_in_use(layout)
    for number, axis in enumerate(axes):
        ax = figure.add_axes((number / len(axes), 0, 0.95 / len(axes), 0.85))
        ax.set_axis_off()
        width, height = INCHES[0] * 0.95 / len(axes), INCHES[1] * 0.85
        plan = floor_plan(layout.world_size, gpus_per_node, width, height)
        unit = plan.box_length(width, height)
        ax.set(xlim=(0, width / unit), ylim=(height / unit, 0))
        group_of = {rank: index for index, group in enumerate(layout.groups(axis)) for rank in group}
        groups = [group_of[rank] for rank in range(layout.world_size)]
        corners = np.array([plan.corner(node) for node in range(plan.num_nodes)])
        _boxes(ax, corners + np.array(plan.frame) / 2, plan.frame, ["#f5f7f9"] * plan.num_nodes)
        centres = np.array([plan.centre(rank) for rank in range(layout.world_size)])
        _boxes(ax, centres, (BOX, BOX), [tint(AXIS_COLOR[axis], TINTS[group % len(TINTS)]) for group in groups])
        if unit * 100 > 15:
            _letters(ax, list(map(group_letter, groups)), centres - (0, 0.2), 0.4 * unit)
            _letters(ax, list(map(str, range(layout.world_size))), centres + (0, 0.25), 0.35 * unit)
    canvas, file = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.save(file, "png", compress_level=1)
    return file.getvalue()


def _boxes(ax, centres: np.ndarray, size: tuple[float, float], fills: list[str]) -> None:
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * np.array(size) / 2
    boxes = centres[:, None, :] + corners
    ax.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="#aeb8c0", linewidths=0.5), autolim=False)


def _letters(ax, texts: list[str], centres: np.ndarray, em_inches: float) -> None:
    for text in set(texts) - _outlines.keys():
        vertices, codes = text_to_path.get_text_path(FontProperties(family="DejaVu Sans"), text)
        points = np.asarray(vertices) / text_to_path.FONT_SCALE
        _outlines[text] = Path(points - (points.max(axis=0) + points.min(axis=0)) / 2, codes)
    scale = Affine2D().scale(em_inches) + ax.figure.dpi_scale_trans
    paths = [_outlines[text] for text in texts]
    labels = PathCollection(paths, offsets=centres, offset_transform=ax.transData, transform=scale, linewidths=0)
    ax.add_collection(labels, autolim=False)
