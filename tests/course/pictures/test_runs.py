"""Estimates of published runs against what was measured."""

import pytest

from course.pictures.runs import draw_runs
from course.sizing import RUNS


def points(runs=RUNS):
    scene = draw_runs(runs)
    return {run: scene.by_key[f"run.{run.name}"] for run in runs}


def test_each_run_is_a_point_that_says_what_it_is():
    for run, point in points().items():
        assert str(run) in point.fact and f"{run.error:+.1%}" in point.fact and run.assumed in point.fact
    scene = draw_runs()
    fitted = [abs(run.error) for run in RUNS if run.fits]
    assert f"{len(fitted)} runs fitted: mean error {sum(fitted) / len(fitted):.1%}" in scene.alt
    assert len(scene.table.rows) == len(RUNS)


def test_a_point_is_above_the_diagonal_if_the_estimate_is_too_slow():
    scene = draw_runs()
    diagonal = scene.by_key["same"]
    (x0, y0), (x1, y1) = diagonal.points
    for run, point in points().items():
        x, y = point.x + point.width / 2 - diagonal.x, point.y + point.height / 2 - diagonal.y
        above = (y0 + (x - x0) / (x1 - x0) * (y1 - y0)) - y
        assert (above > 0) == (run.error > 0) or abs(run.error) < 1e-9


def test_as_large_an_error_is_as_far_from_the_diagonal():
    fast, slow = (run._replace(seconds=run.estimate / 1.2) for run in (RUNS[0], RUNS[11]))
    found = points([fast, slow])
    diagonal = draw_runs([fast, slow]).by_key["same"]
    slope = diagonal.points[1][1] / diagonal.points[1][0]
    heights = [point.y - slope * point.x for point in found.values()]
    assert heights[0] == pytest.approx(heights[1])


def test_hollow_points_are_runs_to_which_nothing_was_fitted():
    for run, point in points().items():
        assert point.means.endswith(", fitted") == run.fits
