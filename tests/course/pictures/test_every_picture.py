"""Every kind of picture, in the sizes that are hardest: nothing leaves the paper, and all text can be read."""

import pytest

from course.measure.topology import this_machine
from course.pictures.batch import BatchCut, Gradient, bucket_steps, draw_batch, draw_replicas
from course.pictures.context_parallel import draw_merge, draw_triangle, ring_steps, ulysses_steps
from course.pictures.experts import draw_loads, routing_steps
from course.pictures.fully_sharded import draw_cluster, draw_moments
from course.pictures.messages import ring_steps as message_ring_steps
from course.pictures.messages import tree_and_ring
from course.pictures.three_axes import draw_holdings
from course.pictures.topology import draw_topology
from course.pictures.transformer import draw_pair, draw_transformer_layer
from course.sizing import step_traffic
from course.sizing.fully_sharded import moments
from course.sizing.routing import drawn_logits, route
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from tests.support.pictures import faults

GRADIENTS = [
    Gradient(name, size, bucket, sent)
    for name, size, bucket, sent in (("1.bias", 4, "last", 0), ("1.weight", 16, "last", 1), ("0.bias", 4, "first", 2))
]
LAYOUTS = [ParallelLayout(8, tp_size=t, pp_size=p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8]
LONG = [[9.75] * 16] * 8
SMALL = GPT(num_layers=8, hidden_size=32, seq_length=16, vocab_size=28, num_attention_heads=8)


def holdings(layout):
    traffic = step_traffic(SMALL, layout, gpus_per_node=8, batch_size=16)
    return draw_holdings(layout, 8, 16, traffic)


PICTURES = {
    "batch": lambda *sizes: [draw(BatchCut(*sizes)) for draw in (draw_batch, draw_replicas)],
    "buckets": lambda: bucket_steps(GRADIENTS),
    "cluster": lambda size: [draw_cluster(32, size)],
    "holdings": lambda number: [holdings(LAYOUTS[number])],
    "layer": lambda *sizes: [draw_transformer_layer(*sizes)],
    "loads": lambda: [draw_loads({"one": [4.0, 0, 0, 0], "two": [1.0, 1, 1, 1]}, 2, 4, "Loads")],
    "merge": lambda: [draw_merge([[1, 3], [12, 4]], [[10, 20], [30, 40]])],
    "messages on a ring": lambda: message_ring_steps(LONG),
    "messages on a tree": lambda: tree_and_ring(LONG),
    "moments": lambda units, ranks, formula: [draw_moments(moments(units, ranks), formula, "a step")],
    "pair": draw_pair,
    "ring": ring_steps,
    "routing": lambda ranks, tokens, experts, k, skew: routing_steps(
        route(drawn_logits(ranks, tokens, experts), k, skew)
    ),
    "this machine": lambda: [draw_topology(this_machine(), "This machine")],
    "triangle": lambda *sizes: [draw_triangle(*sizes)],
    "ulysses": ulysses_steps,
}
SIZES = {
    "batch": [(128, 4, 1), (128, 4, 2), (96, 3, 4), (8, 1, 1), (16, 16, 1), (1024, 16, 8)],
    "cluster": [(8,), (16,), (32,)],
    "holdings": [(number,) for number in range(len(LAYOUTS))],
    "layer": [(1, False), (2, True), (4, False), (4, True)],
    "moments": [([400, 800, 400], 4, 1600), ([8], 2, 12)],
    "pair": [(1,), (2,), (4,), (8,)],
    "ring": [(c, zigzag) for c in (1, 2, 4) for zigzag in (True, False)],
    "routing": [(4, 4, 8, 2, 0), (8, 8, 16, 4, 3), (1, 8, 16, 1, 1), (2, 2, 2, 1, 0)],
    "triangle": [(16, 1), (16, 4), (16, 8), (2**20, 16), (4096, 2)],
    "ulysses": [(2, 8), (4, 8), (4, 4)],
}
CASES = [(name, sizes) for name in PICTURES for sizes in SIZES.get(name, [()])]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_nothing_leaves_the_picture_or_is_too_small(name, sizes):
    assert [fault for scene in PICTURES[name](*sizes) for fault in faults(scene)] == []
