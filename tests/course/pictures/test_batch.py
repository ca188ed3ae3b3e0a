"""Pictures of a batch: one box per micro-batch with its rows, one tint per rank."""

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from course.pictures.batch import draw_batch, draw_replicas
from course.pictures.style import DP, FRAME_FILL, TINTS, tint
from labkit.cuts import BatchCut

CUTS = [(128, 4, 1), (128, 4, 2), (96, 3, 4), (8, 1, 1), (16, 16, 1), (1024, 16, 8)]


def fills(ax):
    """The colours of each collection of boxes, in the order of drawing."""
    boxes = [artist for artist in ax.collections if isinstance(artist, PolyCollection)]
    return [[to_hex(color) for color in artist.get_facecolors()] for artist in boxes]


def tints_of(num_ranks):
    return [to_hex(tint(DP, TINTS[rank % len(TINTS)])) for rank in range(num_ranks)]


@pytest.mark.parametrize("sizes", CUTS[:3])
def test_a_box_for_each_micro_batch_with_its_rows_and_a_tint_for_each_rank(sizes, written):
    cut = BatchCut(*sizes)
    *columns, average = fills(draw_batch(cut))
    assert columns == [tints_of(cut.dp_size)] * cut.num_micro_batches
    assert average == ["#ffffff"]
    texts = [label.text for label in written]
    for rank in range(cut.dp_size):
        assert f"rank {rank}" in texts
        for number in range(cut.num_micro_batches):
            rows = cut.rows(rank, number)
            assert f"{rows[0]}-{rows[-1]}" in texts


def test_a_rank_alone_sends_nothing(written):
    draw_batch(BatchCut(8))
    texts = [label.text for label in written]
    assert "nothing" in texts
    assert "all-reduce:" not in texts


def test_of_replicas_what_differs_is_tinted_and_what_does_not_is_pale():
    rows, model, loss, gradients, _, mean, weights = fills(draw_replicas(BatchCut(128, 4)))
    assert rows == loss == gradients == tints_of(4)
    assert model == mean == weights == [FRAME_FILL.lower()] * 4


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("draw", [draw_batch, draw_replicas])
def test_nothing_leaves_the_figure(draw, sizes, assert_inside):
    assert_inside(draw(BatchCut(*sizes)))
