"""Bandwidth: nccl-tests' definitions, the ring model and its fit, and a real measurement."""

import pytest

from course.measure.bandwidth import Measurement, RingModel, fit_ring, measure
from labkit.launch import RankFailed, launch


def test_bandwidths_of_a_known_time():
    measurement = Measurement("all_reduce", 4, 2_000_000_000, seconds=2.0)
    assert measurement.algorithm_gb_per_second == 1.0  # a GB is 1e9 bytes
    assert measurement.bus_gb_per_second == 1.5


def test_an_all_reduce_costs_its_two_halves():
    model = RingModel(3e-6, 5e9)
    halves = sum(model.seconds(half, 8, 1 << 20) for half in ("reduce_scatter", "all_gather"))
    assert model.seconds("all_reduce", 8, 1 << 20) == pytest.approx(halves)


def test_the_models_bus_bandwidth_approaches_the_links():
    model = RingModel(1e-5, 2e9)
    bandwidths = [
        Measurement("all_gather", n, 1 << 40, model.seconds("all_gather", n, 1 << 40)).bus_gb_per_second
        for n in (2, 4, 64)
    ]
    assert bandwidths == pytest.approx([2.0, 2.0, 2.0], rel=1e-3)


def test_the_fit_recovers_the_model_that_made_the_times():
    model = RingModel(2e-5, 3e9)
    sizes = [2**k for k in range(10, 26, 3)]
    points = [Measurement("all_reduce", n, s, model.seconds("all_reduce", n, s)) for n in (2, 4) for s in sizes]
    fitted = fit_ring(points)
    assert fitted.latency_seconds == pytest.approx(2e-5)
    assert fitted.link_bytes_per_second == pytest.approx(3e9)


def test_a_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="at least two message sizes"):
        fit_ring([Measurement("all_reduce", 2, 1024, 1e-3)] * 3)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_measuring_on_real_ranks(operation):
    rows = launch(measure, operation, [1 << 10, 1 << 22], num_repeats=5, world_size=2, backend="gloo")
    assert rows[0] == rows[1]  # one result, known to every rank
    small, large = rows[0]
    assert (small.operation, small.world_size, small.message_bytes) == (operation, 2, 1 << 10)
    assert 0 < small.seconds < 10
    assert 0 < small.bus_gb_per_second < large.bus_gb_per_second < 1000  # 4,096 times the bytes pay off


@pytest.mark.parametrize(
    ("operation", "size", "message"),
    [("all_reduce", 1001, "use a multiple of 8"), ("all_reduce", 0, "multiple of 8"), ("sum", 1024, "use all_reduce")],
)
def test_what_cannot_be_measured_says_why(operation, size, message):
    with pytest.raises(RankFailed, match=message):
        launch(measure, operation, [size], world_size=2, backend="gloo")
