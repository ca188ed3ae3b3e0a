"""A transformer layer with its messages, without and with sequence parallelism."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course.pictures.style import CP, FRAME_FILL, TINTS, TP, tint
from course.pictures.transformer import draw_transformer_layers


def test_messages_stand_where_the_operators_are(written):
    without, with_sequence = draw_transformer_layers(tp_size=2)

    def messages(ax):
        names = ("nothing", "all-reduce", "all-gather", "reduce-scatter")
        places = sorted((label.y, label.x, label.text) for label in written if label.ax is ax and label.text in names)
        return [text for _, _, text in places[:4]], [text for _, _, text in places[4:]]

    assert messages(without) == (["nothing", "all-reduce"] * 2, ["all-reduce", "nothing"] * 2)
    assert messages(with_sequence) == (["all-gather", "reduce-scatter"] * 2, ["reduce-scatter", "all-gather"] * 2)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_has_a_row_and_the_colour_says_what_is_cut(tp_size, written):
    without, with_sequence = draw_transformer_layers(tp_size)
    for ax, around in ((without, None), (with_sequence, CP)):
        texts = [label.text for label in written if label.ax is ax]
        assert [text for text in texts if text.startswith("rank")] == [f"rank {rank}" for rank in range(tp_size)]
        assert texts.count("Q K V") == texts.count("heads") == texts.count("down") == tp_size
        fills = {to_hex(patch.get_facecolor()) for patch in ax.patches if isinstance(patch, Rectangle)}
        cut = {to_hex(tint(TP, TINTS[rank])) for rank in range(tp_size)}
        whole = {to_hex(tint(around, TINTS[rank])) for rank in range(tp_size)} if around else {FRAME_FILL.lower()}
        assert fills == cut | whole | {"#ffffff"}


def test_everything_is_inside_the_picture():
    for ax in draw_transformer_layers(tp_size=4):
        (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
        for patch in ax.patches:
            box = patch.get_bbox()
            assert left < box.x0 < box.x1 < right
            assert top < box.y0 < box.y1 < bottom
