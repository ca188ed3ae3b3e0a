"""The small GPT against one of plain torch: in shards, stages, parts of the sequence, the same gradients."""

import math
from dataclasses import replace
from hashlib import blake2b
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.communication import communication_log
from course.measure.saved import saved_for_backward
from labkit.data_parallel.replicas import materialize
from labkit.groups import group_of_one, init_groups, local_device
from labkit.layout import ParallelLayout
from labkit.placement import Placement, placements
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention, ShardedDropout
from labtrain.model import STD, ParallelGPT, normal
from tests.labtrain import parity
from tests.labtrain.parity import (
    any_values,
    assert_same,
    loss_and_gradients,
    loss_of,
    plain_loss_and_gradients,
)

SHAPE = GPT(  # 13: t divides no vocabulary
    num_layers=3, hidden_size=32, seq_length=16, vocab_size=13, num_attention_heads=8
)
OF_TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", num_query_groups=4, ffn_hidden_size=40)
TODAY = replace(SHAPE, **OF_TODAY, bias=False, tied=False)
SHAPES = {
    "GPT-2": SHAPE,
    "today": TODAY,
    "one key for all": replace(TODAY, num_query_groups=1),
    "Llama 3's numbers": replace(TODAY, norm_eps=1e-3, rotary_base=500_000.0),
    "GPT-2's GeLU": replace(SHAPE, mlp="gelu_tanh", norm_eps=0.1),
    "half today": replace(SHAPE, norm="rmsnorm", mlp="swiglu", num_query_groups=4),  # biases, learned positions, tied
}


def tokens():
    return parity.tokens(SHAPE)


def stages_of(group, shape=SHAPE, **options):
    return parity.stages_of(shape, group, **options)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"num_stages": 3}, {"recompute": "full", "num_stages": 2}, {"seq": 6}], ids=str
)
def test_one_process(name, options):
    """Stages one after another are the whole model, and a sequence may be shorter than the longest."""
    shape = SHAPES[name]
    expected = plain_loss_and_gradients(shape, options.get("seq"))
    assert_same(loss_and_gradients(shape, group_of_one(), **options), expected)


CUTS = [  # t, c, options: of sequence_parallel, recompute and num_stages any two meet in all four ways
    *(
        (4, 1, {"sequence_parallel": is_cut, "recompute": how, "num_stages": 1 + (is_cut != (how == "full"))})
        for is_cut, how in product([False, True], ["none", "full"])
    ),
    (2, 1, {"sequence_parallel": True, "seq": 6}),
    (2, 2, {"context_parallel": "ring", "sequence_parallel": True, "num_stages": 2}),
    (1, 4, {"context_parallel": "all_gather", "zigzag": False}),
    (2, 2, {"context_parallel": "ring", "zigzag": False}),
    (2, 2, {"context_parallel": "ulysses", "sequence_parallel": True}),
    (2, 2, {"context_parallel": "all_gather", "num_stages": 2}),
]


def test_shards_and_parts_of_the_sequence(on_ranks):
    """Every way to cut today's form; GPT-2's only where its positions, tied weight and biases are cut in ways of their
    own.
    """

    def each_way(shape, cuts):
        plain = {seq: plain_loss_and_gradients(shape, seq) for seq in (None, 6)}
        for t, c, options in cuts:
            with init_groups(ParallelLayout(4, tp_size=t, cp_size=c)) as groups:
                got = loss_and_gradients(shape, groups.tp, groups.cp, **options)
            assert_same(got, plain[options.get("seq")], (t, c, options))

    on_ranks(each_way, SHAPE, CUTS[:7], world_size=4)
    on_ranks(each_way, TODAY, CUTS, world_size=4)


# -- the weights it starts with -----------------------------------------------------------------------------------


def start_weights(**options):
    [model] = stages_of(group_of_one(), **options)
    return dict(model.named_parameters())


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"positions": "rope", "tied": False, "norm": "rmsnorm"}], ids=str)
def test_a_model_from_the_meta_device_starts_with_the_same_weights(on_ranks, options):
    shape = replace(SHAPE, **options)

    def built():
        group = dist.group.WORLD
        on_meta = stages_of(group, num_stages=2, shape=shape, device="meta", defer_grad_reduce=True)
        assert all(parameter.is_meta for stage in on_meta for parameter in stage.parameters())
        at_once = stages_of(group, num_stages=2, shape=shape, defer_grad_reduce=True)
        for late, early in zip(on_meta, at_once):
            materialize(late, local_device())
            for (name, one), (_, other) in zip(late.named_parameters(), early.named_parameters()):
                assert torch.equal(one, other), name
                assert placements(late)[name] == placements(early)[name] != Placement(), name

    on_ranks(built)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_precision_starts_with_the_same_weights(dtype):
    singles = start_weights(dtype=torch.float32)
    assert_equal(start_weights(dtype=dtype), {name: w.to(dtype) for name, w in singles.items()})


def test_weights_do_not_depend_on_torchs_default_dtype():
    expected = start_weights()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal(start_weights(), expected)
    finally:
        torch.set_default_dtype(before)


def test_weights_differ_by_seed_and_by_name():
    weights, others = start_weights(seed=0), start_weights(seed=1)
    matrices = {name: w for name, w in weights.items() if w.dim() == 2}
    assert len(matrices) == 2 + 4 * SHAPE.num_layers
    for name, weight in matrices.items():
        assert not torch.equal(weight, others[name])
        alike = [other for other, w in matrices.items() if w.shape == weight.shape and torch.equal(w, weight)]
        assert alike == [name]


def test_making_a_model_draws_nothing_from_torchs_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    stages_of(group_of_one())
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_have_the_spread_of_gpt_2():
    shape = GPT(num_layers=8, hidden_size=64, seq_length=32, vocab_size=50, num_attention_heads=4)
    for name, parameter in ParallelGPT(shape, group_of_one()).named_parameters():
        wanted = STD / 4 if "out.weight" in name or "down.weight" in name else STD  # 4: the root of 2 times 8 layers
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name
            assert parameter.mean().abs() < 4 * wanted / parameter.numel() ** 0.5


def test_a_new_model_knows_nothing():
    [model] = stages_of(group_of_one())
    assert loss_of([model], *tokens()).item() == pytest.approx(math.log(SHAPE.vocab_size), rel=0.02)


def test_the_number_of_parameters_is_that_of_the_shape():
    """But for the norm at the end, which the shape leaves out as its source does."""
    for shape in SHAPES.values():
        last_norm = shape.hidden_size * (2 if shape.norm == "layernorm" else 1)
        assert sum(value.numel() for value in any_values(shape).values()) == shape.num_parameters + last_norm


# -- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sequence_parallel", "kind"), [(False, nn.Dropout), (True, ShardedDropout)])
def test_dropout_of_hidden_states(on_ranks, sequence_parallel, kind):
    """One mask where all ranks have the same tokens, and a different one on each rank where each has its own."""

    def dropped():
        [model] = stages_of(dist.group.WORLD, dropout=0.5, sequence_parallel=sequence_parallel)
        return [name for name, module in model.named_modules() if type(module) is kind and module.p == 0.5]

    expected = ["dropout", *(f"layers.{i}.dropout" for i in range(SHAPE.num_layers))]
    for names in on_ranks(dropped):
        assert sorted(names) == expected


def test_dropout_of_attention_differs_over_ranks(on_ranks):
    """Each rank has different heads. All heads here are equal, so what differs is the mask."""

    def attended():
        torch.manual_seed(4)
        attention = ParallelSelfAttention(16, 4, dist.group.WORLD, dropout=0.5)
        nn.init.zeros_(attention.qkv.weight)
        nn.init.ones_(attention.qkv.bias)
        seen = []
        attention.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
        attention(torch.ones(1, 8, 16))
        attention.eval()(torch.ones(1, 8, 16))
        return seen

    ranks = on_ranks(attended)
    assert not torch.allclose(ranks[0][0], ranks[1][0])
    assert torch.allclose(ranks[0][1], torch.ones(1, 8, 8))  # without dropout every head passes on v = 1
    assert torch.allclose(ranks[0][1], ranks[1][1])


def test_evaluation_drops_nothing():
    [model], [without] = stages_of(group_of_one(), dropout=0.5, recompute="full"), stages_of(group_of_one())
    assert loss_of([model.eval()], *tokens()) == loss_of([without], *tokens())


# -- what it sends, what it keeps ---------------------------------------------------------------------------------


def test_a_step_sends_what_the_formula_says(on_ranks):
    """4 all-reduces a layer, 2 forward and 2 backward, of batch * seq * hidden numbers; one for the embedding."""

    def count():
        [model] = stages_of(dist.group.WORLD)
        with communication_log() as forward:
            logits = model(tokens()[0])
        with communication_log() as loss_log:
            loss = model.loss(logits, tokens()[1])
        with communication_log() as backward:
            loss.backward()
        return [[(r.operation, r.message_bytes) for r in log.records] for log in (forward, loss_log, backward)]

    activations = ("all_reduce", 8 * tokens()[0].numel() * SHAPE.hidden_size)
    forward, of_loss, backward = on_ranks(count)[0]
    assert forward == [activations] * (2 * SHAPE.num_layers + 1)
    assert backward == [activations] * (2 * SHAPE.num_layers + 1)
    assert of_loss == [("all_reduce", 8 * tokens()[0].numel()), ("all_reduce", 3 * 8 * tokens()[0].numel())]


def test_recomputation_keeps_only_the_inputs_of_layers():
    kept = []
    for recompute in ("full", "none"):
        [model] = stages_of(group_of_one(), recompute=recompute)
        with saved_for_backward(model.parameters()) as saved:
            loss_of([model], *tokens())
        kept.append(saved.total_bytes())
    hidden = 8 * tokens()[0].numel() * SHAPE.hidden_size
    around = 4 * hidden  # the final norm's input, output and statistics; the loss's softmax; none larger than hidden
    assert kept[0] <= SHAPE.num_layers * hidden + around < SHAPE.num_layers * 10 * hidden < kept[1]


@pytest.mark.parametrize("size", [3, 1 << 20, (1 << 20) + 15, (1 << 20) + 16, (2 << 20) + 5])
def test_weights_drawn_block_by_block_are_those_drawn_at_once(size):
    """torch draws 16 numbers at a time, and what is left at the end in a different way."""
    weight = torch.empty(size, dtype=torch.float64)
    normal("w", seed=0)(weight)
    generator = torch.Generator().manual_seed(int.from_bytes(blake2b(b"0 w", digest_size=7).digest(), "big"))
    assert torch.equal(weight, (torch.randn(size, generator=generator) * STD).double())
