"""Estimates next to published numbers."""

import pytest

from course.pictures.published import draw_published
from course.sizing import DGX_A100, table_1


def test_published_and_estimated_stand_above_each_other_with_the_error():
    plot = draw_published(table_1(), DGX_A100)
    [ax] = plot.figure.axes
    published, estimated = (line.get_ydata() for line in ax.lines)
    assert list(published) == pytest.approx([row.flops_per_gpu / 1e12 for row in table_1()])
    errors = [f"{ours / theirs - 1:+.1%}" for ours, theirs in zip(estimated, published)]
    assert [text.get_text() for text in ax.texts] == errors
    assert all(error in plot.alt for error in errors)
