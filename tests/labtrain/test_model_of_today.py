"""The model of today, and either model with its sequence cut: the loss and gradients of plain torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.groups import group_of_one, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention
from labtrain.model import ParallelGPT
from tests.labtrain.parity import any_values, assert_same, loss_and_gradients, plain_loss_and_gradients, tokens

GPT2 = GPT(num_layers=2, hidden_size=32, seq_length=16, vocab_size=13, num_attention_heads=8)
TODAY = replace(
    GPT2, norm="rmsnorm", mlp="swiglu", positions="rope", num_query_groups=4, ffn_hidden_size=40, bias=False, tied=False
)
SHAPES = {
    "GPT-2": GPT2,
    "today": TODAY,
    "one key for all": replace(TODAY, num_query_groups=1),
    "Llama 3's numbers": replace(TODAY, norm_eps=1e-3, rotary_base=500_000.0),
    "GPT-2's GeLU": replace(GPT2, mlp="gelu_tanh", norm_eps=0.1),
    "half today": replace(GPT2, norm="rmsnorm", mlp="swiglu", num_query_groups=4),  # biases, learned positions, tied
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "num_stages": 2}], ids=str)
def test_one_process(name, options):
    shape = SHAPES[name]
    assert_same(loss_and_gradients(shape, group_of_one(), **options), plain_loss_and_gradients(shape), options)


CUTS = [  # t, c, options
    (2, 2, {"context_parallel": "ring", "sequence_parallel": True, "num_stages": 2}),
    (1, 4, {"context_parallel": "all_gather", "zigzag": False}),
    (4, 1, {"sequence_parallel": True}),
    (2, 2, {"context_parallel": "ring", "zigzag": False}),
    (2, 2, {"context_parallel": "ulysses", "sequence_parallel": True}),
    (2, 2, {"context_parallel": "all_gather", "num_stages": 2}),
]


def test_shards_and_parts_of_the_sequence():
    """Every way to cut today's form; GPT-2's in the first two, as only its learned positions are cut in its own way."""

    def each_way():
        for shape, cuts in ((GPT2, CUTS[:2]), (TODAY, CUTS)):
            expected = plain_loss_and_gradients(shape)
            for t, c, options in cuts:
                with init_groups(ParallelLayout(4, tp_size=t, cp_size=c)) as groups:
                    got = loss_and_gradients(shape, groups.tp, groups.cp, **options)
                assert_same(got, expected, (t, c, options))

    launch(each_way, world_size=4)


def test_the_number_of_parameters_is_that_of_the_shape():
    """But for the norm at the end, which the shape leaves out as its source does."""
    for shape in SHAPES.values():
        last_norm = shape.hidden_size * (2 if shape.norm == "layernorm" else 1)
        assert sum(value.numel() for value in any_values(shape).values()) == shape.num_parameters + last_norm


def test_a_sequence_shorter_than_the_longest_keeps_its_positions():
    shape = TODAY
    model = ParallelGPT(shape, group_of_one(), dtype=torch.float64)
    ids = tokens(shape)[0]
    torch.testing.assert_close(model(ids[:, :6]), model(ids)[:, :6])
    with pytest.raises(ValueError, match="17 tokens are more than seq_length=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"dropout=0\.1 acts on attention weights, which attend= never has"):
        ParallelSelfAttention(32, 8, group_of_one(), dropout=0.1, attend=F.scaled_dot_product_attention)
    with pytest.raises(ValueError, match="num_query_groups=3 does not divide num_attention_heads=8"):
        ParallelSelfAttention(32, 8, group_of_one(), num_query_groups=3)
