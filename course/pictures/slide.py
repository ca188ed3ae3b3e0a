"""Draws a timeline for a slide, where it is shown 1.5 times as large: its letters of 16 pixels then have 24.

Timelines that are together taller than a slide become a picture each.
"""

from collections.abc import Iterator
from dataclasses import replace

from course.pictures.narrow import BAR, BESIDE, LETTERS, LINE, LOWER, START, Block, Folded, Wide, read, scene_of
from course.pictures.scene import Mark, Scene, is_scene, label, text_width
from course.pictures.timeline import GAP, LEFT, WORK

TIMES = 1.5
WIDTH = 840.0
BARS = 112.0  # the width of what stands beside the rows
TALLEST = 520.0  # of a picture with several timelines


def on_slide(scene: Scene) -> Scene:
    """Return a timeline for a slide; any other picture as it is."""
    wide = read(scene.marks)
    return OnSlide(wide).scene(scene) if wide else scene


def svgs_on_slide(svg: str) -> list[str]:
    """Return a stored timeline for a slide, as one picture or several; none if it is another picture."""
    if not is_scene(svg):
        return []
    scene = scene_of(svg)
    wide = read(scene.marks)
    if not wide:
        return []
    whole = OnSlide(wide).scene(scene)
    if whole.height <= TALLEST:
        return [whole.svg()]
    return [replace(OnSlide(alone(wide, block)).scene(scene), title=block.title).svg() for block in wide.blocks]


def alone(wide: Wide, block: Block) -> Wide:
    """Return one of several timelines, with the time and the legend of all."""
    up = block.rows[0].start
    rows = {row: row._replace(start=row.start - up) for row in block.rows}
    in_time = [(rows[row], mark) for row, mark in wide.in_time if row in rows]
    beside = [(rows[row], mark) for row, mark in wide.beside if row in rows]
    return replace(wide, blocks=[block._replace(rows=[*rows.values()])], in_time=in_time, beside=beside)


class OnSlide(Folded):
    """The same in one band, with bars beside the rows, and facts after a timeline's title."""

    width = WIDTH
    bars_at = WIDTH - BARS
    line_letters = 90

    def __init__(self, wide: Wide):
        self.band = WIDTH - START - (BARS + 2 * GAP if wide.beside else 0)
        axis = label("slide.axis", 0, 0, f"Rows: ranks. Axis: {wide.unit}.")
        colourless = Mark("slide.rows", "box", 0, 0)
        super().__init__(replace(wide, legend=[*wide.legend, (colourless, axis)]), wide.right - LEFT)
        self.top = LINE * (not wide.names_blocks)
        self.end = self.top + self.height
        longest = max((mark.right for _, mark in wide.beside if mark.shape == "box"), default=self.bars + 1)
        numbers = max((text_width(mark.text, LETTERS) for _, mark in wide.beside if mark.text), default=0.0)
        self.longer = (BARS - GAP - numbers) / (longest - self.bars)

    def head(self, key: str, y: float, block: Block) -> Iterator[Mark]:
        yield from super().head(key, y, block)
        yield label(f"{key}.facts", text_width(f"{block.title} ", LETTERS), y, block.facts, size=LETTERS)

    def facts(self) -> Iterator[Mark]:
        return iter(())  # they stand above the rows and in the legend

    def beside(self) -> Iterator[Mark]:
        for number, block in enumerate(self.wide.blocks if self.wide.beside else ()):
            y = self.y(0, block.rows[0].start - LINE / 2)
            title = self.wide.beside_title
            yield label(f"slide.beside{number}", WIDTH, y, title, anchor="end", size=LETTERS)
            for row in block.rows:
                self.beside_rows[row] = self.y(0, row.start + (WORK * LOWER - BESIDE) / 2)
                for mark in (mark for at, mark in self.wide.beside if at is row):
                    yield self.bar(mark, self.beside_rows[row] + (BESIDE - BAR) / 2)
