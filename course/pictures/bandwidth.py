"""Draw measured bandwidth as points and the ring model as lines, over the message size."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from course.measure.bandwidth import Measurement, RingModel
from course.pictures.painter import LABEL_PT, Plot, label_plot
from course.sizing.ring import bus_factor

LOOKS = (("#00204D", "o"), ("#7C7B78", "s"), ("#C9A227", "^"), ("#5B6770", "D"))  # by world size, dark to light


def draw_bandwidth(measurements: Sequence[Measurement], models: dict[int, RingModel]) -> Plot:
    """Draw time (left) and bus bandwidth (right) of one operation; ``models`` has a ring model for each world size."""
    figure = Figure((13, 4.8), layout="constrained")
    time_ax, bandwidth_ax = figure.subplots(1, 2)
    operation, said = measurements[0].operation, []
    sizes = np.geomspace(min(m.message_bytes for m in measurements), max(m.message_bytes for m in measurements), 60)
    for (color, marker), world_size in zip(LOOKS, sorted({m.world_size for m in measurements})):
        points = [m for m in measurements if m.world_size == world_size]
        x, label = [m.message_bytes for m in points], f"{world_size} ranks"
        largest, least_ms = max(points, key=lambda m: m.message_bytes), min(m.seconds for m in points) * 1e3
        reached = f"{largest.bus_gb_per_second:.3g} GB/s at {_size_text(largest.message_bytes)}"
        said.append(f"{label}: at least {least_ms:.3g} ms; {reached}")
        dots = {"color": color, "marker": marker, "linestyle": "", "markersize": 8, "label": f"{label}, measured"}
        time_ax.plot(x, [m.seconds * 1e3 for m in points], **dots)
        bandwidth_ax.plot(x, [m.bus_gb_per_second for m in points], **dots)
        if model := models.get(world_size):
            seconds = np.array([model.seconds(operation, world_size, size) for size in sizes])
            line = {"color": color, "linewidth": 1.8, "label": f"{label}, ring model"}
            time_ax.plot(sizes, seconds * 1e3, **line)
            bandwidth_ax.plot(sizes, sizes * bus_factor(operation, world_size) / seconds / 1e9, **line)
    name = operation.replace("_", "-")
    for ax, what, unit in (time_ax, "time", "milliseconds"), (bandwidth_ax, "bus bandwidth", "GB/s (1 GB = 1e9 bytes)"):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(lambda size, _: _size_text(size))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        label_plot(ax, f"{name}: {what}", "message size", unit)
    bandwidth_ax.legend(loc="lower right", fontsize=LABEL_PT - 1, frameon=False)  # no curve goes there
    return Plot(figure, f"{name}, time and bus bandwidth over the message size, measured. {'. '.join(said)}.")


def _size_text(size: float) -> str:
    """Write a size in binary units, because the axis has powers of two.

    >>> _size_text(1024), _size_text(2**24)
    ('1 KiB', '16 MiB')
    """
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:g} {unit}"
    return f"{size:g} B"
