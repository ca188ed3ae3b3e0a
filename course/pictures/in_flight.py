"""What a schedule costs in memory: for how many micro-batches each rank holds the activations at once."""

import re
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes

from course.pictures.glyphs import draw_labels
from course.pictures.rows import add_axes, draw_boxes, inches, new_figure
from course.pictures.style import INK, LABEL_PT, tint
from labkit.timeline.spans import COMPUTING, Timeline


def draw_in_flight(timeline: Timeline, ax: Axes | None = None, *, most: float | None = None) -> Axes:
    """Draw for each rank a bar of as many boxes as it holds micro-batches at its peak; ``most`` ends the axis.

    Given an ``ax`` it names no ranks, to stand beside a timeline of the same rows.
    """
    peaks = peaks_in_flight(timeline)
    most = most or max(peaks)
    ax, alone = ax or add_axes(new_figure(6, 0.6 + 0.42 * len(peaks)), 0.9, 0.5, 5, 0.42 * len(peaks)), ax is None
    names = [f"rank {rank}" for rank in timeline.ranks] if alone else []
    ax.set_yticks(np.arange(len(names)) + 0.5, names, size=LABEL_PT, color=INK)
    ax.tick_params(length=0)
    ax.set_xticks([])
    ax.spines[:].set_visible(False)
    ax.set_xlim(0, most * 1.3)  # room for the number behind the longest bar
    ax.set_ylim(len(peaks), 0)
    width, height = inches(ax) / (most * 1.3, len(peaks))
    whole = [(rank, left, min(left + 1, peak)) for rank, peak in enumerate(peaks) for left in range(int(np.ceil(peak)))]
    rows, lefts, rights = np.array(whole).T
    edge = 1.0 if width > 0.06 else 0.0  # boxes too narrow to count are a plain bar
    draw_boxes(ax, lefts, rights, rows + 0.18, 0.64, facecolors=tint(INK, 0.45), edgecolors="white", linewidths=edge)
    places = [(peak + 0.04 * most, rank + 0.5) for rank, peak in enumerate(peaks)]
    draw_labels(ax, [f"{peak:.3g}" for peak in peaks], places, min(0.18, 0.55 * height), INK, align="left")
    ax.set_title("micro-batches held", loc="left", size=LABEL_PT, color=INK)
    return ax


def peaks_in_flight(timeline: Timeline) -> list[float]:
    """The most micro-batches each rank holds at once; with v chunks a rank, a pass through one of them counts 1/v.

    >>> from labkit.schedules import interleaved
    >>> from labkit.timeline import simulate
    >>> peaks_in_flight(simulate(interleaved(4, 8, num_chunks=2)))
    [5.5, 4.5, 3.5, 2.5]
    """
    num_chunks = 1 + max((chunk_of(span.label) for span in timeline.spans if span.kind in COMPUTING), default=0)
    return [max(count for _, count in timeline.in_flight(rank)) / num_chunks for rank in timeline.ranks]


@lru_cache(maxsize=8192)
def chunk_of(label: str) -> int:
    """The chunk in an op's label.

    >>> chunk_of("F3"), chunk_of("B0.1"), chunk_of("step")
    (0, 1, 0)
    """
    found = re.fullmatch(r"[A-Z]\d+\.(\d+)", label)
    return int(found[1]) if found else 0
