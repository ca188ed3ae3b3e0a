"""Pictures of a batch: one box per micro-batch with its rows, one tint per rank."""

import matplotlib

matplotlib.use("agg")

import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from course.pictures import batch
from course.pictures.batch import draw_batch, draw_replicas
from course.pictures.style import DP, FRAME_FILL, TINTS, tint
from labkit.cuts import BatchCut

CUTS = [(128, 4, 1), (128, 4, 2), (96, 3, 4), (8, 1, 1), (16, 16, 1), (1024, 16, 8)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture
def written(monkeypatch):
    """Every label that a drawing writes."""
    labels, draw_labels = [], batch.draw_labels

    def remember(ax, texts, *args, **kwargs):
        labels.extend(texts)
        return draw_labels(ax, texts, *args, **kwargs)

    monkeypatch.setattr(batch, "draw_labels", remember)
    return labels


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
    for rank in range(cut.dp_size):
        assert f"rank {rank}" in written
        for number in range(cut.num_micro_batches):
            rows = cut.rows(rank, number)
            assert f"{rows[0]}-{rows[-1]}" in written


def test_a_rank_alone_sends_nothing(written):
    draw_batch(BatchCut(8))
    assert "nothing" in written
    assert "all-reduce:" not in written


def test_of_replicas_what_differs_is_tinted_and_what_does_not_is_pale():
    rows, model, loss, gradients, _, mean, weights = fills(draw_replicas(BatchCut(128, 4)))
    assert rows == loss == gradients == tints_of(4)
    assert model == mean == weights == [FRAME_FILL.lower()] * 4


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("draw", [draw_batch, draw_replicas])
def test_nothing_leaves_the_figure(draw, sizes):
    ax = draw(BatchCut(*sizes))
    ax.figure.draw_without_rendering()
    renderer = ax.figure.canvas.get_renderer()
    for artist in ax.collections:
        for path, offset in zip(artist.get_paths(), artist.get_offsets()):
            place = artist.get_transform().transform(path.vertices)
            if not isinstance(artist, PolyCollection):
                place = place + artist.get_offset_transform().transform(offset)
            assert place.min() >= -1
            assert place.max(axis=0)[0] <= renderer.width + 1
            assert place.max(axis=0)[1] <= renderer.height + 1
