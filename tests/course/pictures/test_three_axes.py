"""The picture of who holds what: every rank stands there once, with what the model and the trainer really give it."""

import pytest

from course.pictures.style import AXIS_COLOR, bytes_text
from course.pictures.three_axes import draw_holdings
from course.sizing import Traffic, step_traffic
from labkit.groups import group_of_one
from labkit.layout import ParallelLayout
from labkit.partition import layers_of_stage
from labkit.shape import GPT
from labtrain.model import ParallelGPT
from tests.support.pictures import lit, texts

SIZES = [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8]
MODEL = GPT(num_layers=8, hidden_size=32, seq_length=16, vocab_size=28, num_attention_heads=8)
CUBE = ParallelLayout(8, tp_size=2, pp_size=2)


def traffic_of(layout, **options) -> dict[str, Traffic]:
    return step_traffic(MODEL, layout, gpus_per_node=8, batch_size=16, **options)


@pytest.mark.parametrize(("t", "p"), SIZES)
def test_every_rank_is_drawn_in_the_frame_of_its_stage(t, p):
    layout = ParallelLayout(8, tp_size=t, pp_size=p)
    scene = draw_holdings(layout, 8, 16, traffic_of(layout))
    for rank in range(8):
        mark, frame = (scene.by_key[f"{key}{each}"] for key, each in (("rank", rank), ("frame", rank - rank % t)))
        assert frame.x < mark.x and mark.x + mark.width < frame.x + frame.width
        assert frame.y < mark.y and mark.y + mark.height < frame.y + frame.height
        assert str(rank) in mark.text.split()[:2]


@pytest.mark.parametrize(("t", "p"), SIZES)
def test_an_arrow_for_each_group_or_pair_in_the_axis_color(t, p):
    layout = ParallelLayout(8, tp_size=t, pp_size=p)
    arrows = [mark.edge for mark in draw_holdings(layout, 8, 16).marks if mark.heads]
    d = layout.dp_size
    assert arrows.count(AXIS_COLOR["tp"]) == (d * p if t > 1 else 0)
    assert arrows.count(AXIS_COLOR["pp"]) == d * (p - 1)  # one for each stage and replica: its tensor ranks send alike
    assert arrows.count(AXIS_COLOR["dp"]) == t * p * (d - 1)  # of eight replicas too


@pytest.mark.parametrize(("t", "p"), SIZES)
def test_the_bytes_on_the_arrows_add_up_to_the_traffic(t, p):
    layout = ParallelLayout(8, tp_size=t, pp_size=p)
    traffic = traffic_of(layout, bytes_per_element=8)
    scene = draw_holdings(layout, 8, 16, traffic)
    for axis, senders in {"tp": 8, "dp": 8, "pp": 8 - 8 // p}.items():
        shown = {*texts(scene, f"{axis}.")}
        assert shown == (
            {f"{axis} {bytes_text(traffic[axis].total_bytes / senders)}"} if layout.size(axis) > 1 else set()
        )
    assert scene.table.caption.startswith(f"All ranks together send in a step: tensor {bytes_text(traffic['tp'][0])}; ")


def test_pointing_at_a_rank_lights_its_peers_on_every_axis_and_the_arrows_between_them():
    scene = draw_holdings(CUBE, 4, 16)
    peers = {key for key in lit(scene, "rank5") if not key.endswith("bytes")}
    assert peers == {"rank5", "rank4", "rank7", "rank1", "tp.4", "dp.5", "pp.0"}
    assert scene.by_key["rank5"].fact == (
        "rank 5: layers 2 to 3, part 2 of 2; rows 0 to 7; its groups: tensor [4, 5], data [5, 7], pipeline [1, 5]"
    )


def test_the_table_says_the_same():
    table = draw_holdings(CUBE, 4, 16).table
    assert list(table.rows[5]) == ["5", "layers 2 to 3", "part 2 of 2", "rows 0 to 7", "[4, 5]", "[5, 7]", "[1, 5]"]
    assert table.caption == ""
    assert list(draw_holdings(ParallelLayout(2, pp_size=2), 2, 1).table.rows[1][:4]) == [
        "1",
        "layer 1",
        "whole layers",
        "row 0",
    ]


def test_a_rank_may_have_several_chunks_of_different_sizes():
    held = [[range(1), range(5, 8)], [range(1, 3), range(3, 5)]]
    scene = draw_holdings(ParallelLayout(2, pp_size=2), 8, 1, held=held)
    assert [row[1] for row in scene.table.rows] == ["layers 0, 5 to 7", "layers 1 to 2, 3 to 4"]
    assert scene.by_key["rank0"].fact.startswith("rank 0: layers 0, 5 to 7, whole layers")
    assert scene.by_key["stage1"].text == "stage 1\nlayers 1 to 2, 3 to 4"


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_layers_are_those_of_the_model(p):
    shape = GPT(num_layers=6, hidden_size=8, seq_length=4, vocab_size=4, num_attention_heads=2)
    layout = ParallelLayout(p, pp_size=p)
    for stage in range(p):
        model = ParallelGPT(shape, group_of_one(), stage=stage, num_stages=p)
        assert [int(name) for name in model.layers] == list(layers_of_stage(6, stage, layout.pp_size))
