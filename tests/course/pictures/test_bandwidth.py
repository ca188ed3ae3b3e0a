"""Bandwidth beside its model."""

import pytest

from course.measure.bandwidth import Measurement, RingModel
from course.pictures.bandwidth import draw_bandwidth


def test_bandwidth_shows_points_as_measured_and_lines_as_modelled():
    points = [Measurement("all_reduce", n, size, 1e-3) for n in (2, 4) for size in (1 << 10, 1 << 20)]
    plot = draw_bandwidth(points, {2: RingModel(1e-4, 1e9)})
    time_ax, bandwidth_ax = plot.figure.axes
    labels = [line.get_label() for line in time_ax.lines]
    assert labels == ["2 ranks, measured", "2 ranks, ring model", "4 ranks, measured"]
    assert list(time_ax.lines[0].get_ydata()) == [1.0, 1.0]  # milliseconds
    assert list(bandwidth_ax.lines[2].get_ydata()) == [point.bus_gb_per_second for point in points[2:]]
    model_ms = time_ax.lines[1].get_ydata()
    assert model_ms[0] == pytest.approx((2 * 1e-4 + 1024 / 1e9) * 1e3)
    assert time_ax.get_xscale() == time_ax.get_yscale() == bandwidth_ax.get_yscale() == "log"
    assert "all-reduce" in plot.alt and f"4 ranks: at least 1 ms; {points[3].bus_gb_per_second:.3g} GB/s" in plot.alt
