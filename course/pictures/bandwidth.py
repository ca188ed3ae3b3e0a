"""Measured bandwidth as points beside the ring model as lines, over the message size."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from course.measure.bandwidth import Measurement, RingModel
from course.pictures.style import INK, LABEL_PT, MUTED, TITLE_PT
from course.sizing.ring import bus_factor

LOOKS = (("#00204D", "o"), ("#7C7B78", "s"), ("#C9A227", "^"), ("#5B6770", "D"))
"""Colour and marker of each world size: dark to light, told apart by the marker alone."""


def draw_bandwidth(
    measurements: Sequence[Measurement], models: dict[int, RingModel], axes: Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw time (left) and bus bandwidth (right) of one operation; ``models`` has a ring model for each world size."""
    if axes is None:
        from matplotlib import pyplot

        axes = list(pyplot.figure(figsize=(13, 4.8), layout="constrained").subplots(1, 2))
    time_ax, bandwidth_ax = axes
    operation = measurements[0].operation
    sizes = np.geomspace(min(m.message_bytes for m in measurements), max(m.message_bytes for m in measurements), 60)
    for (color, marker), world_size in zip(LOOKS, sorted({m.world_size for m in measurements})):
        points = [m for m in measurements if m.world_size == world_size]
        x, label = [m.message_bytes for m in points], f"{world_size} ranks"
        dots = {"color": color, "marker": marker, "linestyle": "", "markersize": 8, "label": f"{label}, measured"}
        time_ax.plot(x, [m.seconds * 1e3 for m in points], **dots)
        bandwidth_ax.plot(x, [m.bus_gb_per_second for m in points], **dots)
        if model := models.get(world_size):
            seconds = np.array([model.seconds(operation, world_size, size) for size in sizes])
            line = {"color": color, "linewidth": 1.8, "label": f"{label}, ring model"}
            time_ax.plot(sizes, seconds * 1e3, **line)
            bandwidth_ax.plot(sizes, sizes * bus_factor(operation, world_size) / seconds / 1e9, **line)
    name = operation.replace("_", "-")
    _label(time_ax, f"{name}: time", "milliseconds")
    _label(bandwidth_ax, f"{name}: bus bandwidth", "GB/s (1 GB = 1e9 bytes)")
    bandwidth_ax.legend(loc="lower right", fontsize=LABEL_PT - 1, frameon=False)  # where no curve comes
    return [time_ax, bandwidth_ax]


def _label(ax: Axes, title: str, unit: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(lambda size, _: _size_text(size))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_title(title, loc="left", size=TITLE_PT, weight="bold", color=INK)
    ax.set_xlabel("message size", size=LABEL_PT, color=INK)
    ax.set_ylabel(unit, size=LABEL_PT, color=INK)
    ax.tick_params(labelsize=LABEL_PT - 1, colors=MUTED)
    ax.grid(which="major", color="#E5E7EB")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _size_text(size: float) -> str:
    """A size in binary units, as the axis has powers of two.

    >>> _size_text(1024), _size_text(2**24)
    ('1 KiB', '16 MiB')
    """
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:g} {unit}"
    return f"{size:g} B"
