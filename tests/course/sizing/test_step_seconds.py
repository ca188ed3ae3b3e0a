"""The parts of a step: what they count, what makes them larger, and numbers of a GPT-3 run."""

import math
from dataclasses import replace

import pytest
import torch

from course.sizing import (
    DGX_A100,
    DGX_H100,
    FITTED,
    Hidden,
    Plan,
    attention_messages,
    flops_per_step,
    fullest,
    sharding,
    simulate,
    stage_parameters,
    step_time,
    table_1,
    training_days,
)  # fmt: skip
from course.sizing.fully_sharded import collectives
from course.sizing.layer_seconds import (
    HEADS,
    LOSS,
    SCORES,
    attention_rate,
    context_seconds,
    core_seconds,
    layer_seconds,
    link_rate,
    logits_seconds,
)
from course.sizing.shapes import AnyGPT, LatentAttention, attention_layers
from course.sizing.stage_memory import offloaded_bytes
from course.sizing.step_seconds import ADAM, gradients_seconds, update_seconds
from labkit.groups import group_of_one
from labkit.parallel_config import SCHEDULES, V_SHAPED
from labkit.shape import GPT
from labkit.tensor_parallel.blocks import apply_rotary, rotation
from labtrain.model import TransformerLayer

GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
TODAY |= dict(num_query_groups=2, ffn_hidden_size=24)


# -- bytes beside the matrix products -------------------------------------------------------------------------------


class Kernels:
    """Runs functions as one kernel each, and adds up the bytes of the tensors that go in and come out."""

    num_bytes = 0

    def __call__(self, function, *tensors):
        results = function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        self.num_bytes += sum(tensor.nbytes for tensor in (*tensors, *results))
        return results[0]


def layer_of_kernels(layer, x, turn, run):
    """labkit's transformer layer as matrix products with kernels between them; its dropouts drop nothing."""

    def scale_and_mask(scores):
        return (scores / math.sqrt(q.size(-1))).masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)

    def dropout(y, mask_bytes=torch.bool):
        return y.clone(), torch.ones_like(y, dtype=mask_bytes)

    def dropout_and_residual(y, residual):
        return y + residual, torch.ones_like(y, dtype=torch.bool)

    parts = layer.attention._heads(layer.attention.qkv(run(layer.attention_norm, x))[0])
    q, k, v = (run(torch.Tensor.contiguous, part) for part in parts)
    if turn is not None:
        q, k = (run(lambda part: apply_rotary(part, turn), part) for part in (q, k))
    k, v = (part.repeat_interleave(q.size(1) // part.size(1), 1) for part in (k, v))
    scores = run(scale_and_mask, q @ k.transpose(-1, -2))
    weights = run(dropout, run(lambda each: each.softmax(-1), scores))
    attended = layer.attention.out((weights @ v).transpose(1, 2).flatten(-2))[0]
    x = run(dropout_and_residual, attended, x)
    inner = layer.mlp.up(run(layer.mlp_norm, x))[0]
    if layer.mlp.gated:
        gate, inner = inner.chunk(2, -1)
        inner = run(torch.mul, run(torch.nn.functional.silu, gate), inner)
    else:
        inner = run(torch.nn.functional.gelu, inner)
    return run(dropout_and_residual, layer.mlp.down(inner)[0], x)


@pytest.mark.parametrize("form", [{}, TODAY], ids=["GPT-2", "today"])
def test_bytes_of_a_layer_are_those_of_its_kernels(form):
    b, s, h, a = 2, 8, 16, 4
    shape = GPT(num_layers=1, hidden_size=h, seq_length=s, vocab_size=11, num_attention_heads=a, **form)
    layer = TransformerLayer(shape, group_of_one(), "layer", seed=0, dropout=0.0, sequence_parallel=False)
    x, turn = torch.randn(b, s, h, dtype=torch.float64), None
    if shape.positions == "rope":
        turn = rotation(torch.arange(s), h // a, x.dtype)
    with torch.no_grad():
        torch.testing.assert_close(layer_of_kernels(layer.double(), x, turn, Kernels()), layer(x, turn))
        kernels = Kernels()
        layer_of_kernels(layer.bfloat16(), x.bfloat16(), turn, kernels)
    plan = Plan(shape, 1, b, micro_batch_size=b, recompute="none")
    moved = layer_seconds(plan, DGX_A100)["memory_bound"] * DGX_A100.memory_rate / 3  # forward is one of 3 passes
    assert kernels.num_bytes == pytest.approx(moved)
    fused = layer_seconds(replace(plan, fused_attention=True), DGX_A100)["memory_bound"] * DGX_A100.memory_rate / 3
    laid_out = b * s * (h + 2 * shape.kv_size) * HEADS
    assert moved - fused == pytest.approx(a * s * s * b * SCORES + laid_out)


def test_bytes_of_the_loss_are_those_of_its_kernels():
    logits = torch.randn(3, 5000).bfloat16().requires_grad_()
    run = Kernels()
    exact = run(torch.Tensor.float, logits.detach())
    largest = run(lambda each: each.amax(-1, keepdim=True), exact)
    total = run(lambda each, most: (each.sub_(most).exp_().sum(-1, keepdim=True), each), exact, largest)
    gradient = run(lambda each, total: each.div_(total).bfloat16(), exact, total)  # but for one number in each row
    logits.float().logsumexp(-1).sum().backward()
    torch.testing.assert_close(gradient, logits.grad)
    assert run.num_bytes / logits.numel() == pytest.approx(LOSS, rel=1e-3)


def test_bytes_of_adam_are_those_of_its_states():
    sixteen, thirty_two = 2, 4
    read = thirty_two * len(["gradient", "weight", "first moment", "second moment"])
    written = thirty_two * len(["gradient of 0", "weight", "first moment", "second moment"]) + sixteen
    assert read + written == ADAM


# -- what makes a step longer ---------------------------------------------------------------------------------------


def flops_by_tp_size(batch_size, gpus_per_node):
    """Of the 162-billion model on 64 GPUs (arXiv 2104.04473, section 5.4.1), in nodes of a size."""
    model, hardware = GPT(32, 20480, 2048, 51200, 128), replace(DGX_A100, gpus_per_node=gpus_per_node)
    plans = {t: Plan(model, 64, batch_size, t, 64 // t) for t in (2, 4, 8, 16, 32)}
    return {t: step_time(plan, hardware).flops_per_gpu for t, plan in plans.items()}


@pytest.mark.parametrize("batch_size", [32, 128])
def test_tensor_parallelism_as_wide_as_a_node_is_best(batch_size):
    flops = flops_by_tp_size(batch_size, 8)
    assert max(flops, key=lambda t: flops[t]) == 8
    assert flops[2] < 0.9 * flops[8]
    assert flops[32] < 0.75 * flops[8]


def test_in_smaller_nodes_narrower_tensor_parallelism_is_best():
    flops = flops_by_tp_size(128, 4)
    assert max(flops, key=lambda t: flops[t]) == 4
    assert flops[8] < 0.9 * flops[4]


@pytest.mark.parametrize("batch_size", [32, 128])
def test_wider_tensor_parallelism_loses_even_inside_a_node_and_more_outside(batch_size):
    """Passes and messages double with t wherever the ranks are; what leaves the node is also 1.5 times slower."""
    nodes, one_node = flops_by_tp_size(batch_size, 8), flops_by_tp_size(batch_size, 64)
    for t in (16, 32):
        assert nodes[t] / nodes[8] < 0.95 * one_node[t] / one_node[8] < 0.95
    plan = Plan(GPT_3, 64, 64, 16)
    assert link_rate(plan, replace(DGX_A100, gpus_per_node=64), "tp") / link_rate(plan, DGX_A100, "tp") == 1.5


def test_parts_add_up_and_utilisations_count_what_they_say():
    estimate = step_time(table_1()[6].plan, DGX_A100)
    assert sum(estimate.parts.values()) == pytest.approx(estimate.total)
    assert next(iter(estimate.parts)) == "products"
    assert estimate.hardware_flops_utilisation == pytest.approx(estimate.flops_per_gpu / 312e12)
    assert estimate.model_flops_utilisation < estimate.hardware_flops_utilisation
    plan, tokens = estimate.plan, 300e9
    days = training_days(tokens, plan.model.num_parameters, plan.world_size, estimate.flops_per_gpu)
    assert estimate.days(tokens) == pytest.approx(days, rel=0.03)


def test_the_bubble_shrinks_with_more_micro_batches_and_with_chunks():
    plan = Plan(GPT_3, 64, 64, 8, 8)
    few, many = step_time(plan, DGX_A100), step_time(replace(plan, batch_size=640), DGX_A100)
    assert few.bubble == pytest.approx(many.bubble)
    assert few.bubble / few.total > 5 * many.bubble / many.total
    assert step_time(replace(plan, num_chunks=4), DGX_A100).bubble == pytest.approx(few.bubble / 4)


def test_which_groups_stay_inside_a_node():
    inside, network = 300e9 * 0.8, 25e9 * 0.8
    plan = Plan(GPT_3, 96, 96, 4, 2)  # d = 12
    assert link_rate(plan, DGX_A100, "tp") == inside
    assert link_rate(plan, DGX_A100, "dp") == 2 * network  # two replicas in each node, with a card each
    assert link_rate(plan, DGX_A100, "pp") == network
    assert link_rate(Plan(GPT_3, 96, 96, 6), DGX_A100, "tp") == min(inside, 6 * network)  # 6 do not tile a node of 8
    assert link_rate(Plan(GPT_3, 8, 8, 2, 4), DGX_A100, "pp") == inside


def test_sequence_parallelism_sends_more_in_a_layer_and_less_between_stages():
    """Each layer gathers two inputs again, half an all-reduce each; nothing is gathered after a pipeline message."""
    plan = Plan(GPT_3, 64, 64, 8, 8, recompute="selective")
    plain, divided = (step_time(replace(plan, sequence_parallel=way), DGX_A100) for way in (False, True))
    assert divided.tensor_parallel == pytest.approx(5 / 4 * plain.tensor_parallel)
    size = 2 * GPT_3.seq_length * GPT_3.hidden_size  # bytes of a micro-batch of one sequence
    messages = 2 * (64 + 7)  # m and the bubble's, there and back
    assert divided.pipeline_messages == pytest.approx(messages * size / 8 / (25e9 * 0.8))
    gathered = messages * 7 / 8 * size / (300e9 * 0.8)
    assert plain.pipeline_messages - divided.pipeline_messages == pytest.approx(gathered)


def test_selective_recomputation_moves_the_scores_once_more():
    """Everything that the core of the attention does is done again: its products, and its softmax and dropout."""
    plan = Plan(GPT_3, 8, 8, 8, recompute="none")
    none, selective = (layer_seconds(replace(plan, recompute=how), DGX_A100) for how in ("none", "selective"))
    s, h, a = GPT_3.seq_length, GPT_3.hidden_size, 96
    products, scores = 4 * s * s * h / 8, 13 * a * s * s / 8
    assert selective["products"] - none["products"] == pytest.approx(products / DGX_A100.product_rate)
    assert selective["memory_bound"] - none["memory_bound"] == pytest.approx(scores / DGX_A100.memory_rate)
    assert selective["overhead"] == none["overhead"]


# -- context parallelism and fused attention ------------------------------------------------------------------------

LONG = Plan(replace(GPT_3, seq_length=32768), 64, 64, 8, recompute="none", fused_attention=True)


def test_fused_attention_computes_the_causal_half_and_its_scores_again():
    """At the rate that its kernels reach in blocks of this length."""
    s, h = GPT_3.seq_length, GPT_3.hidden_size
    rate = 312e12 * DGX_A100.attention_efficiency * s / (s + 300)
    for how, passes in (("none", 3), ("full", 4)):
        plan = Plan(GPT_3, 8, 8, 8, recompute=how)
        plain, fused = (layer_seconds(replace(plan, fused_attention=way), DGX_A100) for way in (False, True))
        whole, half = passes * 4 * s * s * h / 8, (passes + 0.5) * 2 * s * s * h / 8
        assert plain["products"] - fused["products"] == pytest.approx(whole / DGX_A100.product_rate - half / rate)
        assert (plain["memory_bound"] - fused["memory_bound"]) * DGX_A100.memory_rate == pytest.approx(
            passes * (13 * 96 * s * s + HEADS * 3 * s * h) / 8
        )


def test_attention_is_slower_in_short_blocks_and_small_heads():
    """As in the figures of arXiv 2407.08608: half of its rate at 300 tokens, two thirds with heads of 64."""
    model = AnyGPT(2, 1024, 2**20, 1000, 8, head_size=128)
    plan = Plan(model, 8, 8, fused_attention=True)
    one = core_seconds(plan, DGX_H100)
    assert one == pytest.approx(4 * 2**40 / 2 * 1024 / (DGX_H100.peak_flops * DGX_H100.attention_efficiency), rel=1e-3)
    short = core_seconds(replace(plan, model=replace(model, seq_length=300)), DGX_H100)
    assert short / one == pytest.approx(2 * (300 / 2**20) ** 2, rel=1e-3)
    small = core_seconds(replace(plan, model=replace(model, head_size=64)), DGX_H100)  # half of the FLOPs
    assert small / one == pytest.approx(0.5 / (2 / 3))
    ring = core_seconds(replace(plan, cp_size=8), DGX_H100)
    assert ring * 8 / one == pytest.approx((2**17 + 300) / 2**17, rel=1e-3)


def test_a_window_leaves_the_keys_that_are_in_it():
    model = AnyGPT(4, 1024, 4096, 1000, 8, window=128, full_attention_freq=2)
    plan = Plan(model, 1, 1, fused_attention=True, recompute="none")
    pairs = [sum(min(query + 1, most) for query in range(4096)) for most in (4096, 128)]
    assert [each.keys for each in attention_layers(model)] == [pytest.approx(each / 4096, rel=5e-3) for each in pairs]
    flops = flops_per_step(model, 1, "none", causal=True), flops_per_step(replace(model, window=4096), 1, "none", True)
    assert flops[1] - flops[0] == pytest.approx(3 * 4 * 1024 * 2 * (pairs[0] - pairs[1]), rel=1e-2)
    whole = replace(plan, model=replace(model, window=None, full_attention_freq=None))
    assert core_seconds(plan, DGX_H100) < 0.7 * core_seconds(whole, DGX_H100)


def test_query_groups_and_a_gated_mlp_take_the_flops_of_their_matrices():
    model = replace(GPT_3, num_query_groups=8, ffn_hidden_size=28672, mlp="swiglu")
    fewer = 2 * GPT_3.hidden_size * (GPT_3.hidden_size - model.kv_size)
    more = GPT_3.hidden_size * (3 * 28672 - 8 * GPT_3.hidden_size)
    seconds = [layer_seconds(Plan(each, 8, 8, 8), DGX_A100)["products"] for each in (GPT_3, model)]
    changed = (seconds[1] - seconds[0]) * DGX_A100.product_rate
    assert changed == pytest.approx(4 * 2 * GPT_3.seq_length * (more - fewer) / 8)


def test_context_ranks_divide_the_work_and_share_the_gradients():
    whole, four = LONG, replace(LONG, cp_size=4)
    one, other = (layer_seconds(plan, DGX_A100) for plan in (whole, four))
    for part in ("memory_bound", "tensor_parallel"):
        assert other[part] == pytest.approx(one[part] / 4)
    assert 1 < other["products"] / (one["products"] / 4) < 1.02  # shorter blocks of attention are slower
    assert other["overhead"] == one["overhead"]
    assert (one["context_parallel"], whole.dp_size, four.dp_size) == (0.0, 8, 2)
    assert gradients_seconds(four, DGX_A100) == gradients_seconds(whole, DGX_A100)  # d c = 8 in both
    zero = [update_seconds(replace(plan, zero_stage=1), DGX_A100, 1.0)[1] for plan in (whole, four)]
    assert zero[0] == zero[1]
    assert step_time(four, DGX_A100).context_parallel == pytest.approx(32 * 96 * other["context_parallel"])


def seconds_of_a_ring(num_ranks, block, backward_block, kv, gradients):
    """The same ring as labkit's, event by event: messages take the link one after the other while a rank computes."""
    now = link = 0.0

    def post(seconds):
        nonlocal link
        link = max(now, link) + seconds
        return link

    for step in range(num_ranks):
        arrives = post(kv) if step < num_ranks - 1 else 0.0
        now = max(now + block, arrives)
    gradients_arrive = 0.0
    for step in range(num_ranks):
        arrives = post(kv) if step < num_ranks - 1 else 0.0
        now = max(now + backward_block, gradients_arrive)
        gradients_arrive = post(gradients)
        now = max(now, arrives)
    return max(now, gradients_arrive)


@pytest.mark.parametrize("c", [2, 4, 8])
@pytest.mark.parametrize("gigabytes_per_second", [1, 10, 20, 30, 50, 100, 200, 1000])
def test_what_a_ring_leaves_to_wait_for_is_what_its_events_take(c, gigabytes_per_second):
    plan = replace(LONG, model=replace(LONG.model, seq_length=8192), cp_size=c)
    hardware = replace(DGX_A100, network_bytes_per_second=gigabytes_per_second * 1e9, network_efficiency=1.0)
    block = core_seconds(plan, hardware) / c
    assert block == pytest.approx(2 * (8192 / c) ** 2 * 12288 / 8 / (312e12 * 0.6 * 8192 / (8192 + 300 * c)))
    kv = 2 * (8192 / c) * 12288 / 8 * 2 / (gigabytes_per_second * 1e9)
    if gigabytes_per_second > 240:  # a node's own links would be slower
        kv = 2 * (8192 / c) * 12288 / 8 * 2 / 240e9
    total = seconds_of_a_ring(c, block, 2.5 * block, kv, 2 * kv)
    assert context_seconds(plan, hardware) == pytest.approx(total - 3.5 * c * block)


def test_collectives_of_attention_are_waited_for_and_repeated():
    for way in ("ulysses", "all_gather"):
        plan = replace(LONG, cp_size=4, context_parallel=way)
        sent = attention_messages(plan.model, way, 4, tp_size=8)
        forward, backward = (sum(each.sent_bytes for each in some) / link_rate(plan, DGX_A100, "cp") for some in sent)
        assert context_seconds(plan, DGX_A100) == pytest.approx(forward + backward)
        assert context_seconds(replace(plan, recompute="full"), DGX_A100) == pytest.approx(2 * forward + backward)


def test_where_context_groups_lie():
    inside, network = 300e9 * 0.8, 25e9 * 0.8
    narrow = replace(LONG, tp_size=2, cp_size=4, pp_size=2)
    assert link_rate(narrow, DGX_A100, "cp") == inside
    assert link_rate(narrow, DGX_A100, "dp") == 4 * network  # 4 of the 16 ranks with the same weights in each node
    wide = replace(LONG, tp_size=4, cp_size=4)
    assert link_rate(wide, DGX_A100, "cp") == network
    assert link_rate(replace(wide, context_parallel="all_gather"), DGX_A100, "cp") == 2 * network
    assert wide.layout.groups("cp")[0] == [0, 4, 8, 12]


@pytest.mark.parametrize("zero_stage", range(4))
def test_each_zero_stage_sends_what_fully_sharded_counts(zero_stage):
    plan = replace(LONG, zero_stage=zero_stage, gradient_bytes=2, cp_size=2)
    messages = [each for way in collectives(plan) for each in way]
    seconds = sum(each.times * each.seconds(plan, DGX_A100) for each in messages) * stage_parameters(plan, 0)
    assert gradients_seconds(plan, DGX_A100) == pytest.approx(seconds)


# -- messages that hide, fp8, stages that differ, a V ----------------------------------------------------------------


def test_a_share_of_each_axis_s_messages_hides():
    chunks = dict(pp_size=2, num_chunks=2, tp_size=4, cp_size=2, context_parallel="all_gather", batch_size=32)
    plan = replace(LONG, **chunks, sequence_parallel=True)
    hidden = replace(DGX_A100, hidden=Hidden(0.5, 0.25, 0, 0.75, 0.4))
    before, after = step_time(plan, DGX_A100), step_time(plan, hidden)
    assert after.tensor_parallel == before.tensor_parallel / 2
    assert after.context_parallel == before.context_parallel * 0.75
    assert after.pipeline_messages == pytest.approx(before.pipeline_messages / 4)
    assert after.data_parallel == pytest.approx(before.data_parallel * 0.6)
    assert (after.products, after.optimizer) == (before.products, before.optimizer)
    alone = replace(plan, num_chunks=1)  # no other chunk to compute while a message travels
    assert step_time(alone, hidden).pipeline_messages == step_time(alone, DGX_A100).pipeline_messages


def test_gradients_hide_only_behind_the_work_that_is_there():
    """Behind one micro-batch, however many there are; with ZeRO-3, layer by layer (`course.sizing.sharding`)."""
    plan, slow = Plan(GPT_3, 8, 512, 1, 4), replace(DGX_A100, network_bytes_per_second=1e6, node_bytes_per_second=1e6)
    everything = replace(slow, hidden=Hidden(data=1.0))
    layers = 24 * sum(layer_seconds(plan, slow).values())
    assert step_time(plan, slow).data_parallel == gradients_seconds(plan, slow)
    waits = step_time(plan, slow).data_parallel - step_time(plan, everything).data_parallel
    assert waits == pytest.approx(layers)
    for stage in (2, 3):
        alone = replace(plan, pp_size=1, zero_stage=stage)
        assert step_time(alone, slow).data_parallel == sharding(alone, slow).waiting_seconds
    hidden_behind = 256 * layers  # in the pipeline, too
    third = replace(plan, zero_stage=3)
    assert step_time(third, slow).data_parallel == pytest.approx(
        gradients_seconds(third, slow) - hidden_behind, rel=0.01
    )


def test_fp8_speeds_up_linear_layers_and_nothing_else():
    hardware = replace(DGX_H100, fp8_peak_flops=2 * DGX_H100.peak_flops)
    fp8 = replace(LONG, precision="fp8")
    slow, fast = (layer_seconds(plan, hardware) for plan in (LONG, fp8))
    linear = 3 * 2 * LONG.model.seq_length * LONG.model.num_matrix_parameters / 8 / hardware.product_rate
    assert slow["products"] - fast["products"] == pytest.approx(linear / 2)
    assert fast["tensor_parallel"] == pytest.approx(
        0.75 * slow["tensor_parallel"]
    )  # what is gathered has 1 byte a number
    assert {**slow, "products": 0, "tensor_parallel": 0} == {**fast, "products": 0, "tensor_parallel": 0}
    assert step_time(fp8, hardware).total < step_time(LONG, hardware).total


def test_nothing_of_a_tensor_parallel_message_hides_beyond_the_node():
    model = replace(GPT_3, seq_length=8192)
    hidden = replace(DGX_H100, hidden=Hidden(tensor=0.9))
    inside, beyond = Plan(model, 64, 64, 8, recompute="none"), Plan(model, 64, 64, 16, recompute="none")
    for plan, share in ((inside, 0.1), (beyond, 1.0)):
        before, after = (layer_seconds(plan, hardware)["tensor_parallel"] for hardware in (DGX_H100, hidden))
        assert after == pytest.approx(share * before)
    in_a_rack = replace(FITTED["GB200"], hidden=Hidden(tensor=0.9))
    assert layer_seconds(beyond, in_a_rack)["tensor_parallel"] < layer_seconds(beyond, hidden)["tensor_parallel"] / 10


def test_some_layers_computed_again_lie_between_none_and_all():
    plan = Plan(GPT_3, 64, 64, 8, 8, recompute="full", fused_attention=True)
    none, some, full = replace(plan, recompute="none"), replace(plan, recompute_layers=3), plan
    for of in (lambda each: step_time(each, DGX_H100).total, lambda each: fullest(each).activations):
        assert of(some) == pytest.approx(of(none) + 3 / 12 * (of(full) - of(none)), rel=0.02)
    assert step_time(replace(plan, recompute_layers=12), DGX_H100).total == step_time(full, DGX_H100).total
    with pytest.raises(ValueError, match="recompute_layers=3 is for whole layers, not recompute='none'"):
        replace(none, recompute_layers=3)


def test_a_step_says_its_peak_and_whether_it_fits():
    plan = Plan(GPT_3, 64, 64, 8, 8, recompute="full", fused_attention=True, precision="fp8")
    step, small = step_time(plan, FITTED["H100"]), step_time(replace(plan, tp_size=1), FITTED["H100"])
    assert (step.fits, small.fits) == (True, False)
    assert "of the fp8 peak, 1979 teraFLOP/s; needs 5" in str(step) and "DOES NOT FIT: needs" in str(small)
    assert "nothing was fitted to DGX H200" in str(step_time(plan, FITTED["H200"])) and "fitted" not in str(step)
    slow = replace(step, plan=replace(plan, precision="bf16"))
    assert slow.model_flops_utilisation / step.model_flops_utilisation == pytest.approx(1979 / 989)


def test_the_rank_that_takes_longest_sets_the_pace():
    even = Plan(GPT_3, 64, 64, 8, 8)
    same = replace(even, stage_layers=[12] * 8)
    assert step_time(same, DGX_A100).total == step_time(even, DGX_A100).total
    fuller = replace(even, stage_layers=[12, 12, 12, 14, 12, 12, 12, 10])  # two layers take longer than the logits
    logits = logits_seconds(even, DGX_A100)["products"]
    layer = layer_seconds(even, DGX_A100)["products"]
    assert step_time(fuller, DGX_A100).products == pytest.approx(8 * 8 * 14 * layer)
    lighter = replace(even, stage_layers=[13, 12, 12, 12, 12, 12, 12, 11])
    assert step_time(lighter, DGX_A100).products == pytest.approx(64 * max(13 * layer, 11 * layer + logits))


def test_padding_makes_the_vocabulary_larger():
    plan = Plan(replace(GPT_3, vocab_size=50257), 8, 8, 4, pad_vocab_to=128)
    assert (plan.vocab_size, replace(plan, pad_vocab_to=None).vocab_size) == (50688, 50257)
    whole = replace(plan, model=replace(GPT_3, vocab_size=50688), pad_vocab_to=None)
    assert step_time(plan, DGX_A100).total == step_time(whole, DGX_A100).total
    assert fullest(plan) == fullest(whole)


@pytest.mark.parametrize("name", V_SHAPED)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 19), (5, 12)])
def test_a_v_s_idle_time_is_that_of_its_schedule(name, p, m):
    model = replace(GPT_3, num_layers=4 * p)
    plan = Plan(model, p, m, pp_size=p, num_chunks=2, schedule=name, recompute="none")
    timeline = simulate(SCHEDULES[name](p, m, 2), 2.0, 4.0)  # units: one for each of F, B and W of each of the 2 chunks
    assert timeline.makespan_seconds - 6 * m == pytest.approx(6 * plan.bubble_slots)
    layers = 4 * sum(layer_seconds(plan, DGX_A100).values())
    assert step_time(plan, DGX_A100).bubble == pytest.approx(plan.bubble_slots * layers)
    assert plan.bubble_over_ideal == pytest.approx((timeline.makespan_seconds - 6 * m) / (6 * m))


# -- modules that are computed again, and activations on the CPU ----------------------------------------------------


LATENT = AnyGPT(4, 64, 32, 64, 4, latent=LatentAttention(12, 10, 6, 4, 6), num_experts=4, num_shared_experts=1,
                num_dense_layers=2, moe_ffn_hidden_size=24, **{**TODAY, "num_query_groups": None})  # fmt: skip
ALL_MODULES = ("layernorm", "mla_up_proj", "mlp", "moe")


def test_modules_compute_their_products_again():
    """By hand: 2 FLOPs for each weight and token, of the layers that have the module; a rank has 1/t of them."""
    plan = Plan(LATENT, 4, 8, 2, recompute="none", fused_attention=True, ep_size=2, expert_tp_size=1)
    expert, tokens = 3 * 64 * 24, 32
    weights = {
        "mla_up_proj": [4 * (12 * 10 + 10 * (6 + 6))] * 2, "mlp": [3 * 64 * 24, 0], "shared_experts": [0, expert],
        "moe": [0, (2 + 1) * expert + 64 * 4], "moe_act": [0, 0], "layernorm": [0, 0],
    }  # fmt: skip
    for module, of_kinds in weights.items():
        again = replace(plan, recompute="selective", recompute_modules=[module])
        for has_experts, number in enumerate(of_kinds):
            ways = [layer_seconds(each, DGX_H100, bool(has_experts)) for each in (again, plan)]
            more = {part: ways[0][part] - ways[1][part] for part in ways[0]}
            assert more["products"] * DGX_H100.product_rate == pytest.approx(2 * tokens * number / 2, abs=1e-3)
            does_anything = number > 0 or module == "layernorm" or (module == "moe_act" and has_experts)
            assert (more["memory_bound"] > 0) == does_anything
            assert (more["expert_parallel"] > 0) == (module == "moe" and has_experts == 1)
        flops = [flops_per_step(LATENT, 8, "selective", modules=each) for each in ((module,), ())]
        assert flops[0] - flops[1] == 2 * 8 * tokens * (2 * of_kinds[0] + 2 * of_kinds[1])


@pytest.mark.parametrize("has_experts", [False, True])
def test_modules_send_their_messages_again_and_take_less_than_whole_layers(has_experts):
    hardware = replace(FITTED["H100"], hidden=Hidden())
    plan = Plan(LATENT, 4, 8, 2, recompute="none", fused_attention=True, ep_size=2, expert_tp_size=1)
    some = replace(plan, recompute="selective", recompute_modules=ALL_MODULES)
    ways = plan, some, replace(plan, recompute="full")
    none, part, full = (layer_seconds(each, hardware, has_experts) for each in ways)
    assert none["tensor_parallel"] < part["tensor_parallel"] < full["tensor_parallel"]
    assert all(none[name] <= part[name] <= full[name] for name in none)
    parts_of_it = replace(some, recompute_modules=(*ALL_MODULES, "moe_act", "shared_experts"))
    assert layer_seconds(parts_of_it, hardware, has_experts) == part


def test_activations_travel_to_the_cpu_while_layers_compute():
    plan = Plan(GPT_3, 8, 8, recompute="none", fused_attention=True, offload_layers=90)
    free = replace(plan, offload_layers=0)
    slow, fast = (replace(DGX_A100, host_bytes_per_second=rate) for rate in (1e9, 1e15))
    assert step_time(plan, fast) == replace(step_time(free, fast), plan=plan)
    travel = offloaded_bytes(plan) / (1e9 * DGX_A100.node_efficiency)
    computing = 96 * sum(layer_seconds(free, slow).values())
    waits = step_time(plan, slow).memory_bound - step_time(free, slow).memory_bound
    assert waits == pytest.approx(2 * travel - computing)


def test_smaller_moments_move_fewer_bytes():
    plan = Plan(GPT_3, 8, 8)
    seconds = [step_time(replace(plan, optimizer_bytes=size), DGX_A100).optimizer for size in (12, 8, 4)]
    assert seconds == pytest.approx([seconds[0] * bytes_moved / ADAM for bytes_moved in (34, 26, 18)])


# -- published rates of kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "teraflops"), [(2048, 265), (4096, 294), (8192, 308), (16384, 328)])
def test_flash_attention_2_reaches_its_published_rate_on_an_h100(tokens, teraflops):
    """Forward and backward, causal, heads of 128. Source: README of github.com/Dao-AILab/flash-attention at 0251105a,
    assets/flash2_h100_fwd_bwd_benchmark.png."""
    plan = Plan(GPT(1, 2048, tokens, 64, 16), 1, 1, recompute="none", fused_attention=True)
    rate = attention_rate(plan, FITTED["H100 FlashAttention-2"], tokens)
    assert rate / 1e12 == pytest.approx(teraflops, rel=0.08)


# -- numbers of a run of GPT-3 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "gpus_per_node", "days", "gigabytes"), [
    ({}, 8, 35, 56), ({"pp_size": 4}, 8, 36, 105), ({"pp_size": 2, "zero_stage": 1}, 8, 36, 73),
    ({"micro_batch_size": 4}, 8, 38, 73), ({"recompute": "selective"}, 8, 27, 82),
    ({"recompute": "selective", "sequence_parallel": True}, 8, 27, 61),
    ({"tp_size": 16}, 8, 46, 31), ({"tp_size": 16}, 16, 43, 31),
])  # fmt: skip
def test_numbers_of_gpt_3(changes, gpus_per_node, days, gigabytes):
    plan = replace(Plan(GPT_3, 1024, 1536, 8, 8), **changes)
    estimate = step_time(plan, replace(DGX_A100, gpus_per_node=gpus_per_node))
    assert (round(estimate.days(300e9)), round(fullest(plan).total / 1e9)) == (days, gigabytes)


def test_why_a_wide_plan_is_slow():
    best = Plan(GPT_3, 512, 1536, 4, 16, recompute="selective", zero_stage=1)
    wide = replace(best, tp_size=16, pp_size=4, recompute="full")
    estimates = [step_time(plan, DGX_A100) for plan in (best, wide, replace(wide, recompute="selective"))]
    estimates.append(step_time(wide, replace(DGX_A100, gpus_per_node=16)))
    assert [round(estimate.total) for estimate in estimates] == [43, 80, 60, 75]
    assert [round(estimate.overhead) for estimate in estimates[:2]] == [3, 15]
