"""Parameters against the paper's table; traffic against numbers worked by hand and against a walk over the edges."""

import itertools

import pytest

from course.sizing import Traffic, step_traffic
from labkit.layout import ParallelLayout
from labkit.shape import GPT

# P in billions, h, l: table 1 of arXiv 2104.04473, with V = 51200 and s = 2048
TABLE = [
    (1.7, 2304, 24), (3.6, 3072, 30), (7.5, 4096, 36), (18.4, 6144, 40), (39.1, 8192, 48),
    (76.1, 10240, 60), (145.6, 12288, 80), (310.1, 16384, 96), (529.6, 20480, 105), (1008.0, 25600, 128),
]  # fmt: skip


@pytest.mark.parametrize(("billions", "hidden_size", "num_layers"), TABLE)
def test_parameters_of_the_paper(billions, hidden_size, num_layers):
    model = GPT(num_layers, hidden_size, seq_length=2048, vocab_size=51200)
    assert round(model.num_parameters / 1e9, 1) == billions


def test_parameters_counted_piece_by_piece():
    h, vocab_size, seq_length = 4, 10, 8
    attention = (h * 3 * h + 3 * h) + (h * h + h)  # query, key and value; projection
    mlp = (h * 4 * h + 4 * h) + (4 * h * h + h)
    norms = 2 * (h + h)
    embeddings = vocab_size * h + seq_length * h
    model = GPT(num_layers=2, hidden_size=h, seq_length=seq_length, vocab_size=vocab_size)
    assert model.num_parameters == 2 * (attention + mlp + norms) + embeddings == 560


@pytest.mark.parametrize(("sizes", "says"), [
    ({"num_layers": -4}, "num_layers=-4 is not a size: use a whole number from 1 up"),
    ({"num_layers": 0}, "num_layers=0 is not a size"),
    ({"hidden_size": 2.5}, "hidden_size=2.5 is not a size"),
    ({"seq_length": 0}, "seq_length=0 is not a size"),
    ({"vocab_size": True}, "vocab_size=True is not a size"),
    ({"num_attention_heads": 0}, "num_attention_heads=0 is not a size"),
    ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=100: use 1, 2, 4, 5, 10, "),
])  # fmt: skip
def test_shapes_that_no_model_has_are_refused(sizes, says):
    known = dict(num_layers=2, hidden_size=100, seq_length=8, vocab_size=10, num_attention_heads=4)
    with pytest.raises(ValueError, match=says):
        GPT(**known | sizes)


TINY = GPT(num_layers=2, hidden_size=4, seq_length=8, vocab_size=10)  # 560 parameters


def test_sixteen_gpus_by_hand():
    """t=2, p=4, d=2 in two boxes of 8, B=4: a replica's activations are 4/2 * 8 * 4 = 64 elements = 128 bytes."""
    traffic = step_traffic(
        TINY, ParallelLayout(16, 2, 4), gpus_per_node=8, batch_size=4, gradient_bytes_per_element=2
    )  # fmt: skip
    # half a layer a stage: 2 all-reduces of 128 bytes; on a ring of two each rank sends the whole message once
    assert traffic["tp"] == Traffic(total_bytes=16 * 2 * 128, crossing_bytes=0)
    # 560 / 8 = 70 parameters a rank, 140 bytes, sent once; ranks 0 and 2, 1 and 3, ... share a box
    assert traffic["dp"] == Traffic(total_bytes=16 * 140, crossing_bytes=0)
    # 4 pipelines of 3 hand-overs, 128 bytes there and 128 back; only 4 -> 8, 5 -> 9, ... leave the box
    assert traffic["pp"] == Traffic(total_bytes=4 * 3 * 256, crossing_bytes=4 * 256)


def test_the_paper_s_volume_per_device():
    """8bsh(t-1)/t elements per layer, device and micro-batch (section 3.2), here with m = 1."""
    t, b = 8, 3
    model = GPT(num_layers=1, hidden_size=64, seq_length=16, vocab_size=100)
    traffic = step_traffic(model, ParallelLayout(t, t), gpus_per_node=8, batch_size=b, bytes_per_element=1)
    assert traffic["tp"].total_bytes / t == pytest.approx(8 * b * 16 * 64 * (t - 1) / t)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-pp-dp-cp", "dp-tp-pp-cp", "pp-cp-tp-dp"])
@pytest.mark.parametrize("gpus_per_node", [1, 3, 4, 8, 48])
def test_crossing_bytes_by_walking_every_edge(order, gpus_per_node):
    """Rank by rank: what it sends to its successor, and whether that one is in another node."""
    for t, p, c in itertools.product((1, 2, 4), (1, 2, 3), (1, 2)):
        layout = ParallelLayout(48, t, p, c, order)
        traffic = step_traffic(TINY, layout, gpus_per_node=gpus_per_node, batch_size=12)
        activation_bytes = 12 / layout.dp_size * 8 / c * 4 * 2
        replicas = layout.dp_size * c
        per_edge = {
            "tp": 4 * (2 / p) * activation_bytes * 2 * (t - 1) / t,
            "dp": 560 / (t * p) * 4 * 2 * (replicas - 1) / replicas,
            "pp": 2 * activation_bytes,
        }
        for axis, edge_bytes in per_edge.items():
            total = crossing = 0.0
            for rank in range(48):
                group = layout.group_of(rank, *(("dp", "cp") if axis == "dp" else (axis,)))
                place = group.index(rank)
                if axis == "pp" and place == len(group) - 1:
                    continue
                total += edge_bytes
                if group[(place + 1) % len(group)] // gpus_per_node != rank // gpus_per_node:
                    crossing += edge_bytes
            assert traffic[axis] == pytest.approx((total, crossing))


def test_one_gpu_moves_nothing():
    traffic = step_traffic(TINY, ParallelLayout(1), gpus_per_node=8, batch_size=4)
    assert set(traffic.values()) == {Traffic(0, 0)}


@pytest.mark.parametrize("name", ["gpus_per_node", "batch_size"])
def test_less_than_one_is_refused(name):
    sizes = {"gpus_per_node": 8, "batch_size": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0 .* use 1 or more"):
        step_traffic(TINY, ParallelLayout(8), **sizes)
