"""Steps as timelines with bars beside them: what each rank did with its time, in shares of the step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from course.measure.utilisation import Step
from course.pictures.rows import add_axes, draw_boxes, inches, new_figure
from course.pictures.style import FORWARD, IDLE, INK, LABEL_PT, MUTED
from course.pictures.timeline import (
    FOOT_INCHES,
    GAP_INCHES,
    HEAD_INCHES,
    LEFT_INCHES,
    WAIT_LOOK,
    WORK_INCHES,
    draw_timeline,
    time_text,
)
from labkit.timeline import Timeline
from labkit.timeline.spans import COMPUTING

FIGURE_INCHES, BARS_INCHES, BETWEEN_INCHES = 14.0, 3.3, 0.35
COMPUTING_LOOK: dict[str, Any] = dict(facecolor=FORWARD, linewidth=0)
IDLE_LOOK: dict[str, Any] = dict(facecolor=IDLE, linewidth=0)
WAITING = "waits for a message under way"
LOOKS = COMPUTING_LOOK, WAIT_LOOK, IDLE_LOOK


def draw_shares(step: Step, ax: Axes | None = None, *, legend: bool = True) -> Axes:
    """Draw a bar for each rank: computing, waiting for messages under way, and idle; with the percent of the first."""
    height = len(step.shares) * (WORK_INCHES + GAP_INCHES)
    if ax is None:
        figure = new_figure(9, HEAD_INCHES + height + FOOT_INCHES)
        ax = add_axes(figure, LEFT_INCHES, HEAD_INCHES, 9 - LEFT_INCHES - 0.7, height)
        ax.set_yticks(np.arange(len(step.shares)) + 0.5, [f"rank {rank}" for rank in step.timeline.ranks])
        ax.tick_params("y", labelsize=LABEL_PT, length=0, labelcolor=INK)
    else:
        ax.set_yticks([])
    ax.set_xlim(0, 1)
    ax.set_ylim(len(step.shares), 0)  # ranks go down
    shares = np.array(step.shares)  # [rank, 3]
    ends = np.cumsum(shares, axis=1)
    row = WORK_INCHES + GAP_INCHES
    tops = np.arange(len(shares)) + GAP_INCHES / 2 / row
    for number, look in enumerate(LOOKS):
        draw_boxes(ax, ends[:, number] - shares[:, number], ends[:, number], tops, WORK_INCHES / row, **look)
    for rank, share in enumerate(shares[:, 0]):
        ax.text(1.03, rank + 0.5, f"{round(share, 6):.0%}", size=LABEL_PT, color=INK, va="center", clip_on=False)
    ax.set_title("computing", loc="right", size=LABEL_PT, color=INK)
    ax.set_xticks([0, 0.5, 1], ["0", "50", "100 %"])
    ax.tick_params("x", labelsize=LABEL_PT, labelcolor=MUTED)
    ax.spines[["top", "right", "left"]].set_visible(False)
    if legend:
        _draw_legend(ax)
    return ax


def draw_steps(steps: Sequence[Step], titles: Sequence[str]) -> list[Axes]:
    """Draw steps below each other on one scale of time, each with its bars; hatched means the same in both."""
    end = max(step.seconds for step in steps)
    unit = "s" if end >= 1 else "ms"
    heights = [len(step.shares) * (WORK_INCHES + GAP_INCHES) for step in steps]
    total = sum(heights) + len(steps) * (HEAD_INCHES + 0.1) + FOOT_INCHES
    figure, down, axes = new_figure(FIGURE_INCHES, total), HEAD_INCHES, []
    width = FIGURE_INCHES - LEFT_INCHES - BETWEEN_INCHES - BARS_INCHES
    for step, title, height in zip(steps, titles, heights, strict=True):
        ax = add_axes(figure, LEFT_INCHES, down, width, height)
        draw_timeline(_as_in_bars(step), ax, end_seconds=end, title=title, unit=unit, legend=step is steps[-1])
        said = f"{step.timeline.source}:  {time_text(step.seconds, unit)},  {step.mean_shares.computing:.0%} computing"
        ax.set_title(said, loc="right", size=LABEL_PT, color=INK)  # what is hatched is not idle
        bars = add_axes(figure, LEFT_INCHES + width + BETWEEN_INCHES, down, BARS_INCHES - 0.7, height)
        draw_shares(step, bars, legend=False)
        if step is not steps[-1]:
            for each in (ax, bars):
                each.tick_params(labelbottom=False)
                each.set_xlabel("")
        down += height + 0.1 + HEAD_INCHES
        axes.append(ax)
    for words in axes[-1].get_legend().get_texts():
        if words.get_text() == "waits":
            words.set_text(WAITING)
    return axes


def _as_in_bars(step: Step) -> Timeline:
    """Work, and waits for messages that were under way; no messages."""
    work = [span for span in step.timeline.spans if span.kind in COMPUTING]
    waits = [span for span in step.waits_for_messages if span.seconds]
    return Timeline([*work, *waits], step.timeline.source)


def _draw_legend(ax: Axes) -> None:
    words = "computing", WAITING, "idle"
    handles = [Patch(**look, label=label) for look, label in zip(LOOKS, words)]
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.40 / inches(ax)[1]), ncols=3, frameon=False,
        fontsize=LABEL_PT, labelcolor=INK, handlelength=1.2, borderaxespad=0, borderpad=0,
    )  # fmt: skip
