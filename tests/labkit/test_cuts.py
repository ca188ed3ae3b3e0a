"""Who sees which rows: every row is seen once, in a table, in a picture and in the explorer of notebook 05."""

import matplotlib

matplotlib.use("agg")

import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from course.explorers.batch import GRADIENT_BYTES, batch_explorer, facts_table
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


@pytest.fixture
def explorer():
    return batch_explorer(128, 4, num_micro_batches=2)


# -- the cut -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", CUTS)
def test_every_row_is_seen_once(sizes):
    cut = BatchCut(*sizes)
    pieces = [cut.rows(rank, number) for rank in range(cut.dp_size) for number in range(cut.num_micro_batches)]
    assert [row for rows in pieces for row in rows] == list(range(cut.batch_size))
    assert {len(rows) for rows in pieces} == {cut.micro_batch_size}


def test_it_is_what_chunk_deals_out():
    torch = pytest.importorskip("torch")
    cut, rows = BatchCut(96, 3, 4), torch.arange(96)
    for rank in range(3):
        for number in range(4):
            assert rows.chunk(3)[rank].chunk(4)[number].tolist() == list(cut.rows(rank, number))


def test_as_text_it_is_a_table():
    assert str(BatchCut(8, 2, 2)).split() == (
        "rank micro-batch 0 micro-batch 1 0 0-1 2-3 1 4-5 6-7".split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((128, 3, 1), "is 3 pieces, which do not divide batch_size=128: use batch_size 126 or 129"),
        (
            (4, 4, 2),
            "dp_size=4 times num_micro_batches=2 is 8 pieces, which do not divide batch_size=4: use batch_size 8",
        ),
        ((0, 1, 1), "batch_size=0 is no number of batch: use 1 or more"),
        ((8, 1, -1), "num_micro_batches=-1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, text):
    with pytest.raises(ValueError) as error:
        BatchCut(*sizes)
    assert text in str(error.value)


# -- the pictures ------------------------------------------------------------------------------------------------------


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


# -- the explorer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("control", "value"), [("batch_size", 256), ("dp_size", 8), ("num_micro_batches", 4)])
def test_every_control_changes_the_picture_and_the_facts(explorer, control, value):
    picture, facts = explorer.picture.value, explorer.facts.value
    getattr(explorer, control).value = value
    assert explorer.fits
    assert getattr(explorer.shown, control) == value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert explorer.picture.value != picture
    assert explorer.facts.value != facts


def test_the_facts_are_rows_and_bytes(explorer):
    assert GRADIENT_BYTES == 16_793_600
    assert "Each of 4 ranks sees 32 rows of 128 in a step" in explorer.says.value
    facts = explorer.facts.value
    assert "2 backwards of 16 rows: activations of 16 rows at a time" in facts
    assert "1/16 in its micro-batch · 1/2 in its rank · 1/4 in the average = 1/128" in facts
    assert "all gradients once, 16.8 MB; on a ring each rank sends 25.2 MB (without no_sync 50.4 MB)" in facts
    assert "<th>sent in a step</th><td>nothing</td>" in facts_table(BatchCut(8))


def test_a_misfit_says_so_in_place_and_keeps_the_last_picture_dimmed(explorer):
    picture, facts = explorer.picture.value, explorer.facts.value
    explorer.dp_size.value = 3
    assert not explorer.fits
    assert explorer.shown.dp_size == 4
    assert 'role="alert"' in explorer.says.value
    assert "6 pieces, which do not divide batch_size=128: use batch_size 126 or 132" in explorer.says.value
    assert explorer.picture.value != picture
    assert "labkit-stale" in explorer.facts.value
    explorer.dp_size.value = 4
    assert explorer.fits
    assert (explorer.picture.value, explorer.facts.value) == (picture, facts)


def test_redraws_leave_nothing_behind(explorer):
    artists = len(explorer._axes.get_children())
    for dp_size in (1, 2, 4, 8, 4):
        explorer.dp_size.value = dp_size
    assert len(explorer._axes.get_children()) == artists
    assert pyplot.get_fignums() == []


def test_its_repr_is_short_and_could_be_typed(explorer):
    assert repr(explorer) == "batch_explorer(128, 4, 2)"
    assert eval(repr(explorer), {"batch_explorer": batch_explorer}).shown == explorer.shown


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="3 pieces"):
        batch_explorer(dp_size=3)
