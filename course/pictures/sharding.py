"""Draw Y = XA + b cut over a tensor group: matrices in proportion, each shard with its rank's number.

``draw_column`` and ``draw_row`` are the two cuts. A tinted box is a shard; a pale box is whole on every rank. A sum is
drawn as its first and its last part, one below the other with a plus between: each part is as large as the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Affine2D

from course.pictures.glyphs import draw_heading, draw_labels, label_path
from course.pictures.linear_cut import LinearCut
from course.pictures.painter import use_inches
from course.pictures.rows import draw_boxes
from course.pictures.style import EM, FRAME, FRAME_FILL, GREY, INK, MUTED, TP, text_on, tints

FIGURE_INCHES = (11.0, 5.1)
MARGIN, GAP = 0.1, 0.62  # inches: around everything, and between matrices, where = and the dot stand
HEAD, LINE, FOOT = 0.8, 0.27, 0.45  # inches: title and subtitle; a line of a caption; b below A
CAPTION_GAP = 0.15  # inches: between A and the captions on its right
PLUS = 0.34  # inches: between two parts of a sum
THINNEST = 0.16  # inches: a matrix with few rows or columns is drawn no thinner, and the picture says so
SAYS = {
    "column": "A is cut by columns. Each rank computes its columns of Y.",
    "row": "A is cut by rows, X by columns to match. Each rank computes a part of every element of Y.",
}
SMALLEST_NUMBER, COMFORTABLE_NUMBER = 0.085, 0.14  # inches: smaller ones are left out; too small ones are turned


def draw_column(input_size: int, output_size: int, tp_size: int, batch_size: int = 256, ax: Axes | None = None) -> Axes:
    """Draw Y = XA + b with A, b and Y cut by columns; X is whole on every rank."""
    return draw_cut(LinearCut("column", input_size, output_size, tp_size, batch_size), ax)


def draw_row(input_size: int, output_size: int, tp_size: int, batch_size: int = 256, ax: Axes | None = None) -> Axes:
    """Draw Y = XA + b with A cut by rows and X by columns; Y is the sum of partial results."""
    return draw_cut(LinearCut("row", input_size, output_size, tp_size, batch_size), ax)


def draw_cut(cut: LinearCut, ax: Axes | None = None, *, dimmed: bool = False) -> Axes:
    """Draw either cut; ``dimmed`` greys what is no longer current."""
    ax, width, height = use_inches(ax, *FIGURE_INCHES)
    color = GREY if dimmed else TP
    matrices = _matrices(cut)
    scale = _scale(matrices, width, height)
    middle = HEAD + LINE + (height - HEAD - LINE - FOOT) / 2
    left = MARGIN
    for matrix, symbol in zip(matrices, ("=", "·", "")):
        box = _box(matrix, left, middle, scale)
        _draw_matrix(ax, matrix, box, color)
        left = box.left + max(box.width, matrix.text_width) + GAP
        if symbol:
            draw_labels(ax, [symbol], [(left - GAP / 2, middle)], 0.4, INK, bold=True)
    _draw_bias(ax, cut, box, color)
    draw_heading(ax, MARGIN, f"{cut.cut} parallel, t = {cut.tp_size}", 0.2, SAYS[cut.cut], 0.52, color)
    if any(min(matrix.rows, matrix.columns) * scale < THINNEST for matrix in matrices):
        note = "not in proportion: thin matrices are drawn thicker"
        draw_labels(ax, [note], [(MARGIN, height - 0.15)], EM, MUTED, align="left")
    return ax


@dataclass(frozen=True)
class _Matrix:
    """What is drawn of one matrix. ``cut``: 'columns', 'rows', 'sum' or '' (whole on every rank)."""

    name: str
    rows: int
    columns: int
    cut: str
    num_shards: int
    captions: tuple[str, ...]  # below the box; to the right of A, which is the last and tallest
    times_high: int = 1  # how many boxes of this size stand one below the other: the parts of a sum

    @cached_property
    def text_width(self) -> float:
        """The width of the longest line beside its box, in inches."""
        return max(label_path(text).get_extents().width for text in (self.heading, *self.captions)) * EM

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose shards are drawn: of a sum the first and the last, as each is as large as the matrix."""
        return sorted({0, self.num_shards - 1}) if self.cut == "sum" else range(self.num_shards)

    @property
    def heading(self) -> str:
        return f"{self.name}  [{self.rows}, {self.columns}]"


class _Box(NamedTuple):
    left: float
    top: float
    width: float
    height: float

    def cut(self, along: str, num_shards: int) -> list["_Box"]:
        """Return the shards of this box, in rank order; those of a sum with room for a plus between them."""
        if along == "columns":
            width = self.width / num_shards
            return [self._replace(left=self.left + i * width, width=width) for i in range(num_shards)]
        gap = PLUS if along == "sum" else 0.0
        step = (self.height + gap) / num_shards
        return [self._replace(top=self.top + i * step, height=step - gap) for i in range(num_shards)]


def _matrices(cut: LinearCut) -> list[_Matrix]:
    """Return Y, X and A in the order of the equation, with the captions of each."""
    batch, rows, columns, t = cut.batch_size, cut.input_size, cut.output_size, cut.tp_size
    a_says = (f"rank i: A_i {list(cut.a_shard)}", f"stored: weight {list(cut.weight_shard)}")
    a = _Matrix("A", rows, columns, "columns" if cut.cut == "column" else "rows", t, a_says)
    if cut.cut == "column":
        y = _Matrix("Y", batch, columns, "columns", t, (f"rank i: Y_i {list(cut.y_shard)}",))
        return [y, _Matrix("X", batch, rows, "", t, ("every rank: all of X",)), a]
    y_says = f"rank i: a partial Y {list(cut.y_shard)}", f"Y is the sum of {t}"
    x = _Matrix("X", batch, rows, "columns", t, (f"rank i: X_i {list(cut.x_shard)}",))
    return [_Matrix("Y", batch, columns, "sum", t, y_says, min(t, 2)), x, a]


def _scale(matrices: list[_Matrix], width: float, height: float) -> float:
    """Return the inches per row and column: as many as there is room for, and the same for all matrices."""
    *others, a = matrices
    room_down = height - HEAD - LINE - FOOT
    room_with_captions = room_down - 2 * 2.2 * LINE  # twice, because all matrices have their middle at one height
    rooms = [(room_with_captions + PLUS) / each.times_high - PLUS for each in others]
    scale = min(room_down / a.rows, *(room / matrix.rows for room, matrix in zip(rooms, others)))
    room = width - 2 * MARGIN - 2 * GAP - CAPTION_GAP - a.text_width

    def taken(scale: float) -> float:
        beside = sum(max(matrix.columns * scale, matrix.text_width) for matrix in others)
        return beside + max(a.columns * scale, THINNEST)

    while taken(scale) > room and scale * max(matrix.columns for matrix in matrices) > THINNEST:
        scale *= 0.97
    return scale


def _box(matrix: _Matrix, left: float, middle: float, scale: float) -> _Box:
    width, height = max(matrix.columns * scale, THINNEST), max(matrix.rows * scale, THINNEST)
    height = matrix.times_high * (height + PLUS) - PLUS
    return _Box(left, middle - height / 2, width, height)


def _draw_matrix(ax: Axes, matrix: _Matrix, box: _Box, color: str) -> None:
    _draw_shards(ax, box, matrix.cut, matrix.ranks, color)
    draw_labels(ax, [matrix.heading], [(box.left, box.top - 0.6 * LINE)], EM, INK, bold=True, align="left")
    x, y = box.left, box.top + box.height + 0.75 * LINE
    if matrix.name == "A":
        is_short = box.height < 3 * LINE  # then the captions end above b's, and stand beside the heading
        heading_width = label_path(matrix.heading, bold=True).get_extents().width * EM if is_short else 0.0
        x = box.left + max(box.width, heading_width) + CAPTION_GAP
        y = min(box.top + box.height / 2 - 0.5 * LINE, box.top + box.height - 1.2 * LINE)
    for line, caption in enumerate(matrix.captions):
        ink = MUTED if caption.startswith("stored") else INK
        draw_labels(ax, [caption], [(x, y + line * LINE)], EM, ink, align="left")


def _draw_bias(ax: Axes, cut: LinearCut, a: _Box, color: str) -> None:
    """Draw b below A, cut as A's columns are, or whole. It is a vector: its thickness means nothing."""
    by_columns = cut.cut == "column"
    box = _Box(a.left, a.top + a.height + 0.12, a.width, 0.22)
    middle = box.top + box.height / 2
    _draw_shards(ax, box, "columns" if by_columns else "", range(cut.tp_size), color)
    draw_labels(ax, ["+ b"], [(box.left - 0.3, middle)], EM, INK, bold=True)
    caption = f"rank i: b_i {list(cut.b_shard)}" if by_columns else "every rank: all of b"
    draw_labels(ax, [caption], [(box.left + box.width + CAPTION_GAP, middle)], EM, INK, align="left")


def _draw_shards(ax: Axes, box: _Box, cut: str, ranks: Sequence[int], color: str) -> None:
    """Draw a box and what is in it: the shards of these ranks, with their numbers, or nothing."""
    if cut == "":
        _fill(ax, [box], [FRAME_FILL])
        return
    parts, all_fills = box.cut(cut, len(ranks)), tints(color, ranks[-1] + 1)
    fills = [all_fills[rank] for rank in ranks]
    _fill(ax, parts, fills)
    _number(ax, parts, fills, ranks)
    if cut == "sum" and len(ranks) > 1:
        place = box.left + max(box.width / 2, 0.5), box.top + box.height / 2
        draw_labels(ax, ["+" if ranks[-1] == 1 else "+ … +"], [place], 0.28, INK, bold=True)


def _fill(ax: Axes, boxes: list[_Box], fills: list) -> None:
    lefts, tops, widths, heights = np.array(boxes).T
    draw_boxes(ax, lefts, lefts + widths, tops, heights, facecolors=fills, edgecolors=FRAME, linewidths=0.8)


def _number(ax: Axes, parts: list[_Box], fills: list, ranks: Sequence[int]) -> None:
    """Write each shard's rank in its middle, turned where it would be too small upright."""
    long, high = 0.72 * len(str(ranks[-1])) + 0.1, 0.95  # of the longest number, in ems
    width, height = parts[0].width, parts[0].height
    upright, turned = min(width / long, height / high, 0.3), min(height / long, width / high, 0.3)
    turn = upright < COMFORTABLE_NUMBER and turned > upright
    em = turned if turn else upright
    if em < SMALLEST_NUMBER:
        return
    middles = [(part.left + part.width / 2, part.top + part.height / 2) for part in parts]
    inks = [text_on(fill) for fill in fills]
    labels = draw_labels(ax, [str(rank) for rank in ranks], middles, em, inks, bold=True)
    if turn:
        labels.set_transform(Affine2D().scale(em).rotate_deg(90) + ax.figure.dpi_scale_trans)
