"""The grids say what the layout says: a box for each rank in its node, tinted and lettered by its group."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from course.pictures import layout as drawing
from course.pictures.style import AXIS_COLOR, TINTS, group_letter, tint
from labkit.layout import ParallelLayout

TWO_NODES = ParallelLayout(16, tp_size=2, pp_size=4, order="tp-dp-pp")


@pytest.fixture
def ax():
    return Figure(figsize=(6, 6)).add_axes((0, 0, 1, 0.85))


@pytest.fixture
def labels(monkeypatch):
    """What was written where: each call of draw_labels, as texts and positions."""
    written = []
    draw_labels = drawing.draw_labels

    def spy(ax, texts, centres, *arguments, **options):
        written.append((list(texts), np.asarray(centres)))
        return draw_labels(ax, texts, centres, *arguments, **options)

    monkeypatch.setattr(drawing, "draw_labels", spy)
    return written


def gpu_boxes(ax, world_size):
    """The collection with one box for each GPU."""
    return next(c for c in ax.collections if len(c.get_offsets()) == world_size and len(c.get_facecolors()) > 1)


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_each_box_has_the_tint_and_letter_of_its_group(ax, labels, axis):
    drawing.draw_grid(TWO_NODES, axis, 8, ax)
    fills = gpu_boxes(ax, 16).get_facecolors()[:, :3]
    letters = next(texts for texts, _ in labels if len(texts) == 16 and texts[0] == "A")
    for index, group in enumerate(TWO_NODES.groups(axis)):
        for rank in group:
            assert letters[rank] == group_letter(index)
            np.testing.assert_allclose(fills[rank], tint(AXIS_COLOR[axis], TINTS[index % len(TINTS)]))


def test_letter_and_rank_are_written_into_the_ranks_own_box(ax, labels):
    drawing.draw_grid(TWO_NODES, "tp", 8, ax)
    boxes = np.asarray(gpu_boxes(ax, 16).get_offsets())
    in_boxes = [(texts, centres) for texts, centres in labels if len(texts) == 16]
    assert [texts for texts, _ in in_boxes][1] == [str(rank) for rank in range(16)]
    for _, centres in in_boxes:
        assert (np.abs(centres - boxes) < drawing.BOX / 2).all()


def test_follow_brings_only_that_ranks_group_to_the_front(ax):
    drawing.draw_grid(TWO_NODES, "pp", 8, ax, follow=6)
    fills = gpu_boxes(ax, 16).get_facecolors()[:, :3]
    in_front = [rank for rank in range(16) if np.allclose(fills[rank], to_rgb(AXIS_COLOR["pp"]))]
    assert in_front == TWO_NODES.group_of(6, "pp") == [2, 6, 10, 14]


def test_dimmed_is_grey_all_over(ax):
    drawing.draw_grid(TWO_NODES, "tp", 8, ax, follow=3, dimmed=True)
    for collection in ax.collections:
        for color in (*collection.get_facecolors(), *collection.get_edgecolors()):
            assert max(color[:3]) - min(color[:3]) < 0.12


def test_small_boxes_lose_the_rank_and_then_the_letter(labels):
    def texts_in_boxes(inches):
        labels.clear()
        drawing.draw_grid(TWO_NODES, "tp", 8, Figure(figsize=(inches, inches)).add_axes((0, 0, 1, 1)))
        return [texts[3] for texts, _ in labels if len(texts) == 16]

    assert texts_in_boxes(4) == ["B", "3"]
    assert texts_in_boxes(1.0) == ["B"]
    assert texts_in_boxes(0.5) == []


def test_a_grid_takes_a_handful_of_artists_however_many_gpus(ax):
    drawing.draw_grid(ParallelLayout(1024, 8, 8), "dp", 8, ax)
    assert len(ax.get_children()) < 25


@pytest.mark.parametrize(
    ("layout", "axis", "expected"),
    [
        (TWO_NODES, "tp", "8 groups of 2, each inside a node"),
        (TWO_NODES, "pp", "4 groups of 4, all cross nodes"),
        (ParallelLayout(16, pp_size=16), "dp", "16 groups of 1: nobody to talk to"),
        (ParallelLayout(16, tp_size=16), "tp", "1 group of 16, crosses nodes"),
        (ParallelLayout(24, tp_size=6), "tp", "4 groups of 6, 2 cross nodes"),
        (ParallelLayout(8, tp_size=8), "tp", "1 group of 8, inside a node"),
    ],
)
def test_headings(layout, axis, expected):
    assert drawing.describe_groups(layout, axis, 8) == expected


def test_both_orders_side_by_side_differ_in_data_and_pipeline_only():
    other = ParallelLayout(16, 2, 4, order="tp-pp-dp")
    rows = drawing.draw_orders([TWO_NODES, other])
    same = [np.array_equal(*(gpu_boxes(ax, 16).get_facecolors() for ax in row)) for row in rows]
    assert same == [True, False, False]


def test_cropping_to_what_is_drawn_keeps_the_headings():
    figure = drawing.draw_layout(TWO_NODES)[0].figure
    kept = figure.get_tightbbox(figure.canvas.get_renderer())
    assert (kept.width, kept.height) == pytest.approx(drawing.FIGURE_INCHES)
