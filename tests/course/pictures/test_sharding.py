"""Pictures of a cut matrix: true proportions, every shard numbered by its rank, every shape written."""

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from course.pictures.linear_cut import LinearCut
from course.pictures.sharding import draw_column, draw_cut, draw_row
from course.pictures.style import FRAME_FILL, TINTS, TP, tint


def boxes(ax):
    """The sizes in inches of all boxes of each colour collection, in the order of drawing."""
    found = []
    for artist in ax.collections:
        if isinstance(artist, PolyCollection):
            sizes = [np.ptp(path.vertices, axis=0) for path in artist.get_paths()]
            found.append((np.array(sizes), [to_hex(color) for color in artist.get_facecolors()]))
    return found


def tints_of(num_ranks):
    return [to_hex(tint(TP, TINTS[rank % len(TINTS)])) for rank in range(num_ranks)]


def test_cut_by_columns_a_y_and_b_are_in_shards_and_x_is_whole():
    (y, y_fills), (x, x_fills), (a, a_fills), (_, b_fills) = boxes(draw_column(1024, 512, 2))
    assert y_fills == a_fills == b_fills == tints_of(2)
    assert x_fills == [to_hex(FRAME_FILL)]
    assert a[0] / x[0] == pytest.approx([256 / 1024, 1024 / 256])  # true proportions
    assert y[0] == pytest.approx([a[0, 0], x[0, 1]])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_cut_by_rows_x_and_a_are_in_shards_and_y_is_a_sum_of_parts_as_large_as_y(tp_size, written):
    (y, y_fills), (x, x_fills), (a, a_fills), (_, b_fills) = boxes(draw_row(1024, 512, tp_size))
    assert x_fills == a_fills == tints_of(tp_size)
    assert b_fills == [to_hex(FRAME_FILL)]
    assert y_fills == [tints_of(tp_size)[rank] for rank in sorted({0, tp_size - 1})]
    for part in y:
        assert part == pytest.approx([a[0, 0], x[0, 1]])  # not cut: it has all columns and rows of Y
    assert a[0] / x[0] == pytest.approx([512 / (1024 / tp_size), 1024 / tp_size / 256])
    assert len(a) == len(x) == tp_size
    assert [label.text for label in written if label.text.startswith("+") and "b" not in label.text] == {
        1: [], 2: ["+"], 4: ["+ … +"],
    }[tp_size]  # fmt: skip


@pytest.mark.parametrize("draw", [draw_column, draw_row])
@pytest.mark.parametrize("tp_size", [2, 16])
def test_every_shard_carries_its_ranks_number_in_order(draw, tp_size, written):
    draw(1024, 512, tp_size)
    numbers = [int(label.text) for label in written if label.text.isdigit()]
    everybody = list(range(tp_size))
    if draw is draw_row:
        assert numbers == [0, tp_size - 1, *everybody, *everybody]  # Y's first and last part, X, A
    else:
        assert numbers == everybody * 3  # Y, A, b


@pytest.mark.parametrize(
    ("cut", "tp_size", "shapes"),
    [
        ("column", 16, ["A_i [1024, 32]", "weight [32, 1024]", "b_i [32]", "Y_i [256, 32]", "all of X"]),
        ("row", 16, ["A_i [64, 512]", "weight [512, 64]", "all of b", "a partial Y [256, 512]", "X_i [256, 64]"]),
    ],
)
def test_the_shapes_are_written(cut, tp_size, shapes, written):
    draw_cut(LinearCut(cut, 1024, 512, tp_size))
    text = "\n".join(label.text for label in written)
    for shape in ["A  [1024, 512]", "X  [256, 1024]", "Y  [256, 512]", *shapes]:
        assert shape in text


@pytest.mark.parametrize("draw", [draw_column, draw_row])
@pytest.mark.parametrize("sizes", [(64, 4096, 4), (4096, 64, 4), (64, 64, 4, 4096), (512, 512, 8, 16)])
def test_nothing_leaves_the_figure(draw, sizes, assert_inside):
    assert_inside(draw(*sizes))


def test_a_matrix_too_thin_to_see_is_drawn_thicker_and_the_picture_says_so(written):
    draw_column(64, 4096, 4)
    assert any("thin matrices are drawn thicker" in label.text for label in written)
    written.clear()
    draw_column(1024, 512, 2)
    assert not any("thicker" in label.text for label in written)


def test_draws_into_the_axes_it_is_given_and_greys_what_is_no_longer_current():
    ax = pyplot.figure(figsize=(11, 5)).add_axes((0, 0, 1, 1))
    assert draw_cut(LinearCut("column", 8, 8, 2), ax, dimmed=True) is ax
    assert boxes(ax)[0][1] != tints_of(2)
    assert len(pyplot.get_fignums()) == 1
