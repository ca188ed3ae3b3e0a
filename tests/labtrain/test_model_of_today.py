"""The model of today, and either model with its sequence cut: the loss and gradients of plain torch, written apart.

The oracle turns queries and keys as complex numbers, repeats keys and values for the queries that share them, and has
the gate and the other half of an MLP as two matrices.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.context_parallel import positions
from labkit.groups import group_of_one, init_groups, local_device
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.placement import placements
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention, shard_like, unshard
from labtrain.model import ParallelGPT, normal

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


def any_value(name, parameter):
    """A value for each parameter that its name decides: also for biases and norms, which start as zeros and ones."""
    value = torch.empty(parameter, dtype=torch.float64)
    normal(f"test {name}", seed=0, std=0.3)(value)
    return value


def sizes_of(shape):
    return {name: p.shape for name, p in ParallelGPT(shape, group_of_one(), dtype=torch.float64).named_parameters()}


def tokens(shape):
    return torch.randint(shape.vocab_size, (2, 3, shape.seq_length), generator=torch.Generator().manual_seed(1))


def plain_loss(shape, w, ids, targets):
    heads, kv_heads = shape.num_attention_heads, shape.num_query_groups or shape.num_attention_heads
    d, g, s = shape.hidden_size // heads, heads // kv_heads, ids.size(1)

    def normed(x, name):
        if shape.norm == "layernorm":
            return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], shape.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def turned(x):  # [b, s, heads, d]
        speeds = shape.rotary_base ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        turns = torch.polar(torch.ones(s, d // 2, dtype=torch.float64), torch.arange(s)[:, None] * speeds)
        pairs = torch.complex(*x.chunk(2, -1)) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], -1)

    x = w["embedding.weight"][ids]
    if shape.positions == "learned":
        x = x + w["positions"]
    for i in range(shape.num_layers):
        layer = f"layers.{i}"
        qkv = linear(normed(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv")
        *queries, k, v = (part.unflatten(-1, (kv_heads, d)) for part in qkv.chunk(g + 2, -1))
        q = torch.stack(queries, -2).flatten(-3, -2)  # [b, s, heads, d]: the queries of a group are neighbours
        k, v = (part.repeat_interleave(g, -2) for part in (k, v))
        if shape.positions == "rope":
            q, k = turned(q), turned(k)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        attended = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v).flatten(-2)
        x = x + linear(attended, f"{layer}.attention.out")
        up = linear(normed(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        if shape.mlp == "swiglu":
            gate, up = up.chunk(2, -1)
            x = x + linear(gate * torch.sigmoid(gate) * up, f"{layer}.mlp.down")
        elif shape.mlp == "gelu_tanh":
            cubed = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
            x = x + linear(0.5 * up * (1 + torch.tanh(cubed)), f"{layer}.mlp.down")
        else:
            x = x + linear(F.gelu(up), f"{layer}.mlp.down")
    logits = normed(x, "norm") @ w["embedding.weight" if shape.tied else "output.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_loss_and_gradients(shape):
    weights = {name: any_value(name, size).requires_grad_() for name, size in sizes_of(shape).items()}
    loss = plain_loss(shape, weights, *tokens(shape))
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def loss_and_gradients(shape, layout=None, num_stages=1, **options):
    """The loss and the whole gradients of the whole sequence, from this rank's tokens and shards."""
    alone = group_of_one()
    groups = init_groups(layout) if layout else None
    tp, cp = (groups.tp, groups.cp) if groups else (alone, alone)
    place = {"dtype": torch.float64, "device": local_device()}
    stages = [
        ParallelGPT(shape, tp, stage=i, num_stages=num_stages, cp_group=cp, **place, **options)
        for i in range(num_stages)
    ]
    sizes = sizes_of(shape)
    for stage in stages:
        placed = placements(stage)
        for name, parameter in stage.named_parameters():
            whole = any_value(name, sizes[name]).to(local_device())
            parameter.data.copy_(shard_like(whole, placed[name]))
    held = positions(shape.seq_length, cp.size(), cp.rank(), options.get("zigzag", True))
    x, targets = (each[:, held].to(local_device()) for each in tokens(shape))
    for stage in stages:
        x = stage(x)
    loss = stages[-1].loss(x, targets)
    loss.backward()
    gradients, loss = {}, loss.detach()
    for stage in stages:
        placed = placements(stage)
        for name, parameter in stage.named_parameters():
            gradient = unshard(parameter.grad, placed[name]).contiguous()
            gradients[name] = gradients.get(name, 0) + gradient
    for each in (loss, *gradients.values()) if cp.size() > 1 else ():  # the mean over ranks with as many tokens each
        dist.all_reduce(each, group=cp)
        each /= cp.size()
    if groups:
        groups.close()
    return loss.item(), {name: gradient.cpu() for name, gradient in gradients.items()}


def assert_same(got, expected, what):
    (loss, gradients), (expected_loss, expected_gradients) = got, expected
    assert loss == pytest.approx(expected_loss, rel=1e-10, abs=0), what
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient to compare"
        text = f"{name}, {what}: "
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-10, msg=lambda m, t=text: t + m)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "num_stages": 2}], ids=str)
def test_one_process(name, options):
    shape = SHAPES[name]
    assert_same(loss_and_gradients(shape, **options), plain_loss_and_gradients(shape), options)


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
                got = loss_and_gradients(shape, ParallelLayout(4, tp_size=t, cp_size=c), **options)
                assert_same(got, expected, (t, c, options))

    launch(each_way, world_size=4)


def test_the_number_of_parameters_is_that_of_the_shape():
    """But for the norm at the end, which the shape leaves out as its source does."""
    for shape in SHAPES.values():
        last_norm = shape.hidden_size * (2 if shape.norm == "layernorm" else 1)
        assert sum(size.numel() for size in sizes_of(shape).values()) == shape.num_parameters + last_norm


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
