"""Paint a scene as PNG, by Pillow: for the few viewers that show neither a widget nor SVG."""

import io
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from course.pictures.scene import Mark, Scene

FINER = 2  # painted so many times as large, then reduced: Pillow's own lines have steps
NUM_COLORS = 128
PILLOW_ANCHOR = {"start": "lm", "middle": "mm", "end": "rm"}


def png(scene: Scene, scale: float) -> bytes:
    """Return a scene as PNG, ``scale`` pixels for each of its own."""
    unit = FINER * scale
    image = Image.new("RGB", (round(scene.width * unit), round(scene.height * unit)), "white")
    draw = ImageDraw.Draw(image)
    for mark in scene.marks:
        _paint(draw, mark, unit)
    file = io.BytesIO()
    image.reduce(FINER).quantize(NUM_COLORS).save(file, "png", optimize=True)
    return file.getvalue()


def _paint(draw: ImageDraw.ImageDraw, mark: Mark, unit: float) -> None:
    def place(x: float, y: float) -> tuple[float, float]:
        return (mark.x + x) * unit, (mark.y + y) * unit

    edge = None if mark.edge == "none" else mark.edge
    thick = max(1, round(mark.edge_width * unit))
    if mark.shape == "box" and mark.width > 0 and mark.height > 0:
        corners = [place(0, 0), place(mark.width, mark.height)]
        fill = None if mark.fill == "none" else mark.fill
        radius = min(mark.radius, mark.width / 2, mark.height / 2) * unit
        draw.rounded_rectangle(corners, radius, fill, edge, thick if edge else 0)
    elif mark.shape == "line":
        draw.line([place(*point) for point in mark.points], edge, thick, joint="curve")
        for head in mark.heads_at():
            draw.polygon([place(*point) for point in head], edge)
    for x, y, text in mark.lines():
        font = _font(round(mark.size * unit), mark.bold)
        draw.text(place(x, y), text, mark.ink, font, PILLOW_ANCHOR[mark.anchor])


@cache
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(folder / f"DejaVuSans{'-Bold' * bold}.ttf", size)
