"""Folds a timeline for a telephone: time in bands below each other, letters of 16 pixels, and nothing beside the rows.

A timeline is read from its marks, so one that a notebook stored as SVG is folded in the same way as a living one.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import unescape
from math import ceil
from textwrap import wrap
from typing import Any, NamedTuple

from course.pictures.scene import MARGIN, USUAL, Mark, Scene, Traveller, label, line, text_width
from course.pictures.style import GREY, INK, MUTED
from course.pictures.timeline import GAP, LEFT, WORK

WIDTH, LETTERS, LINE = 318.0, 16.0, 22.0
LINE_LETTERS = 36  # in a line
START = 26.0  # where rows begin: a rank's number stands before them
BAND = WIDTH - START
LOWER = 0.8  # times as high as a row is in the wide picture
FOOT = 4.0  # the height of a wait, at the foot of what it interrupts
AXIS = 34.0  # the height of the axis below a band
BESIDE, BAR = 24.0, 16.0  # the heights of a row, and of a bar, of what stood beside the rows
LONGER = 1.5  # times as long as the bars were there
MOST_BANDS, MOST_ROWS = 4, 12  # of any picture; of one that stays in view while a control moves
THINNEST = 5.0  # pixels of most ops: with less, a picture has more bands
SWATCH, TO_WORD, TO_SWATCH = 16.0, 6.0, 14.0  # of a legend: a side, from there to its word, and to the next swatch
SLIVER = 1.0  # pixels: less goes to no band of its own
NEAR = 0.3  # pixels: what is stored is rounded
OP = re.compile(r"([A-Za-z]?)(\d+)(\.\d+)?")
GROUP = re.compile(r'<g style="transform:translate\((\S+)px,(\S+)px\)">(.*?)</g>')
PART = re.compile(r"<(rect|path|text)([^>]*?)(?:/>|>([^<]*)</text>)")
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
VIEW = re.compile(r'viewBox="\S+ \S+ (\S+) (\S+)"')
POINT = re.compile(r"[ML](\S+?) ([^ MLZ]+)")


class Row(NamedTuple):
    """A row of the wide picture, and where it begins below the top of a band."""

    number: str
    top: float
    bottom: float
    start: float

    def y(self, wide: float) -> float:
        return self.start + (wide - self.top) * LOWER


class Block(NamedTuple):
    """One of the timelines of a picture."""

    title: str
    facts: str
    rows: list[Row]


@dataclass
class Wide:
    """What the marks of the wide picture are."""

    right: float  # where its time ends
    blocks: list[Block]
    in_time: list[tuple[Row, Mark]]
    beside: list[tuple[Row, Mark]]  # and what stands above it:
    beside_title: str
    ticks: list[tuple[float, str]]  # their places and numbers
    unit: str
    legend: list[tuple[Mark, Mark]]

    @cached_property
    def rows(self) -> list[Row]:
        return [row for block in self.blocks for row in block.rows]

    @property
    def names_blocks(self) -> bool:
        return len(self.blocks) > 1

    @property
    def bottom(self) -> float:
        """Where the last row of a band ends, below its top."""
        return self.rows[-1].y(self.rows[-1].bottom)

    def row_at(self, y: float) -> Row | None:
        return next((row for row in self.rows if row.top - NEAR <= y < row.bottom - NEAR), None)


def fold(scene: Scene, most_rows: int = MOST_ROWS) -> Scene:
    """Return a timeline for a narrow screen, in at most so many rows if it can; any other picture as it is."""
    wide = read(scene.marks)
    return Folded(wide, band_length(wide, most_rows)).scene(scene) if wide else scene


# -- what is there


def read(marks: Sequence[Mark]) -> Wide | None:
    """Find the rows of a timeline among its marks, and what stands beside and below them; None if they are not one."""
    labels = [mark for mark in marks if mark.shape == "label"]
    axis = next((mark for mark in marks if _is_axis(mark)), None)
    if not axis:
        return None
    right = axis.x + axis.points[-1][0]
    above = [mark for mark in labels if mark.y < axis.y]
    facts = [mark for mark in above if mark.anchor == "end" and abs(mark.x - right) < NEAR]
    names = [mark for mark in above if mark.x == 0 and re.fullmatch(r"rank \d+", mark.text)]
    if not facts or not names:
        return None
    blocks = _blocks(facts, names, above, axis.y - 4)
    wide = Wide(right, blocks, [], [], "", [], "", [])
    for mark in marks:
        row = wide.row_at(mark.y)
        if mark.y < axis.y - NEAR and row and mark.x > 0:
            (wide.beside if mark.x > right + 5 else wide.in_time).append((row, mark))
    wide.beside_title = next((mark.text for mark in above if mark.x > right + 5 and not wide.row_at(mark.y)), "")
    below = [mark for mark in labels if abs(mark.y - axis.y - 17) < NEAR]
    wide.ticks = [(mark.x, mark.text) for mark in below if mark.anchor == "middle"]
    wide.unit = next((mark.text for mark in below if mark.anchor == "end"), "")
    legend = [mark for mark in marks if mark.y > axis.y + 25]
    wide.legend = [*zip(legend[::2], legend[1::2])]
    return wide


def _is_axis(mark: Mark) -> bool:
    if mark.shape != "line" or mark.edge != GREY or abs(mark.x - LEFT) > NEAR:
        return False
    return len(mark.points) == 2 and mark.points[1][0] > 100 and mark.points[1][1] == 0


def _blocks(facts: list[Mark], names: list[Mark], above: list[Mark], bottom: float) -> list[Block]:
    """Return the timelines from the top down; ``bottom`` is where the last one ends."""
    blocks = []
    y = 0.0
    ends = [*(mark.y - 26 for mark in facts[1:]), bottom]
    for about, end in zip(facts, ends):
        title = next((mark.text for mark in above if mark.x == 0 and abs(mark.y + 1 - about.y) < NEAR), "")
        y += LINE * (len(facts) > 1)
        own = [mark for mark in names if about.y < mark.y < end]
        tops = [*(mark.y - WORK / 2 for mark in own), end]
        rows = []
        for name, top, until in zip(own, tops, tops[1:]):
            rows.append(Row(name.text.removeprefix("rank "), top, until, y))
            y += (until - top) * LOWER
        blocks.append(Block(title, about.text, rows))
    return blocks


def scene_of(svg: str) -> Scene:
    """Return the scene that `Scene.svg` has drawn, as far as it is seen."""
    marks = []
    for x, y, inside in GROUP.findall(svg):
        parts = [(shape, dict(ATTRIBUTE.findall(about)), unescape(text)) for shape, about, text in PART.findall(inside)]
        if parts:
            marks.append(_mark(f"{len(marks)}", float(x), float(y), parts))
    title, says = (unescape(re.findall(f"<{tag}>([^<]*)", svg)[0]) for tag in ("title", "desc"))
    width, height = (float(size) - 2 * MARGIN for size in VIEW.findall(svg)[0])
    return Scene(title, says, marks, height, width)


def _mark(key: str, x: float, y: float, parts: list[tuple[str, dict[str, str], str]]) -> Mark:
    """Return a mark that stands here, of the shapes and texts in its group."""
    shape, about, _ = parts[0]
    texts = [(about, text) for shape, about, text in parts if shape == "text"]
    look: dict[str, Any] = dict(text="\n".join(text for _, text in texts))
    if texts:
        how = texts[0][0]
        look |= dict(size=float(how.get("font-size", USUAL)), bold="font-weight" in how)
        look |= dict(anchor=how.get("text-anchor", "middle"), ink=how.get("fill", INK))
    if shape == "text":
        return Mark(key, "label", x, y, **look)
    look |= dict(edge=about.get("stroke", "none"), dashed="stroke-dasharray" in about)
    look |= dict(edge_width=float(about.get("stroke-width", 1)))
    if shape == "rect":
        width, height, radius = (float(about[name]) for name in ("width", "height", "rx"))
        return Mark(key, "box", x, y, width, height, about["fill"], radius=radius, **look)
    points = tuple((float(px), float(py)) for px, py in POINT.findall(about["d"]))
    return Mark(key, "line", x, y, points=points, heads=len(parts) - 1 - len(texts), **look)


# -- how long a band is


def band_length(wide: Wide, most_rows: int) -> float:
    """Return how much of the wide picture a band has: there are as few as all ops can be written in, or else seen."""
    most = max(1, min(MOST_BANDS, most_rows // len(wide.rows)))
    widths = sorted(mark.width for row, mark in wide.in_time if _is_work(row, mark)) or [wide.right - LEFT]
    lengths = [_length(wide, bands, widths[0]) for bands in range(1, most + 1)]
    usual = widths[len(widths) // 2]
    seen = [length for length in lengths if usual * BAND / length >= THINNEST]
    written = [length for length in seen if texts(wide, BAND / length)[1]]
    return [*written, *seen, lengths[-1]][0]


def _length(wide: Wide, bands: int, shortest: float) -> float:
    """Return the length of so many bands: ops that start in time with the shortest end with their band."""
    length = (wide.right - LEFT) / bands
    total = max(mark.right for _, mark in wide.in_time) - LEFT
    num_shortest = round(total / shortest)
    if abs(total / shortest - num_shortest) < 0.3:
        shortest = total / num_shortest  # what is stored is rounded
    whole = ceil(length / shortest - 0.05) * shortest
    return whole if length < whole < length * 1.1 else length


def texts(wide: Wide, longer: float) -> tuple[dict[str, str], bool]:
    """Return what can stand in boxes that are so many times as long, by their keys, and whether all ops are written.

    The ops of a row are all written in the same way: whole, without the chunk, or the number alone.
    """
    found = {}
    is_whole = True
    for row in wide.rows:
        own = [mark for at, mark in wide.in_time if at is row and mark.text and _is_work(row, mark)]
        room = {mark.key: mark.width * longer for mark in own}
        ops = {mark.key: _ways(op) for mark in own if (op := OP.fullmatch(mark.text))}
        for way in zip(*ops.values()):
            if all(_fits(text, room[key]) for key, text in zip(ops, way)):
                found |= dict(zip(ops, way))
                break
        else:
            is_whole = is_whole and not ops
        found |= {mark.key: mark.text for mark in own if mark.key not in ops}
    return found, is_whole


def _ways(op: re.Match) -> tuple[str, str, str]:
    letter, number, _ = op.groups()
    return op[0], f"{letter}{number}", number


def _fits(text: str, width: float) -> bool:
    return text_width(text, LETTERS) + 1 <= width


def _is_work(row: Row, mark: Mark) -> bool:
    """Return whether this is a box in which a rank computes: not its background, a wait or a message."""
    return mark.shape == "box" and abs(mark.y - row.top) < NEAR and mark.edge != "none"


# -- the narrow picture


class Folded:
    """The parts of the narrow picture from the top down; ``end`` is where the last one ends."""

    width, band = WIDTH, BAND
    bars_at, longer = START, LONGER
    line_letters = LINE_LETTERS

    def __init__(self, wide: Wide, length: float):
        self.wide, self.length = wide, length
        self.bands = ceil((wide.right - LEFT) / length - 1e-6)
        self.height = wide.bottom + AXIS
        self.top = LINE if not wide.names_blocks and wide.blocks[0].title else 0.0
        self.end = self.top + self.bands * self.height
        self.bars = min((mark.x for _, mark in wide.beside if mark.shape == "box"), default=0.0)
        self.beside_rows: dict[Row, float] = {}

    def scene(self, scene: Scene) -> Scene:
        marks = [*self.names(), *self.in_time(), *self.axes(), *self.facts(), *self.beside(), *self.legend()]
        played = {}
        if scene.clock:
            right = START + (self.wide.right - LEFT) / self.length * self.band
            rows = right, self.top, self.top + self.wide.bottom
            end, unit = scene.clock[4:6]
            played["clock"] = (START, *map(_tenths, rows), end, unit, 0.0, 0.0, self.band, _tenths(self.height))
            played["travellers"] = [self.traveller(each) for each in scene.travellers]
        return replace(scene, marks=marks, height=self.end, width=self.width, **played)

    def at(self, x: float) -> tuple[int, float]:
        """Return the band of a place in time, and the place in it."""
        place = (x - LEFT) / self.length
        band = max(0, min(self.bands - 1, int(place + 1e-3)))
        return band, START + (place - band) * self.band

    def pieces(self, mark: Mark) -> Iterator[tuple[int, float, float]]:
        """Yield each band in which a box is seen, its place there, and its width."""
        band, x = self.at(mark.x)
        width = mark.width * self.band / self.length
        right = START + self.band
        while band < self.bands - 1 and x + width > right + SLIVER:
            yield band, x, right - x
            band, x, width = band + 1, START, width - (right - x)
        yield band, x, width

    def y(self, band: int, below: float) -> float:
        return self.top + band * self.height + below

    def names(self) -> Iterator[Mark]:
        if self.top:
            yield from self.head("narrow", 10, self.wide.blocks[0])
        for band in range(self.bands):
            for number, block in enumerate(self.wide.blocks):
                key = f"narrow.{band}.{number}"
                if self.wide.names_blocks:
                    y = self.y(band, block.rows[0].start - LINE / 2)
                    yield from self.head(key, y, block)
                for row in block.rows:
                    y = self.y(band, row.y(row.top + WORK / 2))
                    yield label(f"{key}.rank{row.number}", 0, y, row.number, size=LETTERS)

    def head(self, key: str, y: float, block: Block) -> Iterator[Mark]:
        """Yield what stands above the rows of a timeline."""
        yield label(f"{key}.title", 0, y, self.lines(block.title)[0], size=LETTERS, bold=True)

    def in_time(self) -> Iterator[Mark]:
        written, _ = texts(self.wide, self.band / self.length)
        for row, mark in self.wide.in_time:
            if mark.shape == "line":
                yield self.line(mark)
            elif mark.shape == "box":
                yield from self.boxes(row, mark, written.get(mark.key, ""))

    def boxes(self, row: Row, mark: Mark, text: str) -> Iterator[Mark]:
        """Yield the pieces of a box; the widest has its text."""
        pieces = [*self.pieces(mark)]
        widest = max(pieces, key=lambda piece: round(piece[2]))
        for piece in pieces:
            band, x, width = piece
            fits = piece is widest and _fits(text, width)
            look = dict(text=text if fits else "", size=LETTERS, edge_width=min(mark.edge_width, width / 8))
            height = FOOT if mark.dashed else mark.height * LOWER
            y = self.y(band, row.y(mark.bottom)) - height
            place = dict(x=x, y=y, width=width, height=height)
            key = mark.key + f"~{band}" * (piece is not pieces[0])
            yield replace(mark, key=key, radius=min(mark.radius, width / 4), **place, **look)

    def line(self, mark: Mark) -> Mark:
        """Return an arrow from row to row, and perhaps from band to band."""
        points = []
        for x, y in mark.points:
            band, at = self.at(mark.x + x)
            row = self.wide.row_at(mark.y + y) or self.wide.rows[-1]
            points.append((at, self.y(band, row.y(mark.y + y))))
        (x, y), *_ = points
        return replace(mark, x=x, y=y, points=tuple((px - x, py - y) for px, py in points))

    def axes(self) -> Iterator[Mark]:
        """Yield the axis below each band, with as many of the ticks as there is room for."""
        places = [x for x, _ in self.wide.ticks]
        apart = (places[1] - places[0]) / self.length * self.band if places[1:] else self.band
        widest = max((text_width(text, LETTERS) for _, text in self.wide.ticks), default=0.0)
        y = self.wide.bottom + 2
        right = START + self.band
        last = self.at(self.wide.right)[1]
        for band in range(self.bands):
            ends = [(START, self.y(band, y)), (right if band < self.bands - 1 else last, self.y(band, y))]
            yield line(f"narrow.axis{band}", ends, GREY, 1)
        for number, (place, text) in enumerate(self.wide.ticks[:: ceil((widest + 6) / apart)]):
            band, x = self.at(place)
            key = f"narrow.tick{number}"
            yield line(key, [(x, self.y(band, y)), (x, self.y(band, y + 5))], GREY, 1)
            middle = min(x, right + 6 - text_width(text, LETTERS) / 2)
            yield label(f"{key}.word", middle, self.y(band, y + 16), text, anchor="middle", ink=MUTED, size=LETTERS)

    def facts(self) -> Iterator[Mark]:
        """Yield what the rows and the axis are, and what is said of each timeline."""
        said = [f"Rows: ranks. Axis: {self.wide.unit}.", *self.said()]
        for number, text in enumerate(part for each in said for part in self.lines(each)):
            yield self.word(f"narrow.fact{number}", text)

    def said(self) -> list[str]:
        names = self.wide.names_blocks
        return [f"{block.title}: {block.facts}" if names else block.facts for block in self.wide.blocks]

    def word(self, key: str, text: str, **look) -> Mark:
        """Return a line of text, below all that is there."""
        self.end += LINE
        return label(key, 0, self.end - LINE / 2, text, size=LETTERS, **look)

    def beside(self) -> Iterator[Mark]:
        """Yield what stood beside the rows: bars, and numbers after them."""
        for number, block in enumerate(self.wide.blocks if self.wide.beside else ()):
            title = f"{block.title}: {self.wide.beside_title}" if self.wide.names_blocks else self.wide.beside_title
            for part, text in enumerate(self.lines(title)):
                yield self.word(f"narrow.beside{number}.title{part}", text, bold=True)
            for row in block.rows:
                yield label(f"narrow.beside{number}.{row.number}", 0, self.end + BESIDE / 2, row.number, size=LETTERS)
                self.beside_rows[row] = self.end
                for mark in (mark for at, mark in self.wide.beside if at is row):
                    yield self.bar(mark, self.end + (BESIDE - BAR) / 2)
                self.end += BESIDE

    def bar(self, mark: Mark, y: float) -> Mark:
        if mark.shape == "box":
            return replace(mark, x=self.bar_x(mark.x), y=y, width=mark.width * self.longer, height=BAR)
        if mark.shape == "line":
            return replace(mark, x=self.bar_x(mark.x), y=y, points=((0.0, 0.0), (0.0, BAR)))
        x = self.width if mark.anchor == "end" else self.bar_x(mark.x - GAP) + GAP
        return replace(mark, x=x, y=y + BAR / 2, size=LETTERS)

    def bar_x(self, x: float) -> float:
        return self.bars_at + (x - self.bars) * self.longer

    def legend(self) -> Iterator[Mark]:
        marks = [*legend_in_lines(self.wide.legend, self.end + GAP + LINE / 2, self.width)]
        self.end = marks[-1].y + LINE / 2 if marks else self.end + GAP + LINE
        yield from marks

    def lines(self, text: str) -> list[str]:
        return wrap(text, self.line_letters) or [""]

    def traveller(self, each: Traveller) -> Traveller:
        """Return what the clock moves, at its places in the narrow picture."""
        frames = []
        for moment, x, y in each.frames:
            row = self.wide.row_at(y) or self.wide.rows[-1]
            if x > self.wide.right + 5:
                frames.append((moment, self.bar_x(x), self.beside_rows[row] + BESIDE / 2))
            else:
                band, at = self.at(x)
                frames.append((moment, at, self.y(band, row.y(y))))
        if each.frames[-1][1] <= self.wide.right + 5:
            return each._replace(frames=frames)
        width = each.width * self.longer
        text = each.text if _fits(each.text, width) else ""
        return each._replace(frames=frames, width=width, height=BAR, text=text)


def legend_in_lines(pairs: Sequence[tuple[Mark, Mark]], y: float, room: float) -> Iterator[Mark]:
    """Yield swatches, each with its word after it, in as many lines as they need; the first has its middle at y."""
    x = 0.0
    for swatch, word in pairs:
        width = SWATCH + TO_WORD + text_width(word.text, LETTERS)
        if x and x + width > room:
            x = 0.0
            y += LINE
        yield swatch.changed(x=x, y=y - SWATCH / 2, width=SWATCH, height=SWATCH)
        yield word.changed(x=x + SWATCH + TO_WORD, y=y, size=LETTERS)
        x += width + TO_SWATCH


def _tenths(value: float) -> float:
    return round(value, 1)
