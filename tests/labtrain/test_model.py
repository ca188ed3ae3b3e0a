"""The small GPT against one of plain torch: on any number of ranks, the same loss and the same gradients."""

import math
from dataclasses import replace
from hashlib import blake2b
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.communication import communication_log
from labkit.data_parallel.replicas import materialize
from labkit.groups import group_of_one, local_device
from labkit.placement import Placement, placements
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention, ShardedDropout, unshard
from labtrain.model import STD, ParallelGPT, normal
from tests.labtrain import parity
from tests.labtrain.parity import (
    assert_same,
    give_values,
    loss_and_gradients,
    loss_of,
    plain_loss_and_gradients,
    unsharded_gradients,
)

SHAPE = GPT(
    num_layers=3, hidden_size=16, seq_length=8, vocab_size=13, num_attention_heads=4
)  # 13: t divides no vocabulary


def tokens():
    return parity.tokens(SHAPE)


def stages_of(group, shape=SHAPE, **options):
    return parity.stages_of(shape, group, **options)


ARRANGEMENTS = [  # any two of the options meet in all four ways
    {"sequence_parallel": divided, "recompute": recompute, "num_stages": 1 + (divided != (recompute == "full"))}
    for divided, recompute in product([False, True], ["none", "full"])
]


def test_loss_and_every_gradient(on_ranks):
    """With and without sequence parallelism and recomputation, in one stage and in two."""

    def each_way():
        return [loss_and_gradients(SHAPE, dist.group.WORLD, **options) for options in ARRANGEMENTS]

    expected = plain_loss_and_gradients(SHAPE)
    for rank in on_ranks(each_way, world_size=4):
        for options, got in zip(ARRANGEMENTS, rank, strict=True):
            try:
                assert_same(got, expected)
            except AssertionError as error:
                raise AssertionError(f"{options}: {error}") from None


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_without_a_world(num_stages):
    """Stages one after another are the whole model, in one process that launches nothing."""
    assert_same(loss_and_gradients(SHAPE, group_of_one(), num_stages=num_stages), plain_loss_and_gradients(SHAPE))


def test_a_sequence_shorter_than_the_longest(on_ranks):
    def short():
        return loss_and_gradients(SHAPE, dist.group.WORLD, seq=6, sequence_parallel=True)

    expected = plain_loss_and_gradients(SHAPE, seq=6)
    assert_same(loss_and_gradients(SHAPE, group_of_one(), seq=6), expected)
    for got in on_ranks(short):
        assert_same(got, expected)


def losses_of_steps(group, num_steps=4, **options):
    stages = stages_of(group, **options)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(stages, *tokens())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    unused_rows = group.size() * stages[0].embedding.weight.size(0) - SHAPE.vocab_size
    if group.rank() == group.size() - 1 and unused_rows:
        assert not stages[0].embedding.weight[-unused_rows:].any(), "words that do not exist have learned"
    return losses


def test_training_is_the_same_training(on_ranks):
    def train():
        return [losses_of_steps(dist.group.WORLD, sequence_parallel=flag) for flag in (False, True)]

    alone = losses_of_steps(group_of_one())
    assert alone[-1] < alone[0] - 0.1
    for with_and_without in on_ranks(train):
        for losses in with_and_without:
            assert losses == pytest.approx(alone, rel=1e-10)


# -- the weights it starts with -----------------------------------------------------------------------------------


def start_weights(group, **options):
    """Of all stages together, whole, by name."""
    weights = {}
    for stage in stages_of(group, **options):
        placed = placements(stage)
        weights |= {name: unshard(p, placed[name]).cpu() for name, p in stage.named_parameters()}
    return weights


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_every_layout_starts_with_the_same_weights(on_ranks):
    def gathered():
        return [start_weights(dist.group.WORLD, num_stages=num_stages) for num_stages in (1, 3)]

    alone = start_weights(group_of_one())
    assert_equal(start_weights(group_of_one(), num_stages=2), alone)
    for in_one, in_three in on_ranks(gathered, world_size=4):
        assert_equal(in_one, alone)
        assert_equal(in_three, alone)


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
    singles = start_weights(group_of_one(), dtype=torch.float32)
    assert_equal(start_weights(group_of_one(), dtype=dtype), {name: w.to(dtype) for name, w in singles.items()})


def test_weights_do_not_depend_on_torchs_default_dtype():
    expected = start_weights(group_of_one())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal(start_weights(group_of_one()), expected)
    finally:
        torch.set_default_dtype(before)


def test_weights_differ_by_seed_and_by_name():
    weights, others = start_weights(group_of_one(), seed=0), start_weights(group_of_one(), seed=1)
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


def test_the_number_of_parameters_is_that_of_the_shape(on_ranks):
    """The shape leaves the final norm out, as the paper does."""
    expected = SHAPE.num_parameters + 2 * SHAPE.hidden_size
    assert sum(weight.numel() for weight in start_weights(group_of_one()).values()) == expected

    def count():
        return sum(w.numel() for w in start_weights(dist.group.WORLD).values())

    assert on_ranks(count, world_size=4) == [expected] * 4


def test_the_embedding_is_tied():
    [model] = stages_of(group_of_one())
    loss_of([model], torch.zeros_like(tokens()[0]), tokens()[1]).backward()
    assert model.embedding.weight.grad[1:].any(1).all(), "words that are only predicted have no gradient"


# -- dropout ------------------------------------------------------------------------------------------------------


def dropout_masks(sequence_parallel):
    """What this rank drops of the hidden states, by module, and a number that torch's generator draws afterwards."""
    torch.manual_seed(3)
    [model] = stages_of(dist.group.WORLD, dropout=0.5, sequence_parallel=sequence_parallel)
    masks = {}

    def note(name):
        return lambda module, inputs, output: masks.setdefault(name, []).append(output.eq(0).cpu())

    for name, module in model.named_modules():
        if isinstance(module, (nn.Dropout, ShardedDropout)):
            module.register_forward_hook(note(name))
    loss_of([model], *tokens())
    return masks, torch.rand(4)


def all_masks(named):
    return [mask for masks in named.values() for mask in masks]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_of_hidden_states(on_ranks, sequence_parallel):
    """One mask where all ranks have the same tokens, and a different one on each rank where each has its own."""
    (masks, drawn), (other_masks, other_drawn) = on_ranks(dropout_masks, sequence_parallel)
    assert sorted(masks) == ["dropout", *(f"layers.{i}.dropout" for i in range(SHAPE.num_layers))]
    assert [len(each) for each in masks.values()] == [1] + [2] * SHAPE.num_layers
    for mask, other in zip(all_masks(masks), all_masks(other_masks), strict=True):
        assert 0.3 < mask.float().mean() < 0.7
        assert torch.equal(mask, other) != sequence_parallel
    of_one_rank = all_masks(masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(of_one_rank) for b in of_one_rank[:i])
    assert torch.equal(drawn, other_drawn), "the ranks' generators no longer agree"


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


def gradients_with_dropout(group, seed, recompute, sequence_parallel):
    stages = stages_of(group, dropout=0.3, recompute=recompute, sequence_parallel=sequence_parallel)
    give_values(stages, SHAPE)
    torch.manual_seed(seed)
    loss = loss_of(stages, *tokens())
    loss.backward()
    return loss.item(), unsharded_gradients(stages)


def test_recomputation_replays_dropout(on_ranks):
    def both_ways(group):
        for sequence_parallel in (False, True):
            kept, again = (gradients_with_dropout(group, 7, how, sequence_parallel) for how in ("none", "full"))
            assert_same(again, kept)
            other_seed, _ = gradients_with_dropout(group, 8, "full", sequence_parallel)
            assert other_seed != kept[0]

    both_ways(group_of_one())
    on_ranks(lambda: both_ways(dist.group.WORLD))


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


def saved_bytes(recompute):
    [model] = stages_of(group_of_one(), recompute=recompute)
    saved = {}

    def note(tensor):
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of([model], *tokens())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(tensor.nbytes for place, tensor in saved.items() if place not in own)


def test_recomputation_keeps_only_the_inputs_of_layers():
    hidden = 8 * tokens()[0].numel() * SHAPE.hidden_size
    around = 4 * hidden  # the final norm's input, output and statistics; the loss's softmax; none larger than hidden
    assert saved_bytes(recompute="full") <= SHAPE.num_layers * hidden + around
    assert saved_bytes(recompute="none") > SHAPE.num_layers * 10 * hidden


# -- what does not fit --------------------------------------------------------------------------------------------


def altered(**sizes):
    return GPT(**{**vars(SHAPE), **sizes})


MISTAKES = {
    "has no num_attention_heads: give a number that divides hidden_size": lambda group: ParallelGPT(
        altered(num_attention_heads=None), group
    ),
    "stages of [0, 1, 1, 1] layers, but num_stages=4 must have 1 layer or more each, and num_layers=3": (
        lambda group: ParallelGPT(SHAPE, group, num_stages=4)
    ),
    "num_stages=0 must be at least 1": lambda group: ParallelGPT(SHAPE, group, num_stages=0),
    "stage=2 is not one of num_stages=2: use 0 to 1": lambda group: ParallelGPT(SHAPE, group, stage=2, num_stages=2),
    "stage=-1 is not one of num_stages=2": lambda group: ParallelGPT(SHAPE, group, stage=-1, num_stages=2),
    "tp_size=2 does not divide seq_length=7: use tp_size 1 or 7, or seq_length 6 or 8": (
        lambda group: ParallelGPT(altered(seq_length=7), group, sequence_parallel=True)
    ),
    "tp_size=2 does not divide num_attention_heads=1": lambda group: ParallelGPT(altered(num_attention_heads=1), group),
    "num_attention_heads=6 does not divide hidden_size=16": lambda group: ParallelGPT(
        altered(num_attention_heads=6), group
    ),
    "9 tokens are more than seq_length=8: give fewer": lambda group: ParallelGPT(SHAPE, group)(
        torch.zeros(1, 9, dtype=torch.long)
    ),
    "ids contains 13, outside the vocabulary": lambda group: ParallelGPT(SHAPE, group)(torch.tensor([[13]])),
    "dropout=1.0 must be in [0, 1)": lambda group: ParallelGPT(SHAPE, group, dropout=1.0),
    "dropout=-0.1 must be in [0, 1)": lambda group: ParallelGPT(SHAPE, group, dropout=-0.1, sequence_parallel=True),
}


def test_what_does_not_fit_is_refused(on_ranks):
    def refuse():
        for message, mistake in MISTAKES.items():
            with pytest.raises(ValueError) as error:
                mistake(dist.group.WORLD)
            assert message in str(error.value)

    on_ranks(refuse)


@pytest.mark.parametrize("size", [3, 1 << 20, (1 << 20) + 15, (1 << 20) + 16, (2 << 20) + 5])
def test_weights_drawn_block_by_block_are_those_drawn_at_once(size):
    """torch draws 16 numbers at a time, and what is left at the end in a different way."""
    weight = torch.empty(size, dtype=torch.float64)
    normal("w", seed=0)(weight)
    generator = torch.Generator().manual_seed(int.from_bytes(blake2b(b"0 w", digest_size=7).digest(), "big"))
    assert torch.equal(weight, (torch.randn(size, generator=generator) * STD).double())
