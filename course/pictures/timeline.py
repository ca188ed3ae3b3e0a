"""Draw timelines: one row per rank, time to the right, one box per op, and grey where nothing is computed.

Predictions and measurements are drawn by the same function, and each picture says which it is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course.pictures.glyphs import draw_labels
from course.pictures.in_flight import chunk_of, draw_in_flight, peaks_in_flight
from course.pictures.painter import add_axes, inches, new_figure
from course.pictures.rows import draw_boxes, width_ems, write_labels
from course.pictures.style import (
    EM,
    FORWARD,
    GREY,
    IDLE,
    INK,
    KIND_COLOR,
    LABEL_PT,
    MUTED,
    TITLE,
    keep_lower_axis,
    three_digits,
    tint,
)
from labkit.timeline.spans import COMMUNICATION, COMPUTING, WAIT, Span, Timeline

WORDS = {
    "forward": "F forward",
    "backward": "B backward",
    "weight_gradient": "W gradient of the weights",
    "optimizer": "optimizer",
}
CHUNK_STRENGTHS = (1.0, 0.45, 0.75, 0.25)
"""How much of its colour an op gets by its chunk: neighbours in this order are far apart."""
WAIT_LOOK: dict[str, Any] = dict(facecolor=IDLE, edgecolor=GREY, hatch="////", linewidth=0)
MESSAGE_LOOK: dict[str, Any] = dict(facecolor="#ffffff", edgecolor=MUTED, linewidth=0.8)

HEAD_INCHES, FOOT_INCHES, LEFT_INCHES, RIGHT_INCHES = 0.55, 0.80, 1.1, 0.15
IN_FLIGHT_INCHES = 2.5
"""The width of the bars beside a timeline."""
WORK_INCHES, GAP_INCHES, LANE_INCHES = 0.38, 0.07, 0.17
MOST_LANES = 3
"""Messages under way at once are drawn below each other, in up to this many lanes."""


def draw_timeline(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    end_seconds: float | None = None,
    title: str = "",
    unit: str | None = None,
    legend: bool = True,
) -> Axes:
    """Draw what each rank computed, where it waited, and below that which messages it had under way.

    ``end_seconds`` is where the time axis ends, so that several pictures can have one scale. ``unit`` is "ms", "s" or
    "time units"; by default, a simulation of a second or more is in time units.
    """
    unit = unit or _unit_of([timeline])
    row, ranks = _row_inches(timeline), timeline.ranks
    if ax is None:
        height = max(1, len(ranks)) * row
        figure = new_figure(12, HEAD_INCHES + height + FOOT_INCHES - (0 if legend else 0.3))
        ax = add_axes(figure, LEFT_INCHES, HEAD_INCHES, 12 - LEFT_INCHES - RIGHT_INCHES, height)
    makespan = timeline.makespan_seconds
    ax.set(xlim=(0, end_seconds or makespan or 1.0), ylim=(max(1, len(ranks)), 0))  # ranks go down
    top, height = GAP_INCHES / 2 / row, WORK_INCHES / row
    draw_boxes(ax, 0, makespan, np.arange(len(ranks)) + top, height, facecolors=IDLE, linewidths=0)

    work = [span for span in timeline.spans if span.kind in COMPUTING]
    if work:
        lefts, rights, tops = _places(timeline, work, top)
        fills = [tint(KIND_COLOR[s.kind], CHUNK_STRENGTHS[chunk_of(s) % len(CHUNK_STRENGTHS)]) for s in work]
        box_inches = np.median(rights - lefts) * inches(ax)[0] / ax.get_xlim()[1]
        edge = float(np.clip(8 * box_inches, 0, 1))  # hairlines would be all edge
        draw_boxes(ax, lefts, rights, tops, height, facecolors=fills, edgecolors="white", linewidths=edge)
    if waits := [span for span in timeline.spans if span.kind == WAIT]:
        draw_boxes(ax, *_places(timeline, waits, top), height, **WAIT_LOOK)
    if work:
        write_labels(ax, work, lefts, rights, tops, height, fills)
    if messages := [span for span in timeline.spans if span.kind == COMMUNICATION]:
        lefts, rights, tops = _places(timeline, messages, (GAP_INCHES + WORK_INCHES) / row)
        tops += np.array(_lanes(timeline)) * LANE_INCHES / row
        height = (LANE_INCHES - 0.02) / row
        draw_boxes(ax, lefts, rights, tops, height, **MESSAGE_LOOK)
        fills = [MESSAGE_LOOK["facecolor"]] * len(messages)
        write_labels(ax, messages, lefts, _seen_until(lefts, rights, tops), tops, height, fills)

    _label_axes(ax, ranks, (GAP_INCHES + WORK_INCHES) / 2 / row, unit)
    ax.set_title(title, **TITLE)
    ax.set_title(_facts(timeline, unit), loc="right", size=LABEL_PT, color=INK)
    if legend:
        _draw_legend(ax, [timeline])
    return ax


def draw_timelines(
    timelines: Sequence[Timeline],
    titles: Sequence[str],
    *,
    in_flight: bool = False,
    unit: str | None = None,
    figure: Figure | None = None,
) -> list[Axes]:
    """Draw timelines below each other on one scale: a prediction and a measurement, for example.

    ``in_flight`` adds bars of the activations that each rank holds. If you give a ``figure``, the rows fill its height.
    """
    unit = unit or _unit_of(timelines)
    end = max(timeline.makespan_seconds for timeline in timelines)
    heights = [len(timeline.ranks) * _row_inches(timeline) for timeline in timelines]
    around = len(timelines) * HEAD_INCHES + (len(timelines) - 1) * 0.1 + FOOT_INCHES
    figure = figure or new_figure(14, sum(heights) + around)
    stretch = (figure.get_figheight() - around) / sum(heights)
    width = figure.get_figwidth() - LEFT_INCHES - RIGHT_INCHES - (IN_FLIGHT_INCHES if in_flight else 0)
    most = max(max(peaks_in_flight(timeline)) for timeline in timelines) if in_flight else 0.0
    axes, down = [], HEAD_INCHES
    for timeline, title, height in zip(timelines, titles, heights, strict=True):
        axes.append(add_axes(figure, LEFT_INCHES, down, width, height * stretch))
        draw_timeline(timeline, axes[-1], end_seconds=end, title=title, unit=unit, legend=False)
        if in_flight:
            left = LEFT_INCHES + width + 0.4
            draw_in_flight(timeline, add_axes(figure, left, down, IN_FLIGHT_INCHES - 0.4, height * stretch), most)
        down += height * stretch + 0.1 + HEAD_INCHES
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
        ax.set_xlabel("")
    _draw_legend(axes[-1], timelines)
    return axes


def time_text(seconds: float, unit: str) -> str:
    """Write a length of time in three digits, with its unit.

    >>> time_text(0.0321, "ms"), time_text(33, "time units"), time_text(1.4604, "ms")
    ('32.1 ms', '33 time units', '1,460 ms')
    """
    return f"{three_digits(seconds * (1e3 if unit == 'ms' else 1))} {unit}"


def _unit_of(timelines: Sequence[Timeline]) -> str:
    end = max(timeline.makespan_seconds for timeline in timelines)
    if end >= 1 and all(timeline.source == "simulated" for timeline in timelines):
        return "time units"
    return "s" if end >= 10 else "ms"


def _facts(timeline: Timeline, unit: str) -> str:
    """Say where the timeline is from, how long it took, and how much of all ranks' time was idle."""
    if not timeline.makespan_seconds:
        return timeline.source
    return f"{timeline.source}:  {time_text(timeline.makespan_seconds, unit)},  {timeline.bubble_share:.1%} idle"


def _places(timeline: Timeline, spans: Sequence[Span], top: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the left, right and top of the spans' boxes; ``top`` is measured from the top of their rank's row."""
    begin = min(span.start for span in timeline.spans)
    row = {rank: index + top for index, rank in enumerate(timeline.ranks)}
    places = np.array([(span.start - begin, span.end - begin, row[span.rank]) for span in spans])
    return places[:, 0], places[:, 1], places[:, 2]


def _seen_until(lefts: np.ndarray, rights: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Return where each box is covered by the next one in its lane, or else where it ends.

    >>> _seen_until(np.array([0, 1, 2]), np.array([5, 2, 3]), np.array([0, 0.5, 0])).tolist()
    [2, 2, 3]
    """
    seen, last = rights.copy(), {}
    for number, top in enumerate(tops):
        if top in last:
            seen[last[top]] = min(seen[last[top]], lefts[number])
        last[top] = number
    return seen


def _row_inches(timeline: Timeline) -> float:
    """Return the height of a rank's row: its work, and below it the lanes of its messages."""
    num_lanes = max(_lanes(timeline), default=-1) + 1
    return GAP_INCHES + WORK_INCHES + (LANE_INCHES * num_lanes + GAP_INCHES / 2 if num_lanes else 0)


def _lanes(timeline: Timeline) -> list[int]:
    """Return for each message the first lane of its rank that is free when it starts, or the next to become free.

    >>> _lanes(Timeline([Span(0, "communication", "a", 0, 2), Span(0, "communication", "b", 1, 3)], "measured"))
    [0, 1]
    """
    free_at: dict[int, list[float]] = {}
    lanes = []
    for span in timeline.spans:
        if span.kind == COMMUNICATION:
            of_rank = free_at.setdefault(span.rank, [span.start] * MOST_LANES)
            free = [lane for lane, seconds in enumerate(of_rank) if seconds <= span.start]
            lanes.append(free[0] if free else of_rank.index(min(of_rank)))
            of_rank[lanes[-1]] = span.end
    return lanes


def _label_axes(ax: Axes, ranks: Sequence[int], middle: float, unit: str) -> None:
    ax.set_yticks([])
    names, (width, height) = [f"rank {rank}" for rank in ranks], inches(ax)
    left = -(0.12 + EM * max(map(width_ems, names), default=0)) / width * ax.get_xlim()[1]
    draw_labels(ax, names, [(left, row + middle) for row in range(len(ranks))], EM, INK, align="left")
    factor = 1e3 if unit == "ms" else 1
    ax.xaxis.set_major_formatter(lambda seconds, _: f"{round(seconds * factor, 6):g}")
    ax.set_xlabel(unit, size=LABEL_PT - 1, color=MUTED, ha="right", va="top")
    ax.xaxis.set_label_coords(-0.12 / width, -0.10 / height)  # below the ranks, in line with the numbers
    keep_lower_axis(ax)


def _draw_legend(ax: Axes, timelines: Sequence[Timeline]) -> None:
    """Say below the time axis what the boxes mean that occur."""
    spans = [span for timeline in timelines for span in timeline.spans]
    kinds = {span.kind for span in spans}
    chunks = sorted({chunk_of(span) for span in spans if span.kind in COMPUTING} - {0})
    handles = [Patch(color=KIND_COLOR[kind], label=words) for kind, words in WORDS.items() if kind in kinds]
    for chunk in chunks[: len(CHUNK_STRENGTHS) - 1]:
        handles.append(Patch(color=tint(FORWARD, CHUNK_STRENGTHS[chunk]), label=f"chunk {chunk}"))
    handles.append(Patch(color=IDLE, label="idle"))
    if WAIT in kinds:
        handles.append(Patch(**WAIT_LOOK, label="waits"))
    if COMMUNICATION in kinds:
        handles.append(Patch(**MESSAGE_LOOK, label="message under way"))
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.40 / inches(ax)[1]), ncols=len(handles),
        frameon=False, fontsize=LABEL_PT, labelcolor=INK, handlelength=1.2, handletextpad=0.5, columnspacing=1.6,
        borderaxespad=0, borderpad=0,
    )  # fmt: skip
