"""FLOPs of a step against the paper's formula and torch's count, and the days of published runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from course.sizing.flops import flops_per_step, training_days
from labkit.groups import group_of_one
from labkit.shape import GPT
from labtrain.model import ParallelGPT


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
    model = ParallelGPT(shape, group_of_one(), recompute=recompute)
    tokens = torch.randint(40, (2, 16))
    every_product = sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(False)  # torch would skip the last one
    with every_product[0], every_product[1], FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == flops_per_step(shape, 2, recompute)


def test_eight_flops_per_token_and_parameter_are_nearly_the_formula():
    gpt_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200)
    tokens = 1536 * gpt_3.seq_length
    assert flops_per_step(gpt_3, 1536) == pytest.approx(8 * tokens * gpt_3.num_parameters, rel=0.03)


@pytest.mark.parametrize(("tokens", "parameters", "gpus", "flops", "days"), [
    (300e9, 175e9, 1024, 140e12, 33.9), (450e9, 1e12, 3072, 163e12, 83.2),
])  # fmt: skip
def test_training_days(tokens, parameters, gpus, flops, days):
    assert round(training_days(tokens, parameters, gpus, flops), 1) == days
