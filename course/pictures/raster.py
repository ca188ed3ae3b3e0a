"""Paint a scene as PNG, by Pillow: for the few viewers that show neither a widget nor SVG."""

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import hypot
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

FINER = 2  # painted so many times as large, then reduced: Pillow's own lines have steps
NUM_COLORS = 64
PILLOW_ANCHOR = {"start": "lm", "middle": "mm", "end": "rm"}


def png(marks: Iterable[Any], view: tuple[float, float, float, float], scale: float) -> bytes:
    """Return what is in ``view`` (left, top, width, height) as PNG, with ``scale`` pixels for each of the scene's."""
    (left, top, width, height), unit = view, FINER * scale
    image = Image.new("RGB", (round(width * unit), round(height * unit)), "white")
    draw = ImageDraw.Draw(image)
    for mark in marks:
        _paint(draw, mark, left, top, unit)
    file = io.BytesIO()
    image.reduce(FINER).quantize(NUM_COLORS).save(file, "png", optimize=True)
    return file.getvalue()


def _paint(draw: ImageDraw.ImageDraw, mark: Any, left: float, top: float, unit: float) -> None:
    def place(x: float, y: float) -> tuple[float, float]:
        return (mark.x + x - left) * unit, (mark.y + y - top) * unit

    edge = None if mark.edge == "none" else mark.edge
    thick = max(1, round(mark.edge_width * unit))
    if mark.shape == "box" and mark.width > 0 and mark.height > 0:
        corners = [place(0, 0), place(mark.width, mark.height)]
        fill = None if mark.fill == "none" else mark.fill
        radius = min(mark.radius, mark.width / 2, mark.height / 2) * unit
        draw.rounded_rectangle(corners, radius, fill, edge, thick if edge else 0)
    elif mark.shape == "line":
        for piece in _dashes(mark.points) if mark.dashed else [mark.points]:
            draw.line([place(*point) for point in piece], edge, thick, joint="curve")
        for head in mark.heads_at():
            draw.polygon([place(*point) for point in head], edge)
    for x, y, text in mark.lines():
        font = _font(round(mark.size * unit), mark.bold)
        draw.text(place(x, y), text, mark.ink, font, PILLOW_ANCHOR[mark.anchor])


def _dashes(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the dashes of a line as SVG has them: 4 pixels, and 3 between."""
    for (x, y), (x1, y1) in pairwise(points):
        length = hypot(x1 - x, y1 - y)
        for start in range(0, int(length), 7):
            ends = (start / length, min(start + 4, length) / length)
            yield [(x + (x1 - x) * share, y + (y1 - y) * share) for share in ends]


@cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(folder / f"DejaVuSans{'-Bold' * bold}.ttf", size)
