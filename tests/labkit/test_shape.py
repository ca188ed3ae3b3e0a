"""The shape of a GPT: parameters against a published table and by hand, FLOPs against the formula and torch's count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labkit.groups import group_of_one
from labkit.model import ParallelGPT
from labkit.shape import GPT, flops_per_step, training_days

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
    ({"num_layers": -4}, "num_layers=-4 must be at least 1"),
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"hidden_size": 2.5}, "hidden_size=2.5 must be a whole number"),
    ({"seq_length": 0}, "seq_length=0 must be at least 1"),
    ({"vocab_size": True}, "vocab_size=True must be a whole number"),
    ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
    ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=100: use num_attention_heads 1, "),
        ({"num_query_groups": 3}, "num_query_groups=3 does not divide num_attention_heads=4: use num_query_groups 1"),
        ({"num_attention_heads": None, "num_query_groups": 2}, "num_query_groups=2 divides attention heads: give"),
        ({"norm": "batchnorm"}, "norm='batchnorm' is unknown: use 'layernorm' or 'rmsnorm'"),
])  # fmt: skip
def test_shapes_that_no_model_has_are_refused(sizes, says):
    known = dict(num_layers=2, hidden_size=100, seq_length=8, vocab_size=10, num_attention_heads=4)
    with pytest.raises(ValueError, match=says):
        GPT(**known | sizes)


@pytest.mark.parametrize(("hidden_size", "num_layers"), [(2304, 24), (12288, 80), (25600, 128)])
@pytest.mark.parametrize("batch", [512, 3072])
def test_flops_are_those_of_the_formula(hidden_size, num_layers, batch):
    s, layers, h, v = 2048, num_layers, hidden_size, 51200
    model = GPT(layers, h, s, v)
    formula = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops_per_step(model, batch) == pytest.approx(formula)
    selective, none = (flops_per_step(model, batch, how) for how in ("selective", "none"))
    assert none < selective < formula
    assert selective - none == pytest.approx(4 * batch * s * s * h * layers)  # the core of the attention, once


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_are_those_that_torch_counts(recompute):
    shape = GPT(num_layers=3, hidden_size=32, seq_length=16, vocab_size=40, num_attention_heads=4)
    model = ParallelGPT(shape, group_of_one(), recompute=recompute == "full")
    tokens = torch.randint(40, (2, 16))
    every_product = sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False)  # torch would skip the last one
    with every_product[0], every_product[1], FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == flops_per_step(shape, 2, recompute)


def test_an_unknown_recomputation_is_refused():
    with pytest.raises(ValueError, match="recompute='some' is unknown"):
        flops_per_step(GPT(1, 4, 4, 4), 1, "some")


def test_eight_flops_per_token_and_parameter_are_nearly_the_formula():
    gpt_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200)
    tokens = 1536 * gpt_3.seq_length
    assert flops_per_step(gpt_3, 1536) == pytest.approx(8 * tokens * gpt_3.num_parameters, rel=0.03)


@pytest.mark.parametrize(("tokens", "parameters", "gpus", "flops", "days"), [
    (300e9, 175e9, 1024, 140e12, 33.9), (450e9, 1e12, 3072, 163e12, 83.2),
])  # fmt: skip
def test_training_days(tokens, parameters, gpus, flops, days):
    assert round(training_days(tokens, parameters, gpus, flops), 1) == days
