"""Memory against published tables, against schedules, and against what models on real ranks hold and keep."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from course.sizing import RUNS, Plan, activation_bytes_per_layer, fullest, memory, stage_parameters
from course.sizing.shapes import AnyGPT, LatentAttention
from course.sizing.stage_memory import (
    activation_pieces,
    in_flight,
    kept_of,
    offloaded_bytes,
    stage_activation_bytes,
)
from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.parallel_config import SCHEDULES, V_SHAPED
from labkit.partition import split_layers
from labkit.schedules import BACKWARD, FORWARD, interleaved, one_f_one_b
from labkit.shape import GPT
from labkit.tensor_parallel.blocks import rotation
from labtrain.model import CONTEXT_PARALLEL, ParallelGPT, TransformerLayer

GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
SMALL = GPT(num_layers=12, hidden_size=16, seq_length=8, vocab_size=32, num_attention_heads=4)


# -- published ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "options", "gib"), [
    (1, {}, 2.672), (8, {}, 0.539), (8, {"sequence_parallel": True}, 0.334),
    (8, {"sequence_parallel": True, "recompute": "selective"}, 0.100), (8, {"recompute": "full"}, 0.047),
    (8, {"sequence_parallel": True, "recompute": "full"}, 0.006),
])  # fmt: skip
def test_activations_of_a_layer_of_gpt_3(t, options, gib):
    assert round(activation_bytes_per_layer(GPT_3, 1, t, **options) / 2**30, 3) == gib


def state_bytes_per_parameter(**options) -> float:
    held = memory(Plan(GPT_3, **options))
    return (held.total - held.activations) / GPT_3.num_parameters


def test_states_are_those_of_the_zero_paper():
    """Figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 GPUs."""
    table = [7.5 * state_bytes_per_parameter(world_size=64, batch_size=64, zero_stage=stage, gradient_bytes=2)
             for stage in range(4)]  # fmt: skip
    assert table == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


@pytest.mark.parametrize("d", [1, 4, 64])
def test_states_of_megatron_are_18_bytes_or_6_and_12_over_d(d):
    assert state_bytes_per_parameter(world_size=d, batch_size=d) == pytest.approx(18, rel=1e-4)
    assert state_bytes_per_parameter(world_size=d, batch_size=d, zero_stage=1) == pytest.approx(6 + 12 / d, rel=1e-4)


def test_all_stages_and_ranks_together_hold_the_model():
    """They hold the embedding twice where there are stages, and norms and row biases on each of t ranks."""
    t, p, v = 2, 4, 3
    plan = Plan(GPT_3, t * p, 4, t, p, 1, v)
    states = 18 * GPT_3.num_parameters
    held = sum(memory(plan, stage).total - memory(plan, stage).activations for stage in range(p))
    twice = 18 * GPT_3.vocab_size * GPT_3.hidden_size
    whole = 18 * (t - 1) * (96 * 6 * GPT_3.hidden_size + GPT_3.seq_length * GPT_3.hidden_size + 2 * GPT_3.hidden_size)
    final_norm = 18 * 2 * GPT_3.hidden_size  # which the paper's formula leaves out
    assert t * held == pytest.approx(states + twice + whole + final_norm, rel=1e-9)


def test_what_saves_memory():
    base = Plan(GPT_3, 1024, 1536, 8, 16, recompute="none")
    bytes_of = {
        name: fullest(replace(base, **changes)).total
        for name, changes in {
            "base": {}, "selective": {"recompute": "selective"}, "full": {"recompute": "full"},
            "sequence": {"sequence_parallel": True}, "zero": {"zero_stage": 1}, "interleaved": {"num_chunks": 2},
        }.items()
    }  # fmt: skip
    assert bytes_of["full"] < bytes_of["selective"] < bytes_of["base"] < bytes_of["interleaved"]
    assert bytes_of["sequence"] < bytes_of["base"] > bytes_of["zero"]


# -- schedules ------------------------------------------------------------------------------------------------------


IN_FLIGHT = [(p, v, rounds * p) for p in (2, 4, 8) for v in (1, 2, 3) for rounds in (1, 2, 5)]


@pytest.mark.parametrize(("p", "v", "m"), [*IN_FLIGHT, *((4, 1, m) for m in (1, 2, 3, 5))])
def test_micro_batches_in_flight_are_those_of_the_schedule(p, v, m):
    schedule = interleaved(p, m, v) if v > 1 else one_f_one_b(p, m)
    plan = Plan(replace(GPT_3, num_layers=p * v), p, m, pp_size=p, num_chunks=v)
    assert [in_flight(plan, stage) for stage in range(p)] == [schedule.peak_in_flight(rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "v"), [(8, 1), (8, 2), (4, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_masks_of_the_embedding_are_those_of_the_micro_batches_under_way(p, v, rounds):
    m = rounds * p
    plan = Plan(replace(GPT_3, num_layers=p * v), p, m, pp_size=p, num_chunks=v)
    held = most = 0
    for op in interleaved(p, m, v).ranks[0]:
        held += {FORWARD: 1, BACKWARD: -1}[op.kind] if op.chunk == 0 else 0
        most = max(most, held)
    layers = in_flight(plan, 0) * activation_bytes_per_layer(plan.model, 1, recompute="full")
    one_whole = activation_bytes_per_layer(plan.model, 1)
    masks = stage_activation_bytes(plan, 0) - layers - one_whole
    assert masks == pytest.approx(most * GPT_3.seq_length * GPT_3.hidden_size)


# -- newer forms ----------------------------------------------------------------------------------------------------


def test_context_ranks_divide_the_tokens_and_all_their_states():
    long = replace(GPT_3, seq_length=32768)
    whole = Plan(long, 64, 64, 8, recompute="none", fused_attention=True)
    four = replace(whole, cp_size=4)
    assert stage_activation_bytes(four, 0) == pytest.approx(stage_activation_bytes(whole, 0) / 4)
    assert memory(four).weights == memory(whole).weights
    zero = memory(replace(four, zero_stage=1)).optimizer  # d c = 8
    assert (
        zero
        == pytest.approx(memory(four).optimizer / 8)
        == pytest.approx(memory(replace(whole, zero_stage=1)).optimizer)
    )


def test_fused_attention_keeps_a_number_for_each_row_of_scores():
    none, selective = (activation_bytes_per_layer(GPT_3, 1, 8, recompute=how) for how in ("none", "selective"))
    fused = activation_bytes_per_layer(GPT_3, 1, 8, fused_attention=True)
    s, a = GPT_3.seq_length, 96
    assert (none - selective, fused - selective) == (5 * a * s * s / 8, 4 * a * s / 8)


# -- what is computed again, and what goes to the CPU ---------------------------------------------------------------


def test_deepseek_s_activations_are_near_those_that_were_measured():
    """131.0 GB on 256 GB200; without the results of MLA's up-projection 30.4 less, of norms 8.2. Source: arXiv
    2603.07685, tables 3 and 4. A module's own work area, one layer's, is there in any case."""
    run = next(run for run in RUNS if run.name == "D48")
    kept = {}
    for modules in (None, ("mla_up_proj",), ("layernorm",)):
        plan = replace(run.plan, recompute="selective" if modules else "none", recompute_modules=modules)
        kept[modules] = max(stage_activation_bytes(plan, stage) for stage in range(plan.pp_size)) / 1e9
    assert kept[None] == pytest.approx(131.0, rel=0.05)
    assert kept[None] - kept["mla_up_proj",] == pytest.approx(30.4, rel=0.2)
    assert kept[None] - kept["layernorm",] == pytest.approx(8.2, rel=0.1)


TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
EXPERTS = GPT(4, 32, 16, 64, 4, num_experts=4, num_shared_experts=1, moe_ffn_hidden_size=24, **TODAY)
LATENT = AnyGPT(4, 32, 16, 64, 4, latent=LatentAttention(12, 10, 6, 4, 6), ffn_hidden_size=40, **TODAY)
SAVED = [  # by hand, in bytes a token: on 1 tensor rank, fused, in 16 bits
    (EXPERTS, True, ["layernorm"], 2 * 2 * 32),
    (EXPERTS, True, ["moe_act"], 2 * 2 * 24),
    (EXPERTS, True, ["shared_experts"], 2 * 3 * 24),
    (EXPERTS, True, ["moe"], 2 * 3 * 24 + 2 * 32 + 2 * 4 * 4 + 2 * (2 * 32 + 2 * 3 * 24)),
    (EXPERTS, True, ["moe", "moe_act"], 2 * 3 * 24 + 2 * 32 + 2 * 4 * 4 + 2 * (2 * 32 + 2 * 3 * 24)),
    (LATENT, False, ["mlp"], 2 * 3 * 40),
    (LATENT, False, ["mla_up_proj"], 2 * 4 * (10 + 10 + 6)),
    (LATENT, False, ["mlp", "mla_up_proj"], 2 * 3 * 40 + 2 * 4 * (10 + 10 + 6)),
]


@pytest.mark.parametrize(("model", "has_experts", "modules", "saved"), SAVED)
def test_a_module_that_is_computed_again_keeps_nothing(model, has_experts, modules, saved):
    ways = dict(fused_attention=True, fused_mlp=True, fused_experts=True, expert_tp_size=1 if has_experts else None)
    pieces = activation_pieces(model, 1, **ways)
    assert sum(pieces.values()) - kept_of(pieces, modules) == 16 * saved
    plan = Plan(model, 1, 8, recompute="none", fused_attention=True, fused_mlp=True, fused_experts=True)
    again = replace(plan, recompute="selective", recompute_modules=modules)
    work_area = 16 * saved  # of one layer, while backward goes through it
    assert stage_activation_bytes(plan, 0) - stage_activation_bytes(again, 0) == 4 * 16 * saved - work_area


def test_layers_on_the_cpu_keep_nothing_but_two_on_their_way():
    plan = Plan(replace(GPT_3, seq_length=4096), 8, 8, recompute="none", fused_attention=True)
    layer = activation_bytes_per_layer(plan.model, 1, fused_attention=True)
    saved = stage_activation_bytes(plan, 0) - stage_activation_bytes(replace(plan, offload_layers=30), 0)
    assert saved == pytest.approx(28 * layer)
    assert offloaded_bytes(replace(plan, offload_layers=30)) == 30 * layer


def test_smaller_moments_and_no_masks_by_hand():
    plan = Plan(GPT_3, 8, 8, recompute="none", fused_attention=True, dropout=False)
    held = memory(Plan(GPT_3, 8, 8, recompute="none", fused_attention=True))
    assert held.optimizer / memory(replace(plan, optimizer_bytes=8)).optimizer == 12 / 8
    tokens, masks = GPT_3.seq_length, 2 * GPT_3.num_layers + 1  # and one after the embedding
    assert held.activations - memory(plan).activations == masks * tokens * GPT_3.hidden_size


# -- models ---------------------------------------------------------------------------------------------------------


def parameters_of(shape, group, stage, num_stages):
    model = ParallelGPT(shape, group, stage=stage, num_stages=num_stages)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("p", "v"), [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (3, 2), (2, 3)])
def test_parameters_of_a_ranks_chunks_are_those_of_the_model(p, v):
    plan = Plan(SMALL, p, 2 * p, pp_size=p, num_chunks=v)
    chunks = [parameters_of(SMALL, group_of_one(), number, p * v) for number in range(p * v)]
    assert [sum(chunks[rank::p]) for rank in range(p)] == [stage_parameters(plan, rank) for rank in range(p)]


def test_stages_may_have_different_numbers_of_layers():
    """The first and the last stage of Llama's 126 layers have one less."""
    six = replace(SMALL, num_layers=6)
    split = split_layers(6, 4, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert split == (1, 2, 2, 1)
    plan = Plan(six, 4, 8, pp_size=4, stage_layers=split)
    models = [ParallelGPT(six, group_of_one(), stage=stage, num_stages=4, stage_layers=split) for stage in range(4)]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert [stage_parameters(plan, stage) for stage in range(4)] == sizes
    whole, less = Plan(replace(six, num_layers=8), 4, 8, pp_size=4, recompute="none"), replace(plan, recompute="none")
    layer = activation_bytes_per_layer(six, 1)
    saved = [stage_activation_bytes(whole, stage) - stage_activation_bytes(less, stage) for stage in range(4)]
    assert saved == pytest.approx([4 * layer, 0, 0, layer])
    assert fullest(less).total == max(memory(less, stage).total for stage in range(4))
    assert fullest(replace(less, stage_layers=(1, 3, 1, 1))) == memory(replace(less, stage_layers=(1, 3, 1, 1)), 1)
    chunks = replace(plan, pp_size=2, world_size=2, num_chunks=2)
    assert [chunks.layers_of_rank(rank) for rank in range(2)] == [3, 3]
    assert [stage_parameters(chunks, rank) for rank in range(2)] == [sizes[0] + sizes[2], sizes[1] + sizes[3]]


def on_one_tensor_rank():
    """The parameters of each stage by the number of stages, and what models of 1 and 3 layers keep for backward."""
    stages = {p: [parameters_of(SMALL, dist.group.WORLD, stage, p) for stage in range(p)] for p in (1, 3)}
    return stages, {divided: saved_numbers(3, divided) - saved_numbers(1, divided) for divided in (False, True)}


def saved_by(forward):
    """The tensors that autograd keeps for backward, by their place in memory."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x):
        forward()
    return saved


def saved_numbers(num_layers, sequence_parallel, batch_size=2):
    """What a model that recomputes its layers keeps for backward, weights left out."""
    shape = replace(SMALL, num_layers=num_layers)
    model = ParallelGPT(shape, dist.group.WORLD, recompute="full", sequence_parallel=sequence_parallel)
    saved = saved_by(partial(model, torch.zeros(batch_size, shape.seq_length, dtype=torch.long)))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(kept.numel() for place, kept in saved.items() if place not in weights)


@pytest.mark.parametrize("t", [2, 4])
def test_real_tensor_ranks_hold_and_keep_what_the_formulas_say(t):
    for parameters, kept_by_two_layers in launch(on_one_tensor_rank, world_size=t):
        for p, counted in parameters.items():
            plan = Plan(SMALL, t * p, 4, t, p)
            assert counted == [stage_parameters(plan, stage) for stage in range(p)]
        for divided, numbers in kept_by_two_layers.items():
            formula = activation_bytes_per_layer(SMALL, 2, t, sequence_parallel=divided, recompute="full")
            assert 2 * numbers == 2 * formula  # 2 bytes per number, 2 layers


LAYERS = {
    "GPT-2": GPT(num_layers=6, hidden_size=32, seq_length=16, vocab_size=22, num_attention_heads=8),
    "today": GPT(6, 32, 16, 22, 8, num_query_groups=4, ffn_hidden_size=40, **TODAY),
}
WAYS = [dict(), dict(sequence_parallel=True), *({"context_parallel": way} for way in CONTEXT_PARALLEL)]


def kept_by_layers(shape):
    """What the layer of a tensor or context rank keeps for backward in each way; weights and angles left out."""
    world, kept_numbers = dist.group.WORLD, []
    for way in WAYS:
        attend, c = None, 1
        if name := way.get("context_parallel"):
            attend, c = partial(CONTEXT_PARALLEL[name], group=world), world.size()
        divided = way.get("sequence_parallel", False)
        group = world if c == 1 else group_of_one()
        layer = TransformerLayer(shape, group, "layer", 0, 0.0, attend=attend, sequence_parallel=divided)
        x = torch.randn(
            2, shape.seq_length // c // (world.size() if divided else 1), shape.hidden_size
        ).requires_grad_()
        turn = rotation(torch.arange(shape.seq_length // c), shape.hidden_size // shape.num_attention_heads, x.dtype)
        saved = saved_by(partial(layer, x, turn if shape.positions == "rope" else None))
        weights = {tensor.data_ptr() for tensor in (*layer.parameters(), *turn)}
        kept_numbers.append(sum(x.numel() for place, x in saved.items() if x.dim() > 1 and place not in weights))
    return kept_numbers


@pytest.mark.parametrize("form", LAYERS)
def test_real_layers_keep_what_the_formula_says_and_what_it_leaves_out(form):
    """Not in the formula: a norm's statistics, RMSNorm's result before its weight, which torch keeps on a CPU, and the
    output of attention in a second layout, where it does not leave the attention as the next layer wants it."""
    shape, size = LAYERS[form], 2
    h, a = shape.hidden_size, shape.num_attention_heads
    expected = []
    for way in WAYS:
        c = size if "context_parallel" in way else 1
        t, divided = size // c, way.get("sequence_parallel", False)
        tokens = 2 * shape.seq_length / c
        of_tokens = tokens / (t if divided else 1)
        formula = (
            activation_bytes_per_layer(shape, 2, t, sequence_parallel=divided, cp_size=c, fused_attention=True)
            - 2 * of_tokens * h
        )  # two masks of a dropout that is not there
        log_sum_exp = tokens * a / t
        numbers = (formula - 4 * log_sum_exp) / 2 + log_sum_exp
        numbers += of_tokens * (2 + 2 * h if form == "today" else 4)
        numbers += tokens * h / t if c > 1 or form == "today" else 0
        expected.append(numbers)
    assert launch(kept_by_layers, shape, world_size=size) == [expected] * size


def parameters_of_stages(shapes):
    world = dist.group.WORLD
    return [[parameters_of(shape, world, stage, p) for p in (1, 3) for stage in range(p)] for shape in shapes]


def test_parameters_of_newer_forms_are_those_of_the_model():
    changes = [{}, {"tied": True}, {"bias": True}, {"positions": "learned"}, {"norm": "layernorm"}]
    shapes, t = [replace(LAYERS["today"], **each) for each in changes], 2
    expected = [
        [stage_parameters(Plan(shape, t * p, t * p, t, p), stage) for p in (1, 3) for stage in range(p)]
        for shape in shapes
    ]
    assert launch(parameters_of_stages, shapes, world_size=t) == [expected] * t


# -- a V ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", V_SHAPED)
def test_a_rank_of_a_v_holds_two_stages_and_what_its_schedule_keeps(name):
    six, split = replace(SMALL, tied=False, num_layers=6), (1, 2, 2, 1)
    plan = Plan(six, 2, 8, pp_size=2, num_chunks=2, stage_layers=split, schedule=name, recompute="none")
    models = [ParallelGPT(six, group_of_one(), stage=stage, num_stages=4, stage_layers=split) for stage in range(4)]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert [stage_parameters(plan, rank) for rank in (0, 1)] == [sizes[0] + sizes[3], sizes[1] + sizes[2]]
    tied = replace(plan, model=replace(six, tied=True))  # both ends are on rank 0, which has the embedding once
    assert stage_parameters(plan, 0) - stage_parameters(tied, 0) == six.vocab_size * six.hidden_size
    schedule = SCHEDULES[name](2, 8, 2)
    assert [in_flight(plan, rank) for rank in (0, 1)] == [schedule.peak_in_flight(rank) for rank in (0, 1)]
    logits = 4 * six.vocab_size * six.seq_length  # float32, only where the last stage is
    assert plan.loss_rank == 0 and stage_activation_bytes(plan, 0) > logits
