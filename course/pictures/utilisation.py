"""Draw steps as timelines with bars beside them: what each rank did with its time, as shares of the step."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from course.measure.utilisation import TimedStep
from course.pictures.painter import add_axes, new_figure
from course.pictures.rows import draw_boxes
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
WAITING = "waits for a message under way"
LOOKS = dict(facecolor=FORWARD, linewidth=0), WAIT_LOOK, dict(facecolor=IDLE, linewidth=0)


def draw_shares(step: TimedStep, ax: Axes) -> Axes:
    """Draw one bar per rank: computing, waiting for messages under way, and idle; with the percentage of the first."""
    ax.set_yticks([])
    ax.set(xlim=(0, 1), ylim=(len(step.shares), 0))  # ranks go down
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
    return ax


def draw_steps(steps: Sequence[TimedStep], titles: Sequence[str]) -> list[Axes]:
    """Draw steps below each other on one time scale, each with its bars; hatching means the same in both."""
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
        draw_shares(step, bars)
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


def _as_in_bars(step: TimedStep) -> Timeline:
    """Return the work, and the waits for messages that were under way; the messages are left out."""
    work = [span for span in step.timeline.spans if span.kind in COMPUTING]
    waits = [span for span in step.waits_for_messages if span.seconds]
    return Timeline([*work, *waits], step.timeline.source)
