"""Draw data parallelism: which rank has which rows, and what is the same on every replica.

Ranks go down, time goes right. What only one rank has is tinted and says whose it is; what all have alike is pale.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from course.pictures.glyphs import draw_heading, draw_labels, label_path
from course.pictures.painter import use_inches
from course.pictures.rows import draw_boxes
from course.pictures.style import DP, EM, FRAME, FRAME_FILL, GREY, INK, text_on, tints
from labkit.cuts import BatchCut
from labkit.sizes import counted

FIGURE_INCHES = (11.0, 5.1)
MARGIN, HEAD = 0.12, 1.35  # inches: around everything; title, subtitle and the columns' names
RANK_NAME, AVERAGE, GAP = 0.95, 1.1, 0.16  # inches: "rank 0"; the box of the all-reduce; between boxes
SMALLEST_ROW, SMALLEST_TEXT = 0.045, 0.085  # inches: narrower rows get no line, smaller labels are left out


def draw_batch(cut: BatchCut, ax: Axes | None = None, *, dimmed: bool = False) -> Axes:
    """Draw which rows each rank sees in each of its micro-batches; ``dimmed`` greys what is no longer current."""
    ax, width, height = use_inches(ax, *FIGURE_INCHES)
    color, m = GREY if dimmed else DP, cut.num_micro_batches
    rows = counted(cut.micro_batch_size, "row")
    says = f"Each rank sees {rows} at a time. A tint is a rank; white ticks are between rows."
    draw_heading(ax, MARGIN, f"batch of {cut.batch_size}, d = {cut.dp_size}, m = {m}", 0.25, says, 0.6, color)
    _name_ranks(ax, cut.dp_size, height)

    left, right = MARGIN + RANK_NAME, width - MARGIN - AVERAGE - GAP
    step = (right - left) / m
    gap = min(GAP, 0.15 * step)
    for number in range(m):
        box = left + number * step, left + (number + 1) * step - gap
        texts = [rows_text(cut.rows(rank, number)) for rank in range(cut.dp_size)]
        _draw_column(ax, f"micro-batch {number}", texts, box, height, color, lines=cut.micro_batch_size)
    _draw_average(ax, right, height, color, alone=cut.dp_size == 1)
    return ax


def draw_replicas(cut: BatchCut, ax: Axes | None = None) -> Axes:
    """Draw what each rank has in the course of a step, from its rows to its new weights."""
    ax, width, height = use_inches(ax, *FIGURE_INCHES)
    says = "Tinted: each rank has its own. Pale: the same on every rank."
    draw_heading(ax, MARGIN, f"data parallel, d = {cut.dp_size}", 0.25, says, 0.6, DP)
    _name_ranks(ax, cut.dp_size, height)
    step = (width - 2 * MARGIN - RANK_NAME - AVERAGE - GAP) / 6
    ranks, left = range(cut.dp_size), MARGIN + RANK_NAME

    def column(name: str, texts: list[str], color: str | None = DP) -> None:
        nonlocal left
        _draw_column(ax, name, texts, (left, left + step - GAP), height, color)
        left += step

    column("rows", [rows_text(cut.rows(rank, 0)) for rank in ranks])
    column("model", ["whole" for _ in ranks], None)
    column("loss", [f"of rank {rank}" for rank in ranks])
    column("gradients", [f"of rank {rank}" for rank in ranks])
    _draw_average(ax, left, height, DP)
    left += AVERAGE + GAP
    column("gradients", ["the mean" for _ in ranks], None)
    column("new weights", ["whole" for _ in ranks], None)
    return ax


def _draw_column(ax: Axes, name: str, texts: list[str], box, height: float, color: str | None, lines: int = 1) -> None:
    """Draw the column's name and below it one box per rank, with a line between every two of its ``lines`` rows."""
    left, right = box
    lane = (height - HEAD - MARGIN) / len(texts)
    inner = min(0.12, 0.15 * lane)
    tops = HEAD + np.arange(len(texts)) * lane + inner / 2
    fills = tints(color, len(texts)) if color else [to_rgb(FRAME_FILL)] * len(texts)
    draw_boxes(ax, left, right, tops, lane - inner, facecolors=fills, edgecolors=FRAME, linewidths=0.8)
    em = _fitting(texts, right - left, lane - inner)
    if lines > 1 and (right - left) / lines > SMALLEST_ROW:
        _draw_row_lines(ax, np.linspace(left, right, lines + 1)[1:-1], tops, lane - inner, em)
    if em > SMALLEST_TEXT:
        places = [((left + right) / 2, top + (lane - inner) / 2) for top in tops]
        draw_labels(ax, texts, places, em, [text_on(fill) for fill in fills])
    if (em := _fitting([name], right - left + 0.1, EM / 0.6)) > SMALLEST_TEXT:
        draw_labels(ax, [name], [(left, HEAD - 0.2)], em, INK, bold=True, align="left")


def _draw_row_lines(ax: Axes, places, tops, height: float, em: float) -> None:
    """Draw white lines at the foot of the boxes, so that they do not run through the numbers."""
    length = min(0.3 * height, (height - em) / 2, 0.18)
    foots = [(x, top + height) for top in tops for x in places]
    lines = LineCollection([[(x, y - length), (x, y)] for x, y in foots], colors="white", linewidths=1.0)
    ax.add_collection(lines, autolim=False)


def _draw_average(ax: Axes, left: float, height: float, color: str, alone: bool = False) -> None:
    """Draw one all-reduce over all ranks; a rank alone has nothing to send."""
    look = dict(facecolors="white", edgecolors=FRAME if alone else color, linewidths=2.5)
    draw_boxes(ax, left, left + AVERAGE, [HEAD], height - HEAD - MARGIN, **look)
    middle = (HEAD + height - MARGIN) / 2
    words = ["nothing", "to send"] if alone else ["all-reduce:", "the mean", "of all", "ranks'", "gradients"]
    places = [(left + AVERAGE / 2, middle + (line - (len(words) - 1) / 2) * 1.5 * EM) for line in range(len(words))]
    draw_labels(ax, words, places, 0.9 * EM, INK)
    draw_labels(ax, ["average"], [(left, HEAD - 0.2)], EM, INK, bold=True, align="left")


def _name_ranks(ax: Axes, num_ranks: int, height: float) -> None:
    lane = (height - HEAD - MARGIN) / num_ranks
    em = min(EM, 0.8 * lane)
    if em > SMALLEST_TEXT:
        places = [(MARGIN, HEAD + (rank + 0.5) * lane) for rank in range(num_ranks)]
        draw_labels(ax, [f"rank {rank}" for rank in range(num_ranks)], places, em, INK, align="left")


def _fitting(texts: list[str], width: float, height: float) -> float:
    """Return the size in inches of an em at which the longest text fits into a box; at most that of a label."""
    longest = max(label_path(text, bold=True).get_extents().width for text in texts)
    return min(EM, (width - 0.06) / longest, 0.6 * height)


def rows_text(rows: range) -> str:
    """Write the first and the last of some rows.

    >>> rows_text(range(32, 64)), rows_text(range(5, 6))
    ('32-63', '5')
    """
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])
