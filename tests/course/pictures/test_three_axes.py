"""The picture of who holds what: every rank stands there once, with what the model and the trainer really give it."""

import matplotlib
import pytest

from course.pictures.style import AXIS_COLOR
from course.pictures.three_axes import draw_holdings, holdings_text
from labkit.cuts import BatchCut, layers_of_stage
from labkit.groups import group_of_one
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT
from labkit.shape import GPT

SIZES = [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8]


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(("t", "p"), SIZES)
def test_every_rank_is_drawn_once_and_nothing_leaves_the_picture(t, p):
    layout = ParallelLayout(8, tp_size=t, pp_size=p)
    ax = draw_holdings(layout, num_layers=8, batch_size=16)
    ranks = [int(text.removeprefix("rank ")) for text in texts(ax) if text.removeprefix("rank ").isdigit()]
    assert sorted(ranks) == list(range(8))
    ax.figure.canvas.draw()
    width, height = ax.figure.canvas.get_width_height()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)
    overlapping = [
        (one.get_text(), other.get_text())
        for i, one in enumerate(ax.texts)
        for j, other in enumerate(ax.texts[:i])
        if boxes[i].overlaps(boxes[j])
    ]
    assert not overlapping


@pytest.mark.parametrize(("t", "p"), SIZES)
def test_an_arrow_for_each_pair_of_neighbours_in_the_axis_color(t, p):
    layout = ParallelLayout(8, tp_size=t, pp_size=p)
    d = layout.dp_size
    ax = draw_holdings(layout, num_layers=8, batch_size=16)
    colors = [matplotlib.colors.to_hex(patch.get_facecolor()).upper() for patch in ax.patches]
    arrows = {axis: colors.count(color.upper()) for axis, color in AXIS_COLOR.items()}
    assert arrows["tp"] == d * p * (t - 1)
    assert arrows["pp"] == d * (p - 1)  # one for each stage and replica: its tensor ranks send alike
    assert arrows["dp"] in (t * p * (d - 1), 0)
    assert arrows["dp"] or d > 4 or d == 1  # eight replicas leave no room


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_layers_are_those_of_the_model(p):
    shape = GPT(num_layers=6, hidden_size=8, seq_length=4, vocab_size=4, num_attention_heads=2)
    layout = ParallelLayout(p, pp_size=p)
    for stage in range(p):
        model = ParallelGPT(shape, group_of_one(), stage=stage, num_stages=p)
        assert [int(name) for name in model.layers] == list(layers_of_stage(6, stage, layout.pp_size))


def test_rows_are_all_rows_once():
    layout = ParallelLayout(8, tp_size=2)
    assert [row for dp_rank in range(4) for row in BatchCut(12, layout.dp_size).rows_of_replica(dp_rank)] == list(
        range(12)
    )


def test_the_text_says_the_same():
    text = holdings_text(ParallelLayout(8, tp_size=2, pp_size=2), num_layers=4, batch_size=16)
    assert text.splitlines()[5] == "rank 5: layers 2 to 3, part 2 of 2; rows 0 to 7"
    assert holdings_text(ParallelLayout(2, pp_size=2), 2, 1).splitlines()[1] == "rank 1: layer 1; row 0"
