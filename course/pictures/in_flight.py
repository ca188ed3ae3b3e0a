"""Draw what a schedule costs in memory: for how many micro-batches each rank holds the activations at once."""

import numpy as np
from matplotlib.axes import Axes

from course.pictures.glyphs import draw_labels
from course.pictures.painter import inches
from course.pictures.rows import draw_boxes
from course.pictures.style import INK, LABEL_PT, tint
from labkit.timeline.spans import COMPUTING, Span, Timeline


def draw_in_flight(timeline: Timeline, ax: Axes, most: float) -> Axes:
    """Draw for each rank a bar of as many boxes as it holds micro-batches at its peak; the longest bar has ``most``.

    The rows are those of the timeline that it stands beside.
    """
    peaks = peaks_in_flight(timeline)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    ax.set(xlim=(0, most * 1.3), ylim=(len(peaks), 0))  # with room for the number after the longest bar
    width, height = inches(ax) / (most * 1.3, len(peaks))
    whole = [(rank, left, min(left + 1, peak)) for rank, peak in enumerate(peaks) for left in range(int(np.ceil(peak)))]
    rows, lefts, rights = np.array(whole).T
    edge = 1.0 if width > 0.06 else 0.0  # boxes too narrow to count make a plain bar
    draw_boxes(ax, lefts, rights, rows + 0.18, 0.64, facecolors=tint(INK, 0.45), edgecolors="white", linewidths=edge)
    places = [(peak + 0.04 * most, rank + 0.5) for rank, peak in enumerate(peaks)]
    draw_labels(ax, [f"{peak:.3g}" for peak in peaks], places, min(0.18, 0.55 * height), INK, align="left")
    ax.set_title("micro-batches held", loc="left", size=LABEL_PT, color=INK)
    return ax


def peaks_in_flight(timeline: Timeline) -> list[float]:
    """Return the most micro-batches each rank holds at once; with v chunks per rank, a pass through one counts 1/v.

    >>> from labkit.schedules import interleaved
    >>> from labkit.timeline import simulate
    >>> peaks_in_flight(simulate(interleaved(4, 8, num_chunks=2)))
    [5.5, 4.5, 3.5, 2.5]
    """
    num_chunks = 1 + max((chunk_of(span) for span in timeline.spans if span.kind in COMPUTING), default=0)
    return [max(count for _, count in timeline.in_flight(rank)) / num_chunks for rank in timeline.ranks]


def chunk_of(span: Span) -> int:
    """Return the chunk that a span's op belongs to; 0 where the span has no op."""
    return span.op.chunk if span.op else 0
