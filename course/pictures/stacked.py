"""Stacks the columns of a diagram for a telephone: letters of 16 pixels, and the names of rows before each band.

A timeline is folded by `course.pictures.narrow`; this is for what else stands in columns: matrices, messages, layers.
Like a timeline it is read from its marks, so one that a notebook stored as SVG is stacked in the same way.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from textwrap import wrap
from typing import Any, NamedTuple

from course.pictures.narrow import LETTERS, LINE, MOST_BANDS, MOST_ROWS, WIDTH, fold, scene_of
from course.pictures.scene import LARGE, Mark, Scene, label, text_width
from course.pictures.style import FRAME_FILL

SCALES = 1.2, 1.07, 1.0, 0.94, 0.88, 0.8, 0.7
SMALLER = *SCALES, 0.65, 0.6, 0.52, 0.46
"""Of lengths across: the first of those that need the fewest bands is taken."""
DOWN, MORE_DOWN = 1.23, 1.45  # of lengths down: lines of text stay apart
APART = 2.0  # pixels: a narrower gap parts no columns
LEAST_GAP, MOST_GAP = 5.0, 16.0  # between columns that stand side by side
SWATCH = 16.0  # a legend's box is no larger
MOST, MOST_NAMED = 5, 4  # bands, without and with names of rows before each
MOST_LOST = 2  # lines that lead from band to band
LEAST_NAME, WIDEST_NAMES = 24.0, 150.0
LINE_LETTERS = 34
SPACING = 1.25  # of lines in a box
HEAD, SAYS = 36.0, (20.0, 36.0)  # where a title, and what is said below it, stand
WIDE_BAR, BAR, BELOW_BAR = 26.0, 28.0, 8.0
PAPER = "none", "#ffffff", FRAME_FILL
NUMBER = re.compile(r"[\d.,]+%?")
RANK = re.compile(r"rank (\d+)")


class Drawn(NamedTuple):
    """How a mark is drawn in a column of the narrow picture; ``left`` and ``right`` are where its text ends, too."""

    left: float
    right: float
    look: dict[str, Any]


@dataclass
class Column:
    """What stands in one column of the wide picture, and where it stands in the narrow one."""

    left: float
    right: float
    marks: list[Mark]
    drawn: list[Drawn] = field(default_factory=list)
    start: float = 0.0
    scale: float = 1.0

    @property
    def begin(self) -> float:
        return min(each.left for each in self.drawn)

    @property
    def width(self) -> float:
        return max(each.right for each in self.drawn) - self.begin

    def narrow_marks(self) -> Iterator[Mark]:
        for mark, each in zip(self.marks, self.drawn):
            moved = each.look["x"] - self.begin + self.start
            yield mark.changed(**each.look | dict(x=moved, size=LETTERS))


class Way(NamedTuple):
    """How a picture is made narrow: lengths across and down times these."""

    scale: float
    down: float
    has_numbers: bool  # in place of the names of ranks
    may_squeeze: bool  # a column that is too wide


class Layout(NamedTuple):
    """Which columns stand in which band, and how many texts had to be shortened."""

    parts: list[range]
    num_shorter: int
    names: Column | None
    columns: list[Column]
    way: Way


def narrow(scenes: Sequence[Scene]) -> list[Scene]:
    """Return steps for a narrow screen; as they are if one of them is neither a timeline nor stands in columns."""
    narrowed = [fold(scene) for scene in scenes]
    if narrowed[0] is not scenes[0] or any(scene.panels or scene.clock for scene in scenes):
        return narrowed
    return stack(scenes, is_low=True) or narrowed


def narrow_svgs(svgs: Sequence[str]) -> list[str]:
    """Return stored pictures that belong together for a narrow screen; "" for one that has no such form."""
    if not all("<desc>" in svg for svg in svgs):
        return ["" for _ in svgs]  # no scene's
    scenes = [scene_of(svg) for svg in svgs]
    folded = [fold(scene, MOST_ROWS * MOST_BANDS) for scene in scenes]
    is_other = [narrowed is scene for narrowed, scene in zip(folded, scenes)]
    if all(is_other):
        folded = stack(scenes) or folded
    return [narrowed.svg() if narrowed is not scene else "" for narrowed, scene in zip(folded, scenes)]


def stack(scenes: Sequence[Scene], is_low: bool = False) -> list[Scene]:
    """Return steps with their columns in bands below each other, in the same way if they can; [] if one cannot.

    A low picture has as few bands as can be, however narrow its columns: it stays in view while a control moves.
    """
    stacked = []
    way = None
    for scene in scenes:
        marks: list[Mark] = []
        y = 0.0
        for part in _panels(scene.marks):
            wide = _Wide(part, is_low)
            bands, way = wide.bands(way)
            if not bands:
                return []
            made = [*_below_each_other(wide, bands, way, y)]
            y = max(_down(mark)[1] for mark in made) + LINE
            marks += made
        stacked.append(replace(scene, marks=marks, height=y - LINE, width=WIDTH))
    return stacked


def _panels(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Return the marks below each title: titles stand in rows."""
    titles = [mark for mark in marks if mark.shape == "label" and mark.bold and mark.size == LARGE]
    if len(titles) < 2:
        return [[*marks]]
    found: dict[str, list[Mark]] = {mark.key: [] for mark in titles}
    for mark in marks:
        rows = [title.y for title in titles if title.y < mark.y + LARGE]
        row = max(rows, default=titles[0].y)
        before = [title for title in titles if title.y == row and title.x < mark.x + LARGE]
        found[max(before, key=lambda title: title.x).key if before else titles[0].key].append(mark)
    return [*found.values()]


def _below_each_other(wide: "_Wide", bands: Sequence[Sequence[Mark]], way: Way | None, y: float) -> Iterator[Mark]:
    """Yield the marks of a picture from y on: its title, its bands, and its legend."""
    for mark in _header(wide.header, "Rows: ranks." if way and way.has_numbers else "", y):
        yield mark
        y = mark.y + LINE
    for band in bands:
        spans = [_down(mark) for mark in band]
        top = min(span[0] for span in spans)
        yield from (mark.changed(y=mark.y - top + y) for mark in band)
        y += max(span[1] for span in spans) - top + LINE
    yield from _legend(wide.legend, y)


class _Wide:
    """What the marks of a wide picture are: a header, names of rows, columns, and a legend."""

    def __init__(self, marks: Sequence[Mark], is_low: bool):
        self.is_low = is_low
        self.live = [mark for mark in marks if mark.live]
        marks = [mark for mark in marks if not mark.live]
        self.left = min(mark.x for mark in marks)
        self.top = min(mark.y for mark in marks)
        self.boxes_from = min((mark.y for mark in marks if mark.shape == "box"), default=self.top)
        self.legend = [pair for pair in pairwise(marks) if _is_swatch(*pair)]
        self.header = [mark for mark in marks if self.is_header(mark)]
        apart = {mark.key for pair in [*self.legend, self.header] for mark in pair}
        body = [mark for mark in marks if mark.key not in apart]
        self.shy = [mark for mark in body if mark.shy and mark.shape == "box"]
        self.labels = [mark for mark in body if mark.shape == "label"]
        self.lines = [mark for mark in body if mark.shape == "line"]
        self.order = {mark.key: number for number, mark in enumerate(body)}  # from back to front
        in_columns = [mark for mark in body if mark.shape != "line" and mark not in self.shy]
        self.all_columns = _columns(in_columns)

    def is_header(self, mark: Mark) -> bool:
        above = mark.shape == "label" and mark.y - self.top < HEAD and mark.y < self.boxes_from
        return above and (mark.anchor == "end" or abs(mark.x - self.left) < APART)

    @cached_property
    def names(self) -> Column | None:
        """Return the first column if it has the names of rows."""
        first = self.all_columns[0] if len(self.all_columns) > 1 else None
        if not first or len(first.marks) < 2 or not all(mark.text for mark in first.marks):
            return None
        is_wide = first.right - first.left > WIDEST_NAMES or max(mark.x for mark in first.marks) - first.left > APART
        return None if is_wide else first

    def bands(self, way: Way | None) -> tuple[list[list[Mark]], Way | None]:
        """Return the marks of each band, and in which way they are made narrow; in this one if that can be."""
        if not self.all_columns:
            return [], way
        if bars := self.bars():
            return bars, way
        for layout in self.layouts(way):
            bands = [self.band(layout, number) for number in range(len(layout.parts))]
            if self.num_lost(bands) <= MOST_LOST:
                return [*bands, *self.live_band()], layout.way
        return [], way

    def layouts(self, way: Way | None) -> list[Layout]:
        """Return how the picture can stand on a narrow screen, the best first: in this way, or as large as it was."""
        if way and (layout := self.layout(way)):
            return [layout]
        has_matrices = any("[" in mark.text for column in self.all_columns for mark in column.marks)
        tries = [(SCALES, DOWN), (SMALLER, DOWN), (SMALLER, MORE_DOWN)]
        tries = tries[:1] if has_matrices else tries[self.is_low :]
        names = self.names.marks if self.names else []
        are_ranks = bool(names) and all(RANK.fullmatch(mark.text) for mark in names)
        numbered = [False] * (not are_ranks or names[0].shape == "label") + [True] * are_ranks
        for scales, down in tries:
            ways = [Way(scale, down, short, not has_matrices) for short in numbered for scale in scales]
            if found := [layout for each in ways if (layout := self.layout(each))]:
                return sorted(found, key=lambda each: (len(each.parts), each.num_shorter))
        return []

    def layout(self, way: Way) -> Layout | None:
        """Return as few bands as the columns fit in, parted at the widest gaps; None if they do not."""
        columns = [replace(each) for each in self.all_columns]
        names = columns.pop(0) if self.names else None
        start = self.lead
        if names:
            names.drawn = [_name(mark, way.down, way.has_numbers) for mark in names.marks]
            names.start = self.lead
            names.scale = names.width / (names.right - names.left)
            start += names.width + LEAST_GAP
        for column in columns:
            column.drawn = _draw(column, way.scale, way.down, WIDTH - start if way.may_squeeze else 0.0)
            if not column.drawn or column.width > WIDTH - start + 1 or _collide(column):
                return None
        for column, following in pairwise(columns):
            column.drawn = _hanging_over(column, following)
        gaps = [right.left - left.right for left, right in pairwise(columns)]
        between = [min(max(gap * way.scale, min(LEAST_GAP, gap)), MOST_GAP) for gap in gaps]
        parts = _cut([each.width for each in columns], gaps, between, WIDTH - start + 1)
        has_boxes = all(
            all(_is_word(mark) for mark in in_part) or any(_is_box(mark) for mark in in_part)
            for in_part in ([mark for number in part for mark in columns[number].marks] for part in parts)
        )
        if not has_boxes or len(parts) > (MOST_NAMED if names else MOST) or self.num_cut(columns, parts) > MOST_LOST:
            return None
        for part in parts:
            x = start
            for number in part:
                columns[number].start = x
                x += columns[number].width + (between[number] if number < len(between) else 0.0)
        pairs = [pair for column in columns for pair in zip(column.marks, column.drawn)]
        num_shorter = sum(mark.text.split() != drawn.look["text"].split() for mark, drawn in pairs)
        return Layout(parts, num_shorter + way.has_numbers, names, columns, way)

    @cached_property
    def lead(self) -> float:
        """Return how far lines stand out to the left."""
        left = min((mark.x + x for mark in self.lines for x, _ in mark.points), default=self.all_columns[0].left)
        return max(0.0, self.all_columns[0].left - left)

    def num_cut(self, columns: Sequence[Column], parts: Sequence[range]) -> int:
        """Return how many arrows lead from band to band."""
        ends = [columns[part.stop - 1].right for part in parts[:-1]]
        xs = [[mark.x + x for x, _ in mark.points] for mark in self.lines if mark.heads]
        return sum(any(min(each) < end - APART and end + APART < max(each) for end in ends) for each in xs)

    def num_lost(self, bands: Sequence[Sequence[Mark]]) -> int:
        drawn = {mark.key.partition("~")[0] for band in bands for mark in band}
        return sum(mark.key not in drawn for mark in self.lines)

    def band(self, layout: Layout, number: int) -> list[Mark]:
        """Return the marks of a band; those that stand in one before it, too, have keys of their own here."""
        part, names = layout.parts[number], layout.names
        own = layout.columns[part.start : part.stop]
        shown = [names, *own] if names else own
        if all(_is_word(mark) for column in own for mark in column.marks):  # of arrows from band to band
            word = own[0].marks[0]
            text = f"↓ {word.text}"
            place = dict(x=own[0].start, y=0.0, width=text_width(text, LETTERS), height=LINE)
            return [word.changed(text=text, size=LETTERS, **place)]
        marks = [mark for column in shown for mark in column.narrow_marks()]
        marks += [drawn for mark in self.shy if (drawn := _box(mark, shown, layout.way.down))]
        for each in self.lines:
            place = own if not names or part.start else shown  # the gap after the names is the wide picture's, too
            drawn = _line(each, place, layout.way.down) or (names and _line(each, [names], layout.way.down))
            marks += [drawn] if drawn else []
        marks.sort(key=lambda mark: self.order[mark.key])
        repeated = {mark.key for mark in [*(names.marks if names else []), *self.lines]}
        return [
            mark.changed(key=f"{mark.key}~{number}") if number and mark.key in repeated else mark for mark in marks
        ]

    def live_band(self) -> list[list[Mark]]:
        """Return what is there to be clicked, as a band; nothing if there is none."""
        if not self.live:
            return []
        left, right = min(mark.x for mark in self.live), max(mark.right for mark in self.live)
        scale = WIDTH / max(1.0, right - left)
        place = lambda mark: dict(x=(mark.x - left) * scale, width=mark.width * scale, size=LETTERS)  # noqa: E731
        return [[mark.changed(**place(mark), y=mark.y * DOWN, height=mark.height * DOWN) for mark in self.live]]

    def bars(self) -> list[list[Mark]]:
        """Return a picture of bars as one band, each bar below its name and its sum; [] if it is another picture."""
        names = [mark for mark in self.labels if mark.x == self.left and mark.anchor == "start" and not mark.bold]
        sums = [mark for mark in self.labels if mark.bold]
        boxes = [mark for column in self.all_columns for mark in column.marks if mark.shape == "box"]
        is_other = not names or not boxes or len({mark.x for mark in sums}) > 1
        if is_other or [mark.y for mark in names] != [mark.y for mark in sums]:
            return []
        left, right = min(mark.x for mark in boxes), max(mark.right for mark in boxes)
        above = [mark for mark in self.labels if mark.y < names[0].y - 20]
        scale = WIDTH / (max([right, *(mark.x + 2 for mark in self.lines)]) - left)
        marks = []
        y = LINE * bool(above)
        for name, total in zip(names, sums):
            marks.append(name.changed(x=0.0, y=y + LINE / 2, size=LETTERS))
            widths = [text_width(mark.text, LETTERS, mark.bold) for mark in (name, total)]
            y += LINE if sum(widths) + LEAST_GAP > WIDTH else 0.0
            marks.append(total.changed(x=WIDTH, y=y + LINE / 2, size=LETTERS, anchor="end"))
            y += LINE
            marks += [_bar(mark, left, scale, name.y, y) for mark in boxes if mark.y < name.y < mark.bottom]
            for each in self.lines:  # beside each bar, not through the words
                key = f"{each.key}~{name.key}" if y > 3 * LINE else each.key
                x = (each.x - left) * scale
                marks.append(each.changed(key=key, x=x, y=y - 2, points=((0.0, 0.0), (0.0, BAR + 4))))
            y += BAR + BELOW_BAR
        for mark in above:
            half = text_width(mark.text, LETTERS) / 2
            x = max(half, min(WIDTH - half, (mark.x - left) * scale))
            marks.append(mark.changed(x=x, y=LINE / 2, size=LETTERS, anchor="middle"))
        return [marks]


def _bar(mark: Mark, left: float, scale: float, middle: float, y: float) -> Mark:
    """Return a part of the bar that stands at y, with its number if there is room."""
    width, height = mark.width * scale, mark.height * BAR / WIDE_BAR
    text = mark.text if text_width(mark.text, LETTERS) + 2 <= width else ""
    top = y + BAR / 2 + (mark.y + mark.height / 2 - middle) * BAR / WIDE_BAR - height / 2
    return mark.changed(x=(mark.x - left) * scale, y=top, width=width, height=height, text=text, size=LETTERS)


# -- what is there


def _columns(marks: Sequence[Mark]) -> list[Column]:
    """Return marks by columns: between two of them is a gap from top to bottom."""
    columns: list[Column] = []
    for mark in sorted(marks, key=lambda mark: _across_text(mark)[0]):
        left, right = _across_text(mark)
        if columns and left < columns[-1].right + APART:
            columns[-1].right = max(columns[-1].right, right)
            columns[-1].marks.append(mark)
        else:
            columns.append(Column(left, right, [mark]))
    return columns


def _is_word(mark: Mark) -> bool:
    """Return whether this is a word on paper of its own, over an arrow."""
    return mark.shape == "box" and bool(mark.text) and mark.edge == "none" and mark.fill in PAPER


def _is_box(mark: Mark) -> bool:
    return mark.shape == "box" and not _is_word(mark)


def _is_swatch(one: Mark, other: Mark) -> bool:
    if one.shape != "box" or one.text or other.shape != "label" or max(one.width, one.height) > SWATCH:
        return False
    return one.width == one.height and 0 < other.x - one.right < SWATCH and abs(other.y - one.y - one.height / 2) < 1


def _across_text(mark: Mark) -> tuple[float, float]:
    """Return the left and the right of a box, or of a text."""
    if mark.shape == "box":
        return mark.x, mark.right
    width = text_width(mark.text, mark.size, mark.bold)
    left = mark.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * width
    return left, left + width


def _down(mark: Mark) -> tuple[float, float]:
    """Return the top and the bottom of a mark."""
    if mark.shape == "box":
        return mark.y, mark.bottom
    if mark.shape == "line":
        ys = [mark.y + y for _, y in mark.points]
        return min(ys), max(ys)
    half = (mark.text.count("\n") + 1) * LINE / 2
    return mark.y - half, mark.y + half


# -- a column in the narrow picture


def _draw(column: Column, scale: float, down: float, room: float = 0.0) -> list[Drawn]:
    """Draw the marks of a column for a narrow screen, narrower if told how much room there is.

    Nothing is returned if what is written does not fit.
    """
    if room:
        width = max(1.0, column.right - column.left)
        scale = min(scale, room / width)
        beside = max(each.right for each in _draw(column, scale, down) or [Drawn(0.0, 0.0, {})]) - width * scale
        scale = min(scale, (room - max(0.0, beside)) / width)
    column.scale = scale
    drawn = []
    boxes = [mark for mark in column.marks if mark.shape == "box"]
    below = (max(mark.right for mark in boxes) - min(mark.x for mark in boxes)) * scale if boxes else 0.0
    is_long = any(_says_much(mark) for mark in column.marks)
    for mark in column.marks:
        x, y = (mark.x - column.left) * scale, mark.y * down
        if mark.shape == "label":
            y -= LINE if is_long and mark.y < SAYS[0] else 0.0
            text = _in_two_lines(mark, max(below, 60.0))
            more = text.count("\n") - mark.text.count("\n")  # above: the lower one stands where the text stood
            drawn.append(_drawn(mark, x, y - more * LETTERS * SPACING / 2, text))
            continue
        width, height = mark.width * scale, mark.height * down
        if _is_word(mark):
            wider = max(width, text_width(mark.text, LETTERS, mark.bold))
            x -= (wider - width) / 2
            width = wider
        text = _written(mark.text, mark.bold, round(width, 1), round(height, 1))
        if text is None:
            return []
        drawn.append(_drawn(mark, x, y, text, width, height))
    return drawn


def _drawn(mark: Mark, x: float, y: float, text: str, width: float = 0.0, height: float = 0.0) -> Drawn:
    look = dict(x=x, y=y, text=text, width=width, height=height)
    if mark.shape == "box":
        return Drawn(x, x + width, look)
    wide = text_width(text, LETTERS, mark.bold)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * wide
    return Drawn(left, left + wide, look)


def _name(mark: Mark, down: float, as_number: bool) -> Drawn:
    """Draw the name of a row, in a box as wide as it needs."""
    text = mark.text.removeprefix("rank ") if as_number else mark.text
    if mark.shape == "label":
        return _drawn(mark, 0.0, mark.y * down, text)
    width = max(LEAST_NAME, text_width(text, LETTERS, mark.bold) + 2)
    return _drawn(mark, 0.0, mark.y * down, text, width, mark.height * down)


def _in_two_lines(mark: Mark, room: float) -> str:
    """Return a heading in two lines if it is wider than what it names."""
    text = mark.text
    is_heading = mark.bold or ": " in text or _says_much(mark)
    if not is_heading or mark.anchor == "end" or "\n" in text or text_width(text, LETTERS, True) < room + 8:
        return text
    if " [" in text:
        return text.replace(" [", "\n[")
    return "\n".join(wrap(text, len(text) // 2 + 2, break_long_words=False, break_on_hyphens=False))


def _says_much(mark: Mark) -> bool:
    """Return whether a label is what is said below the title of its column, in more than a line."""
    is_there = mark.shape == "label" and not mark.bold and SAYS[0] < mark.y < SAYS[1]
    return is_there and text_width(mark.text, LETTERS) > WIDTH - 20


def _hanging_over(column: Column, following: Column) -> list[Drawn]:
    """Return what is drawn in a column whose heading may hang over the next one, if that has none."""
    headings = [mark.y for mark in following.marks if mark.shape == "label"]
    boxes = [each.right for mark, each in zip(column.marks, column.drawn) if mark.shape == "box"]
    return [
        each._replace(right=min(each.right, max(boxes)))
        if boxes and mark.shape == "label" and not mark.bold and not any(abs(y - mark.y) < LARGE for y in headings)
        else each
        for mark, each in zip(column.marks, column.drawn)
    ]


def _collide(column: Column) -> bool:
    """Return whether two labels stand over each other."""
    places = []
    for mark, each in zip(column.marks, column.drawn):
        if mark.shape == "label":
            half = (each.look["text"].count("\n") + 1) * LINE / 2 - 3
            places.append((each.left, each.right, each.look["y"] - half, each.look["y"] + half))
    return any(
        one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
        for number, one in enumerate(places)
        for other in places[:number]
    )


@lru_cache(maxsize=4096)
def _written(text: str, bold: bool, width: float, height: float) -> str | None:
    """Return how a text can stand in a box: in more lines, or shorter; "" for a number without room, None for words."""
    if not text:
        return ""
    for way in _ways(text):
        lines = way.count("\n") + 1
        if text_width(way, LETTERS, bold) <= width + 1.5 and lines * LETTERS * (SPACING if lines > 1 else 1) <= height:
            return way
    return "" if NUMBER.fullmatch(text) else None


def _ways(text: str) -> Iterator[str]:
    yield text
    if RANK.fullmatch(text):
        yield text.removeprefix("rank ")
    words = text.split()
    for letters in range(len(text) - 1, max(map(len, words)) - 1, -1) if len(words) > 1 else ():
        yield "\n".join(wrap(" ".join(words), letters, break_long_words=False, break_on_hyphens=False))
    yield text.replace("from ", "r")
    first, *more = text.split("\n")
    if more and NUMBER.fullmatch(first):
        yield first


# -- bands


def _cut(widths: Sequence[float], gaps: Sequence[float], between: Sequence[float], room: float) -> list[range]:
    """Return the columns of each band: as few bands as can be, parted at the widest gaps."""
    best: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # of the first columns: bands, minus gaps, the start of the last
    for end in range(1, len(widths) + 1):
        found = []
        width = 0.0
        for begin in range(end - 1, -1, -1):
            width += widths[begin] + (between[begin] if begin < end - 1 else 0.0)
            if width <= room or begin == end - 1:
                num_bands, loss, _ = best[begin]
                found.append((num_bands + 1, loss - (gaps[begin - 1] if begin else 0.0), begin))
        best.append(min(found))
    parts = []
    end = len(widths)
    while end:
        parts.insert(0, range(best[end][2], end))
        end = best[end][2]
    return parts


def _line(each: Mark, columns: Sequence[Column], down: float) -> Mark | None:
    """Return a line in a band of these columns; None if it is not in it. One that is level is cut where they end."""
    xs = [each.x + x for x, _ in each.points]
    if len(xs) == 2 and each.points[1][1] == 0:
        left, right = columns[0].left, columns[-1].right
        xs = [min(max(x, left), right) for x in xs]
        if xs[0] == xs[1]:
            return None
    across = [_across(columns, x) for x in xs]
    points = [(x, (each.y + y) * down) for x, (_, y) in zip(across, each.points) if x is not None]
    if len(points) < len(xs):
        return None
    x, y = points[0]
    return each.changed(x=x, y=y, points=tuple((px - x, py - y) for px, py in points))


def _box(mark: Mark, columns: Sequence[Column], down: float) -> Mark | None:
    """Return a box that is seen only when lit, as `_line` returns a line."""
    left, right = _across(columns, mark.x), _across(columns, mark.right)
    if left is None or right is None:
        return None
    return mark.changed(x=left, y=mark.y * down, width=right - left, height=mark.height * down, size=LETTERS)


def _across(columns: Sequence[Column], x: float) -> float | None:
    """Return where a place of the wide picture is in a band of these columns; None if it is in another."""
    for column, following in zip(columns, [*columns[1:], None]):
        if x < column.left - APART:
            first = columns[0]
            return first.start + x - first.left if column is first and x > first.left - first.start - APART else None
        if x <= column.right + APART:
            return column.start - column.begin + (x - column.left) * column.scale
        if following and x < following.left:
            share = (x - column.right) / (following.left - column.right)
            return column.start + column.width + share * (following.start - column.start - column.width)
    return None


def _header(labels: Sequence[Mark], says: str, y: float) -> Iterator[Mark]:
    """Yield the title and what is said below it, in as many lines as they need."""
    y -= LINE / 2
    for mark in labels:
        for number, text in enumerate(wrap(mark.text, LINE_LETTERS - 4 * mark.bold)):
            y += LINE
            key = mark.key + f"~{number}" * bool(number)
            yield mark.changed(key=key, x=0.0, y=y, text=text, size=LETTERS, anchor="start")
    if says:
        yield label(f"narrow.{labels[0].key if labels else ''}", 0, y + LINE, says, size=LETTERS)


def _legend(pairs: Sequence[tuple[Mark, Mark]], y: float) -> Iterator[Mark]:
    x = 0.0
    for swatch, word in pairs:
        width = text_width(word.text, LETTERS)
        if x and x + 22 + width > WIDTH:
            x = 0.0
            y += LINE
        yield swatch.changed(x=x, y=y - 8, width=16.0, height=16.0)
        yield word.changed(x=x + 22, y=y, size=LETTERS)
        x += 36 + width
