"""Draw plans: what a GPU holds against its limit, where a step's time goes, and estimates next to published numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from course.pictures.painter import add_axes, inches, new_figure
from course.pictures.style import (
    BACKWARD,
    DP,
    FORWARD,
    GREY,
    IDLE,
    INK,
    LABEL_PT,
    MUTED,
    PP,
    TITLE,
    TP,
    WEIGHT_GRADIENT,
    keep_lower_axis,
    text_on,
    three_digits,
    tint,
)
from course.sizing import Hardware, Plan, Published, StepTime, memory, step_time

MEMORY_LOOKS: dict[str, dict[str, Any]] = {
    "weights": dict(facecolor=tint(INK, 0.75)),
    "gradients": dict(facecolor=tint(BACKWARD, 1.0)),
    "optimizer": dict(facecolor=tint(MUTED, 0.45)),
    "activations": dict(facecolor=tint(FORWARD, 1.0)),
}
TIME_LOOKS: dict[str, dict[str, Any]] = {
    "products": dict(facecolor=tint(FORWARD, 1.0)),
    "memory_bound": dict(facecolor=tint(FORWARD, 0.45)),
    "overhead": dict(facecolor=tint(WEIGHT_GRADIENT, 1.0)),
    "tensor_parallel": dict(facecolor=tint(TP, 1.0)),
    "pipeline_messages": dict(facecolor=tint(PP, 1.0)),
    "bubble": dict(facecolor=tint(IDLE, 1.0), hatch="////", edgecolor=GREY),
    "data_parallel": dict(facecolor=tint(DP, 1.0)),
    "optimizer": dict(facecolor=tint(MUTED, 0.45)),
}
WORDS = {
    "products": "matrix products",
    "memory_bound": "memory only",
    "overhead": "overhead",
    "tensor_parallel": "tensor messages",
    "pipeline_messages": "pipeline messages",
    "data_parallel": "gradient messages",
}
BAR = 0.66
SUM: dict[str, Any] = dict(size=LABEL_PT, weight="bold", color=INK, va="center")
LEAST_LABELLED = 0.05
"""Parts shorter than this share of the axis get no number; the text beside the picture has it."""


def draw_memory(plans: Mapping[str, Plan], hardware: Hardware, ax: Axes | None = None) -> Axes:
    """Draw what a GPU of the first and of the last stage holds under each plan, and the GPU's limit as a line."""
    rows, names = [], []
    for name, plan in plans.items():
        for stage in sorted({0, plan.pp_size - 1}):
            where = "" if plan.pp_size == 1 else "first stage" if stage == 0 else "last stage"
            names.append(", ".join(filter(None, (name, where))) or "each GPU")
            rows.append({part: held / 1e9 for part, held in asdict(memory(plan, stage)).items()})
    limit = hardware.memory_bytes / 1e9
    ax = ax or _axes(len(rows))
    longest = max([limit, *(sum(row.values()) for row in rows)])
    end = 1.27 * longest
    _draw_bars(ax, names, rows, MEMORY_LOOKS, end)
    ax.axvline(limit, color=PP, linewidth=3)
    for number, row in enumerate(rows):
        total = sum(row.values())  # all sums stand in one column, beyond the limit's line and every bar
        said = f"{three_digits(total)} GB: {'too much' if total > limit else 'fits'}"
        ax.text(1.015 * longest, number, said, **SUM)
    ax.set_title("memory of a GPU", **TITLE)
    ax.set_title(f"limit {limit:.0f} GB", loc="right", size=LABEL_PT, color=PP)
    ax.set_xlabel("GB", size=LABEL_PT, color=MUTED)
    return ax


def draw_step_time(estimates: Mapping[str, StepTime], ax: Axes | None = None) -> Axes:
    """Draw the parts of each estimated step, in seconds."""
    ax = ax or _axes(len(estimates))
    end = 1.12 * max(estimate.total for estimate in estimates.values())
    _draw_bars(ax, list(estimates), [estimate.parts for estimate in estimates.values()], TIME_LOOKS, end)
    for number, estimate in enumerate(estimates.values()):
        ax.text(estimate.total, number, f" {three_digits(estimate.total)} s", **SUM)
    ax.set_title("a step, estimated", **TITLE)
    ax.set_xlabel("seconds", size=LABEL_PT, color=MUTED)
    return ax


def draw_published(rows: Sequence[Published], hardware: Hardware, ax: Axes | None = None) -> Axes:
    """Draw each row's published FLOP/s per GPU as a ring and its estimate as a cross, with the error above both."""
    ax = ax or _axes(6)
    places = np.arange(len(rows))
    estimated = [step_time(row.plan, hardware).flops_per_gpu / 1e12 for row in rows]
    published = [row.flops_per_gpu / 1e12 for row in rows]
    ax.plot(places, published, "o", color=INK, markersize=13, fillstyle="none", markeredgewidth=2.5, label="published")
    ax.plot(places, estimated, "x", color=PP, markersize=10, markeredgewidth=3, label="estimated")
    for place, (ours, theirs) in enumerate(zip(estimated, published)):
        ax.text(place, max(ours, theirs) + 6, f"{ours / theirs - 1:+.1%}", size=LABEL_PT, color=INK, ha="center")
    ax.set_xticks(places, [f"{row.billions:g}" for row in rows])
    ax.set_ylim(0, max(estimated + published) * 1.15)
    ax.set_title("teraFLOP/s per GPU", **TITLE)
    ax.set_xlabel("billion parameters", size=LABEL_PT, color=MUTED)
    ax.legend(fontsize=LABEL_PT, frameon=False, loc="lower right", ncols=2)
    keep_lower_axis(ax)
    ax.tick_params("y", labelsize=LABEL_PT, length=0, labelcolor=INK)
    ax.grid(axis="y", color=IDLE)
    ax.set_axisbelow(True)
    return ax


def _draw_bars(ax: Axes, names: Sequence[str], rows: Sequence[Mapping[str, float]], looks: dict, end: float) -> None:
    """Draw one stacked bar per row, its parts numbered where there is room; the legend names the parts that matter."""
    for part, look in looks.items():
        values = np.array([row[part] for row in rows])
        if values.max() < 0.002 * end:
            continue
        lefts = np.array([sum(list(row.values())[: list(row).index(part)]) for row in rows])
        ax.barh(range(len(rows)), values, BAR, left=lefts, label=WORDS.get(part, part), linewidth=0, **look)
        for number, (left, value) in enumerate(zip(lefts, values)):
            if value >= LEAST_LABELLED * end:
                fill = look["facecolor"]
                behind = dict(facecolor=fill, edgecolor="none", pad=1.5) if "hatch" in look else None
                words: dict[str, Any] = dict(size=LABEL_PT, color=text_on(fill), ha="center", va="center", bbox=behind)
                ax.text(left + value / 2, number, three_digits(value), **words)
    ax.set_yticks(range(len(rows)), names)
    ax.tick_params("y", labelsize=LABEL_PT, length=0, labelcolor=INK)
    ax.set_xlim(0, end)
    ax.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    keep_lower_axis(ax)
    ax.legend(
        loc="upper left", bbox_to_anchor=(0, -0.6 / inches(ax)[1]), ncols=4, frameon=False, fontsize=LABEL_PT,
        handlelength=1.2, handletextpad=0.4, columnspacing=1.1, borderaxespad=0,
    )  # fmt: skip


def _axes(num_rows: int) -> Axes:
    """Return axes in a figure of their own, with room for names on the left and a legend below."""
    height = 0.6 * num_rows
    return add_axes(new_figure(14, height + 1.9), 0.17 * 14, 0.55, 0.78 * 14, height)
