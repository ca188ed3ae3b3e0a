"""The ten published runs: the table agrees with itself, each row is estimated well, and the fit finds constants."""

from dataclasses import replace

import pytest

from course.sizing import DGX_A100, fitted, flops_per_step, step_time, table_1

ROWS = table_1()
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])


@EACH_ROW
def test_the_table_agrees_with_itself(row):
    """Its parameters as printed, and its petaFLOP/s, which are FLOP/s per GPU times GPUs."""
    petaflops = [4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0][ROWS.index(row)]
    assert f"{row.plan.model.num_parameters / 1e9:.1f}".removesuffix(".0") + " billion" == row.model
    flops = flops_per_step(row.plan.model, row.plan.batch_size)
    assert flops / row.seconds / 1e15 == pytest.approx(petaflops, rel=0.005)


@EACH_ROW
def test_each_published_step_is_estimated_within_four_percent(row):
    assert row.seconds / row.estimate == pytest.approx(1, rel=0.04)


def test_the_errors_are_those_that_notebook_12_prints():
    errors = [row.seconds / row.estimate - 1 for row in ROWS]
    assert [round(100 * error, 1) for error in errors] == [0.0, -0.3, -2.6, -2.6, -3.9, 1.6, 0.4, 1.9, 2.7, 1.3]


@EACH_ROW
def test_a_row_is_estimated_about_as_well_from_the_nine_others(row):
    others = fitted([other for other in ROWS if other is not row], DGX_A100)
    assert step_time(row.plan, others).total == pytest.approx(row.seconds, rel=0.05)


def test_the_constants_of_the_a100_are_the_fit_rounded():
    found = fitted(ROWS, DGX_A100)
    assert found.product_efficiency == pytest.approx(DGX_A100.product_efficiency, abs=0.005)
    assert found.layer_overhead_seconds == pytest.approx(DGX_A100.layer_overhead_seconds, abs=50e-6)


def test_a_fit_finds_the_constants_that_made_the_times():
    secret = replace(DGX_A100, product_efficiency=0.6, layer_overhead_seconds=2e-3)
    rows = [row._replace(seconds=step_time(row.plan, secret).total) for row in ROWS]
    found = fitted(rows, DGX_A100)
    assert (found.product_efficiency, found.layer_overhead_seconds) == pytest.approx((0.6, 2e-3))
