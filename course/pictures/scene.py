"""A diagram as data: keyed marks, each with its fact. One drawing gives SVG, a text table and what a widget shows.

Lengths are in pixels of a picture `WIDTH` wide, which is about a notebook's cell at 100 %; y goes down.
"""

import base64
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from html import escape
from math import atan2, cos, sin
from typing import Any, Literal, NamedTuple

from course.pictures.style import INK, text_on
from course.table import Table

WIDTH = 940.0
NARROWEST = 0.73  # a picture is shown no smaller, as in stage.js: the smallest text still has 8 pixels
SMALLEST, USUAL, LARGE = 11, 13, 17  # sizes of text: what would be smaller is left to the fact and the table
EM, LINE = 0.62, 1.25  # times the size of a text: its letters' mean width, with some to spare; the height of its lines
TEXT = f'font-family="\'DejaVu Sans\', Verdana, system-ui, sans-serif" font-size="{USUAL}" text-anchor="middle"'
"""How all text looks that says nothing else, as stage.css has it too."""
MARGIN, ARROW = 8.0, 9.0  # around the marks; the length of a head
FOR_A_STAGE = r' (?:data-[a-z]+|aria-label)="[^"]*"'
Look = dict[str, Any]  # of a mark: what `box`, `label` and `line` pass on


@dataclass(frozen=True)
class Mark:
    """A box, a label or a line; made by `box`, `label`, `line` and `arrow`.

    A mark of the same ``key`` in the next scene is the same thing: it moves and changes colour. ``fact`` is what it
    says when a reader points at it, with the facts of all marks that are the ``same`` thing; it then lights all marks
    with one of the tags in ``lights``. A ``shy`` mark is only seen when lit. ``means`` is what its colour means, for
    `legend`. A mark with ``drag`` can be dropped on one with ``drop``; one with both takes clicks too, and so does one
    with ``click`` where somebody listens. A ``live`` mark is there to be clicked: a still picture is without it.

    In a scene with a clock, a mark with a ``row`` says by its ``name`` what happens there while it lasts, by its
    ``level`` how much is held then, and by ``awaits`` the keys of the marks that it waits for; ``short`` is what stands
    at the end of the row. A name that begins with "idle" counts as idle time. One without a name is a bar, as long as
    its level; it follows the playhead.
    """

    key: str
    shape: Literal["box", "label", "line"]
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    fill: str = "none"
    edge: str = "none"
    edge_width: float = 1.0
    dashed: bool = False
    radius: float = 3.0
    text: str = ""
    size: float = USUAL
    bold: bool = False
    ink: str = INK
    anchor: Literal["start", "middle", "end"] = "middle"
    points: tuple[tuple[float, float], ...] = ()  # of a line, from its own x and y
    heads: int = 0  # 1: at the end; 2: at both ends
    means: str = ""
    fact: str = ""
    tags: tuple[str, ...] = ()
    lights: tuple[str, ...] = ()
    same: str = ""
    shy: bool = False
    drag: bool = False
    drop: bool = False
    click: bool = False
    live: bool = False
    row: str = ""
    name: str = ""
    short: str = ""
    level: float | None = None
    awaits: tuple[str, ...] = ()

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @cached_property
    def svg(self) -> str:
        """The mark as an SVG group, which stands at its place by a transform: a browser can animate that."""
        says = {"key": self.key, "tags": " ".join(self.tags), "lights": " ".join(self.lights), "same": self.same}
        says |= {name: "1" * getattr(self, name) for name in ("shy", "drag", "drop", "click")}
        says |= {"line": "1" * (self.shape == "line"), "row": self.row, "name": self.name, "short": self.short}
        says["ink"] = self.ink if self.name and self.ink != INK else ""
        says |= {"level": "" if self.level is None else f"{self.level:.3g}", "awaits": " ".join(self.awaits)}
        words = "".join(f' data-{name}="{_escaped(value)}"' for name, value in says.items() if value)
        words += f' aria-label="{_escaped(self.fact)}"' if self.fact else ""
        place = f"transform:translate({_number(self.x)}px,{_number(self.y)}px)"
        return f'<g{words} style="{place}">{"".join(self._parts())}</g>'

    def changed(self, **look: Any) -> "Mark":
        """Return this mark with another look, as `dataclasses.replace` does in ten times the time.

        A page moves thousands of marks in a browser's Python while a reader steps through a collective.
        """
        mark = object.__new__(Mark)
        vars(mark).update(vars(self) | look)
        vars(mark).pop("svg", None)  # how it was drawn before
        return mark

    def _parts(self) -> Iterable[str]:
        dashes = ' stroke-dasharray="4 3"' if self.dashed else ""
        stroke = f' stroke="{self.edge}" stroke-width="{_number(self.edge_width)}"{dashes}' * (self.edge != "none")
        if self.shape == "box":
            size = f'width="{_number(self.width)}" height="{_number(self.height)}" rx="{_number(self.radius)}"'
            yield f'<rect {size} fill="{self.fill}"{stroke}/>'
        elif self.shape == "line":
            yield f'<path d="M{_path(self.points)}" fill="none"{stroke}/>'
            for (x0, y0), (x, y) in [self.points[-2:], self.points[1::-1]][: self.heads]:
                angle, length = atan2(y - y0, x - x0), ARROW + self.edge_width
                back = [(x - length * cos(angle + side), y - length * sin(angle + side)) for side in (-0.4, 0.4)]
                yield f'<path d="M{_path([(x, y), *back])}Z" fill="{self.edge}"/>'
        look = f' font-size="{_number(self.size)}"' if self.size != USUAL else ""
        look += f' fill="{self.ink}"' if self.ink != INK else ""
        look += f' text-anchor="{self.anchor}"' if self.anchor != "middle" else ""
        look += ' font-weight="bold"' if self.bold else ""
        lines = self.text.split("\n") if self.text else []
        for number, line in enumerate(lines):  # around the middle of a box; a label has no size
            y = self.height / 2 + (number - (len(lines) - 1) / 2) * self.size * LINE
            place = f'x="{_number(self.width / 2)}" y="{_number(y + 0.35 * self.size)}"'
            yield f"<text {place}{look}>{_escaped(line)}</text>"


def box(
    key: str, x: float, y: float, width: float, height: float, fill: str, text: str | Sequence[str] = "",
    together: str = "", **look,
) -> Mark:  # fmt: skip
    """Return a rectangle; of several texts, it carries the first that fits, and none if all are too long.

    Boxes with the same word in ``together`` light each other.
    """
    ways, size, bold = (text,) if isinstance(text, str) else text, look.pop("size", USUAL), look.get("bold", False)
    text = ""
    for way in ways:
        if fits := fitting(way, width - 4, height - 2, size, bold):
            text, size = way, fits
            break
    look = dict(tags=(together,), lights=(together,)) | look if together else look
    return Mark(key, "box", x, y, width, height, fill, text=text, size=size, **{"ink": text_on(fill), **look})


def label(
    key: str, x: float, y: float, text: str, *, anchor: Literal["start", "middle", "end"] = "start", **look
) -> Mark:
    """Return text whose middle line is at y."""
    return Mark(key, "label", x, y, text=text, anchor=anchor, **look)


def line(key: str, points: Sequence[tuple[float, float]], color: str, width: float = 1.5, **look) -> Mark:
    """Return a line through these points."""
    (x, y), *_ = points
    moved = tuple((px - x, py - y) for px, py in points)
    return Mark(key, "line", x, y, edge=color, edge_width=width, points=moved, **look)


arrow = partial(line, width=2.0, heads=1)  # a line with a head at its end, or with two


def text_width(text: str, size: float = USUAL, bold: bool = False) -> float:
    """Estimate the width of the longest line in pixels."""
    return max(map(len, text.split("\n"))) * size * EM * (1.1 if bold else 1.0)


def fitting(text: str, width: float, height: float, size: float, bold: bool = False) -> float:
    """Return the largest size up to ``size`` at which a text fits, or 0 if that is too small to read.

    >>> fitting("rank 12", 100, 20, 13), fitting("rank 12", 50, 20, 13), fitting("rank 12", 20, 20, 13)
    (13, 11.5, 0)
    """
    if not text:
        return size
    lines = text.count("\n") + 1
    size = min(size, size * width / text_width(text, size, bold), height / lines / LINE * (1.2 if lines == 1 else 1.0))
    size = size if size == int(size) else int(2 * size) / 2
    return size if size >= SMALLEST else 0


class Traveller(NamedTuple):
    """What moves while the clock of a scene runs: a box, with its middle at the place of the last of its ``frames``.

    A frame is a moment, as a share of the whole time, and a place. The browser moves it from frame to frame; before the
    first and after the last it is not seen.
    """

    text: str
    width: float
    height: float
    radius: float
    fill: str
    frames: Sequence[tuple[float, float, float]]

    @property
    def data(self) -> dict[str, Any]:
        """The same as stage.js reads it."""
        frames = [(round(moment, 5), round(x, 1), round(y, 1)) for moment, x, y in self.frames]
        return {**self._asdict(), "ink": text_on(self.fill), "frames": frames}


@dataclass(frozen=True)
class Scene:
    """A picture: its ``title``, what it says (``says``), its marks from back to front, and its facts as text."""

    title: str
    says: str
    marks: Sequence[Mark]
    height: float
    width: float = WIDTH
    table: Table = field(default_factory=Table)
    journeys: Mapping[str, str] = field(
        default_factory=dict
    )  # by tag: what is said of what a reader follows by a click
    clock: tuple = ()
    """For a playhead: the left, right, top and bottom of its rows, the time at the right, the unit, and the left and
    right of what stands beside the rows; 0 and 0 if nothing does."""
    travellers: Sequence[Traveller] = ()  # what the clock moves
    lasts: float = 0.0  # as a step that is played, this many times a usual one; all of that time, marks move to it
    panels: Sequence[tuple[float, float, float, float]] = ()  # places: on a narrow screen, below each other

    def __post_init__(self):
        if twice := [key for key, times in Counter(mark.key for mark in self.marks).items() if times > 1]:
            raise ValueError(f"two marks have the key {twice[0]!r}: each needs one of its own")

    @cached_property
    def by_key(self) -> dict[str, Mark]:
        return {mark.key: mark for mark in self.marks}

    @property
    def alt(self) -> str:
        """What a screen reader says for the picture."""
        return f"{self.title}. {self.says}".strip(". ") + "."

    @property
    def view(self) -> tuple[float, float, float, float]:
        """The left, top, width and height of the paper: marks do not stand at its very edge."""
        return -MARGIN, -MARGIN, self.width + 2 * MARGIN, self.height + 2 * MARGIN

    def svg(self, panel: Sequence[float] = ()) -> str:
        """Return the picture, or a panel, as SVG on paper of its own: what is seen, as an image hears no pointer."""
        left, top, *size = panel or self.view
        x, y, width, height = map(_number, (left, top, *size))
        inside = [mark for mark in self.marks if not panel or is_inside(mark.x, mark.y, panel)]
        marks = "".join(mark.svg for mark in inside if not mark.shy and not mark.live)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x} {y} {width} {height}" width="{width}" role="img" '
            f'aria-label="{escape(self.alt)}" {TEXT} fill="{INK}" style="max-width:100%;height:auto">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.says)}</desc>"
            f'<rect x="{x}" y="{y}" width="100%" height="100%" fill="#fff"/>'
            f"{re.sub(FOR_A_STAGE, '', marks)}</svg>"
        )

    def __str__(self) -> str:
        return f"{self.alt}\n{self.table}".strip()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html(), "image/svg+xml": self.svg()}

    def html(self) -> str:
        """Return the picture as HTML that a notebook shows even if it is not trusted, with the table folded away."""
        svgs = {self.svg(panel): panel[2] for panel in self.panels} or {self.svg(): self.view[2]}
        image, table = image_html(svgs, self.alt), self.table.html
        return image + (f"<details><summary>The same as a table</summary>{table}</details>" if table else "")


def image_html(svgs: Mapping[str, float], alt: str) -> str:
    """Return SVGs of these widths as images, which JupyterLab shows even of a notebook that is not trusted.

    They stand beside each other where there is room, and scroll where there is not even room for one.
    """
    images = []
    for svg, width in svgs.items():
        share = f"vertical-align:top;width:{100 * width / WIDTH:.0f}%;max-width:{width:.0f}px;" if len(svgs) > 1 else ""
        look = f'style="{share}min-width:{width * NARROWEST:.0f}px"'
        source = f'src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"'
        images.append(f'<img alt="{escape(alt)}" width="{_number(width)}" {look} {source}>')
    return f'<div style="overflow-x:auto">{"".join(images)}</div>'


def is_scene(svg: str) -> bool:
    """Return whether `Scene.svg` has drawn this; matplotlib draws the curves."""
    return "<desc>" in svg


def is_inside(x: float, y: float, panel: Sequence[float]) -> bool:
    left, top, width, height = panel
    return left - MARGIN <= x < left + width and top - MARGIN <= y < top + height - MARGIN


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


_escaped = lru_cache(maxsize=4096)(escape)  # marks repeat, from picture to picture too


@lru_cache(maxsize=4096)
def _number(value: float) -> str:
    return f"{round(value, 1):g}"
