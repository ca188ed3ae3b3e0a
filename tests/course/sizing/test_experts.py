"""Sizing of models with experts: published shapes, numbers by hand, and what real ranks hold, keep and send."""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from course.communication import communication_log
from course.sizing import DGX_H100, FITTED, Plan, Traffic, flops_per_step, memory, plan_traffic, step_time, step_traffic
from course.sizing.experts import kept_bytes_per_token, nodes_of_a_token
from course.sizing.fully_sharded import sharded_memory, sharding
from course.sizing.layer_seconds import expert_seconds, layer_seconds
from course.sizing.shapes import DEEPSEEK_V3, LEFT_OUT, MIXTRAL_8X22B, QWEN3_30B_A3B, AnyGPT, count_parameters
from course.sizing.stage_memory import activation_bytes_per_layer, expert_parameters, stage_kinds, stage_parameters
from labkit.expert_parallel import MoELayer
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import TrainConfig, training

SMALL = GPT(4, 16, 8, 32, 4, num_experts=8, top_k=2, moe_ffn_hidden_size=24)
OF_A_STEP = dict(gpus_per_node=8, batch_size=8, bytes_per_element=4)


# -- published shapes -----------------------------------------------------------------------------------------------


def test_parameters_of_published_models_are_those_of_their_files():
    """The sums that Hugging Face shows: of Mixtral 8x22B v0.1 and of Qwen3-30B-A3B, and DeepSeek-V3's 671 billion."""
    assert count_parameters(replace(MIXTRAL_8X22B, vocab_size=32000)).total == 140_620_634_112
    assert count_parameters(QWEN3_30B_A3B).total == 30_532_122_624
    assert count_parameters(DEEPSEEK_V3).total == 671_026_419_200 - 58 * 256  # the routers' biases
    assert "256 numbers in 58 layers" in LEFT_OUT["DeepSeek-V3"] and DEEPSEEK_V3.num_moe_layers == 58
    active = [count_parameters(model).active / 1e9 for model in (MIXTRAL_8X22B, QWEN3_30B_A3B, DEEPSEEK_V3)]
    assert active == pytest.approx([39.2, 3.35, 37.6], abs=0.05)


def test_flops_of_a_token_are_those_of_the_folding_paper():
    assert MIXTRAL_8X22B.flops_per_token / 1e9 == pytest.approx(250.7, abs=0.05)  # table 4's rows in facts
    assert flops_per_step(MIXTRAL_8X22B, 1, "none") == 4096 * MIXTRAL_8X22B.flops_per_token


def test_heads_of_a_size_of_their_own():
    usual, free = GPT(2, 64, 16, 100, 4, 2), AnyGPT(2, 64, 16, 100, 4, 2, head_size=32)
    assert free.query_size == 128 and free.kv_size == 64
    assert replace(free, head_size=16).num_parameters == replace(free, head_size=None).num_parameters
    assert replace(free, head_size=None).num_parameters == usual.num_parameters
    # q and output grow by 64 * 64 each, k and v by 64 * 32 each; biases of q by 64, of k and v by 32 each
    assert free.num_parameters - usual.num_parameters == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32)
    # 2 FLOPs for each of the new weights, 4 s for each number of a query more; forward once, backward twice
    assert free.flops_per_token - usual.flops_per_token == 3 * 2 * (2 * (2 * 64 * 64 + 2 * 64 * 32) + 4 * 16 * 64)
    kept = [activation_bytes_per_layer(model, 1, 2, fused_attention=True) for model in (free, usual)]
    assert kept[0] - kept[1] == 16 * 2 * (2 * 64 + 2 * 32) / 2


def test_heads_need_not_divide_the_hidden_size():
    """GPT-OSS-120B has h 2880 and 64 heads of 64 numbers: h/a would be 45."""
    model = AnyGPT(36, 2880, 4096, 201088, 64, 8, 2880, head_size=64, positions="rope", mlp="swiglu", bias=False)
    assert (model.hidden_size, model.query_size, model.kv_size) == (2880, 4096, 512)
    assert AnyGPT(2, 100, 16, 100, 6, head_size=32).query_size == 192
    with pytest.raises(ValueError, match="a head has 45"):
        replace(model, head_size=None)


def test_latent_attention_keeps_its_latents_too():
    ways = dict(fused_attention=True, expert_tp_size=1)
    plain = replace(DEEPSEEK_V3, latent=None, head_size=160)
    kept = [activation_bytes_per_layer(model, 1, **ways) for model in (DEEPSEEK_V3, plain)]
    assert kept[0] - kept[1] == 4096 * (1536 + 512) * 2 * 2
    # as many numbers in q, k, v and the output as 192 + 192 + 128 + 128 for each of 128 heads
    assert 2 * plain.query_size + 2 * plain.kv_size == 128 * (192 + 192 + 128 + 128)
    plan = Plan(DEEPSEEK_V3, 64, 64, ep_size=64, recompute="none", fused_attention=True)
    assert step_time(plan, DGX_H100).expert_parallel > 0


# -- by hand --------------------------------------------------------------------------------------------------------


PLAN = Plan(SMALL, 16, 16, tp_size=2, pp_size=2, ep_size=4, expert_tp_size=1)


def test_experts_of_a_gpu_and_their_states_by_hand():
    """2 layers of a stage have 8/4 experts each, with 2 * 16 * 24 weights; 16/(4 * 2) = 2 GPUs have the same."""
    experts = 2 * 2 * 2 * 16 * 24
    assert expert_parameters(PLAN, 0) == experts and PLAN.expert_dp_size == 2 and PLAN.dp_cp_size == 4
    dense = stage_parameters(PLAN, 0) - experts
    held = [memory(replace(PLAN, zero_stage=stage)) for stage in range(4)]
    shard = dense / 4 + experts / 2
    assert [each.optimizer for each in held] == [12 * (dense + experts), *[12 * shard] * 3]
    assert [each.gradients for each in held] == [*[4 * (dense + experts)] * 2, *[4 * shard] * 2]
    assert [each.weights for each in held] == [*[2 * (dense + experts)] * 3, 2 * shard]
    assert expert_parameters(replace(PLAN, expert_tp_size=2), 0) == experts / 2


def test_layers_with_experts_are_counted_stage_by_stage():
    plan = Plan(replace(SMALL, num_layers=8, moe_layer_freq=3), 4, 8, pp_size=4)  # layers 0, 3 and 6
    assert [plan.num_moe_layers(stage) for stage in range(4)] == [1, 1, 0, 1]
    assert [replace(plan, pp_size=2, num_chunks=2).num_moe_layers(stage) for stage in range(2)] == [1, 2]
    assert expert_parameters(plan, 2) == 0 < expert_parameters(plan, 3)


def test_traffic_by_hand():
    """16 ranks, each with 16/4 sequences of 8/2 tokens for a tensor rank: 16 tokens, of 16 numbers, 2 bytes each."""
    traffic = step_traffic(SMALL, PLAN.layout, gpus_per_node=2, batch_size=16)
    own = 16 * 16 * 2
    # 2 layers of a stage, 2 choices, there and back, forward and backward; 3/4 of it leaves the rank, 2/4 its node
    assert traffic["ep"] == Traffic(16 * 2 * 2 * 4 * own * 3 / 4, 16 * 2 * 2 * 4 * own * 2 / 4)
    assert traffic["expert_tp"] == Traffic(0, 0)
    assert traffic["expert_dp"].total_bytes == 16 * expert_parameters(PLAN, 0) * 4  # 2 (n-1)/n = 1
    dense = SMALL.num_parameters - 4 * 8 * 2 * 16 * 24
    assert traffic["dp"].total_bytes == 16 * dense / 4 * 4 * 2 * 3 / 4
    again = step_traffic(SMALL, PLAN.layout, gpus_per_node=2, batch_size=16, recompute="full")["ep"]
    assert again.total_bytes == 1.5 * traffic["ep"].total_bytes


def test_an_expert_divided_by_two_gets_every_row_twice():
    whole, divided = (plan_traffic(replace(PLAN, ep_size=4 // etp, expert_tp_size=etp), 8) for etp in (1, 2))
    rows = whole["ep"].total_bytes / (3 / 4)
    assert divided["ep"].total_bytes == rows / 2 and divided["expert_tp"].total_bytes == rows


def test_with_sequence_parallelism_experts_need_none_of_an_mlp_s_messages():
    both = [plan_traffic(replace(PLAN, sequence_parallel=way, recompute="none"), 8)["tp"].total_bytes for way in (0, 1)]
    assert both[1] == both[0] * 5 / 8  # 4 all-reduces, or half of 5
    shared = replace(SMALL, num_shared_experts=1)
    shared = [plan_traffic(replace(PLAN, model=shared, sequence_parallel=way, recompute="none"), 8) for way in (0, 1)]
    assert [each["tp"].total_bytes / both[0] for each in shared] == [6 / 4, 5 / 4]


SHARDED = Plan(replace(SMALL, moe_layer_freq=2), 8, 16, ep_size=4, zero_stage=3, recompute="none")


def test_fully_sharded_experts_have_fewer_ranks_to_be_divided_over():
    """2 of 4 layers have 8/4 experts each; 8 ranks divide all else, 2 the experts, or half as many a copy of them."""
    dense, experts = stage_kinds(SHARDED, 0)
    assert experts == 2 * 2 * 2 * 16 * 24
    for shard_size, over in ((None, (8, 2)), (8, (8, 2)), (4, (4, 1))):
        assert sharded_memory(SHARDED, shard_size).optimizer == 12 * (dense / over[0] + experts / over[1])


def test_messages_of_experts_by_hand_and_what_hides_them():
    slow = replace(DGX_H100, node_bytes_per_second=1e6)
    (dense, experts), found = stage_kinds(SHARDED, 0), sharding(SHARDED, slow)
    root = 8 * 16 + 32 * 16 + 2 * 16  # positions, the tied embedding, the last norm: gathered once, not twice
    sent = 7 / 8 * ((2 + 2 + 4) * dense - 2 * root) + 1 / 2 * (2 + 2 + 4) * experts
    assert found.sent_bytes == 2 * sent  # two micro-batches
    assert found.message_seconds == pytest.approx(2 * sent / (1e6 * slow.node_efficiency))
    parts = [layer_seconds(SHARDED, slow, SHARDED.model.has_experts(number)) for number in range(4)]
    computing = [sum(each.values()) - each["expert_parallel"] for each in parts]
    assert parts[0]["expert_parallel"] > 0 and computing[0] != computing[1] and not found.hides
    assert found.waiting_seconds == pytest.approx(found.message_seconds - 2 * sum(computing), rel=1e-12)


# -- step time ------------------------------------------------------------------------------------------------------


KNOWN = dict(sequence_parallel=True, zero_stage=1, fused_attention=True, recompute="none", gradient_bytes=2)
FOLDED = Plan(MIXTRAL_8X22B, 128, 1024, 2, 8, ep_size=8, expert_tp_size=1, **KNOWN)


def test_experts_across_nodes_wait_for_the_network():
    inside, across = (expert_seconds(replace(FOLDED, ep_size=8, expert_tp_size=1, tp_size=t), DGX_H100) for t in (2, 4))
    assert across == inside / 2  # half as many tokens each: what matters is the expert grid
    small_nodes = replace(DGX_H100, gpus_per_node=4)
    sent = 2 * 2 * 2 * 4096 / 2 * 6144 * 2  # forward and backward, there and back, k, a tensor rank's tokens, 2 bytes
    assert expert_seconds(FOLDED, small_nodes) == pytest.approx(sent * 4 / 8 / (50e9 * 0.8))
    assert expert_seconds(FOLDED, DGX_H100) == pytest.approx(sent * 7 / 8 / (450e9 * 0.8))


def test_tokens_that_go_to_a_node_once_send_less_over_the_network_and_more_inside():
    """DeepSeek-V3, ep = 64 over 8 nodes: 8 rows of which 7 leave, or 4 nodes of which 3.5 are others."""
    plan = Plan(DEEPSEEK_V3, 256, 512, pp_size=4, ep_size=64, expert_tp_size=1, stage_layers=(16, 15, 15, 15), **KNOWN)
    each, once = (expert_seconds(plan, replace(DGX_H100, once_to_a_node=way)) for way in (False, True))
    token_bytes = 2 * 4096 * 7168
    assert each == pytest.approx(2 * 2 * 8 * 56 / 64 * token_bytes / 40e9)
    assert once == pytest.approx(2 * 2 * 3.5 * token_bytes / 40e9)
    fast = replace(DGX_H100, once_to_a_node=True, network_bytes_per_second=1e15)
    rows = 64 * (1 - (63 / 64) ** 8)  # GPUs that have some of a token's experts: they get it once
    assert expert_seconds(plan, fast) == pytest.approx(
        2 * 2 * rows * 7 / 8 * token_bytes / 360e9
    )  # all of them, inside
    one_node = replace(plan, ep_size=8)
    rows = 8 * (1 - (7 / 8) ** 8)
    each = expert_seconds(one_node, replace(fast, once_to_a_node=False))
    assert expert_seconds(one_node, fast) == pytest.approx(each * rows / 8)


def test_small_experts_are_slower_for_as_many_flops():
    """Their matrices and rows are read for fewer products; and each takes time of its own."""
    wide = GPT(2, 1024, 4096, 1000, 8, num_experts=8, top_k=1, moe_ffn_hidden_size=4096)
    narrow = replace(wide, num_experts=32, top_k=4, moe_ffn_hidden_size=1024)  # as many weights, and FLOPs
    many, few = (layer_seconds(Plan(model, 8, 8, recompute="none"), DGX_H100, True) for model in (narrow, wide))
    router = 3 * 2 * 4096 * 1024 * (32 - 8) / DGX_H100.product_rate
    assert many["products"] - few["products"] == pytest.approx(router, rel=1e-6)
    assert many["memory_bound"] > 1.1 * few["memory_bound"]
    h100 = FITTED["H100"]
    overheads = [layer_seconds(Plan(model, 8, 8, recompute="none"), h100, True)["overhead"] for model in (narrow, wide)]
    assert overheads[0] - overheads[1] == pytest.approx(3 * (32 - 8) * h100.expert_overhead_seconds)


def test_messages_that_sort_rows_on_the_way_leave_less_to_do():
    plan = replace(FOLDED, model=DEEPSEEK_V3, pp_size=1, ep_size=64, world_size=128)
    slow, fast = (layer_seconds(plan, FITTED[kind], True) for kind in ("H100", "H100 DeepEP"))
    assert fast["memory_bound"] < 0.8 * slow["memory_bound"] and fast["products"] == slow["products"]


def test_a_token_is_on_as_many_nodes_as_chance_has_it():
    model, numbers = replace(QWEN3_30B_A3B, num_experts=128), random.Random(0)
    seen = [len({numbers.randrange(4) for _ in range(8)}) for _ in range(20_000)]
    assert nodes_of_a_token(model, 4) == pytest.approx(sum(seen) / len(seen), rel=0.01)
    assert nodes_of_a_token(replace(model, most_nodes=2), 4) == 2 and nodes_of_a_token(model, 1) == 1


# -- real ranks -----------------------------------------------------------------------------------------------------


GRIDS = [  # t, c, ep, etp of 4 ranks; whether the sequence is divided between the layers
    (1, 1, 4, 1, False), (2, 1, 4, 1, False), (2, 1, 2, 1, True), (1, 1, 2, 2, False), (2, 2, 1, 4, True),
]  # fmt: skip


def layout_of(t, c, ep, etp):
    return ParallelLayout(4, t, 1, c, ep_size=ep, expert_tp_size=etp)


def evenly(router):
    """Have each rank's tokens choose all experts equally often."""
    forward = router.forward

    def even(x, seq_length):
        routing, load = forward(x, seq_length)
        numbers = torch.arange(routing.experts.numel()) % router.num_experts
        return routing._replace(experts=numbers.view_as(routing.experts)), load

    router.forward = even


def messages_of_layers():
    """For each grid, even loads or not: the bytes of each all-to-all, and what of them goes to other ranks."""
    found = []
    for t, c, ep, etp, divided in GRIDS:
        groups = init_groups(layout_of(t, c, ep, etp))
        for even in (True, False):
            layer = MoELayer(16, 24, 8, 2, groups, sequence_parallel=divided)
            x = torch.randn(8 // groups.layout.dp_size, 8 // c // (t if divided else 1), 16).requires_grad_()
            if even:
                evenly(layer.router)
            leaving, send = [], dist.all_to_all_single

            def note(output, rows, recv, sent, group, leaving=leaving, send=send):
                sent_to = sent or [len(rows) // group.size()] * group.size()
                others = sum(sent_to) - sent_to[group.rank()]
                leaving.append(others * (rows.nbytes // max(1, len(rows))))
                return send(output, rows, recv, sent, group=group)

            with patch.object(dist, "all_to_all_single", note), communication_log() as log:
                layer(x)[0].sum().backward()
            sizes = [record.message_bytes for record in log.records if record.operation == "all_to_all"]
            found.append((sizes, leaving))
    return found


def test_all_to_alls_of_real_ranks_are_those_of_the_formula_to_the_byte():
    """If loads are even, what leaves the ranks; in any case, the sums of all messages, what stays included."""
    ranks = launch(messages_of_layers, world_size=4)
    for number, (t, c, ep, etp, _) in enumerate(GRIDS):
        traffic = step_traffic(replace(SMALL, num_layers=1), layout_of(t, c, ep, etp), **OF_A_STEP)
        formula = traffic["ep"].total_bytes + traffic["expert_tp"].total_bytes
        even, uneven = ([rank[2 * number + way] for rank in ranks] for way in (0, 1))
        for sizes, _ in (*even, *uneven):
            counts, *rows = sizes  # 8 bytes for each expert and rank that has a part of it
            assert counts == 8 * 8 * etp and len(rows) == 4  # there and back, forward and backward
        assert sum(sum(leaving[1:]) for _, leaving in even) == formula
        for way in (even, uneven):
            assert sum(sum(sizes[1:]) for sizes, _ in way) * (1 - 1 / (ep * etp)) == pytest.approx(formula, rel=1e-12)


TINY = dict(batch_size=8, micro_batch_size=2, seq_length=16, num_layers=2, hidden_size=16, num_attention_heads=4)
TINY |= dict(num_experts=4, top_k=2, mlp="swiglu", bias=False)
RUNS = [
    TrainConfig(ep_size=4, recompute="full", **TINY),
    TrainConfig(tp_size=2, ep_size=2, expert_tp_size=1, moe_layer_freq=2, num_shared_experts=1, **TINY),
    TrainConfig(tp_size=2, pp_size=2, ep_size=2, expert_tp_size=1, sequence_parallel=True, **TINY),
]


def steps(configs):
    """What a step of each run sends in all-to-alls, and how many parameters a rank has."""
    found = []
    for config in configs:
        with training(config) as trainer, communication_log() as log:
            trainer.step()
        sent = [(record.group, record.message_bytes) for record in log.records if record.operation == "all_to_all"]
        found.append((sent, sum(parameter.numel() for parameter in trainer.parameters)))
    return found


def test_steps_send_and_ranks_hold_what_the_formulas_say():
    for config, ranks in zip(RUNS, zip(*launch(steps, RUNS, world_size=4))):
        layout, shape = config.layout(4), config.shape
        options = dict(recompute=config.recompute, sequence_parallel=config.sequence_parallel, bytes_per_element=4)
        traffic = step_traffic(shape, layout, gpus_per_node=8, batch_size=8, **options)
        peers = layout.ep_size * layout.expert_tp_size
        times = 2 if config.recompute == "full" else 1
        forwards = shape.num_moe_layers / layout.pp_size * times * 8 / layout.dp_size / 2
        counts = forwards * 8 * 4 * layout.expert_tp_size  # of each rank
        sent = sum(sum(size for _, size in sent) - counts for sent, _ in ranks)
        assert sent * (1 - 1 / peers) == traffic["ep"].total_bytes + traffic["expert_tp"].total_bytes, config
        plan = Plan(shape, 4, 8, layout.tp_size, layout.pp_size, ep_size=layout.ep_size,
                    expert_tp_size=layout.expert_tp_size)  # fmt: skip
        for rank, (_, parameters) in enumerate(ranks):  # each stage has the tied embedding, padded
            padding = -shape.vocab_size % layout.tp_size / layout.tp_size * shape.hidden_size
            assert parameters == stage_parameters(plan, layout.coords(rank).pp) + padding, config


def kept_by_layers():
    """The bytes that a layer in bfloat16 keeps for backward on this rank, in each form, and how many tokens it routes.

    Left out: indices, a token's few probabilities and statistics, the router's weight in float32 [8, 16].
    """
    found = []
    for t, c, ep, etp, divided in GRIDS:
        groups = init_groups(layout_of(t, c, ep, etp))
        for gated in (False, True):
            saved = {}
            layer = MoELayer(16, 24, 8, 2, groups, sequence_parallel=divided, dtype=torch.bfloat16, gated=gated)
            evenly(layer.router)
            x = torch.randn(8 // groups.layout.dp_size, 8 // c // (t if divided else 1), 16, dtype=torch.bfloat16)
            x.requires_grad_()
            weights = {weight.data_ptr() for weight in layer.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x, saved=saved: saved.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
            ):
                layer(x)
            tokens = x.numel() // 16 // (1 if divided else t)
            kept = [each for place, each in saved.items() if place not in weights and each.is_floating_point()]
            kept = [each for each in kept if each.size(-1) > 2 and {*each.shape} != {8, 16} and each.numel() > tokens]
            found.append((sum(each.untyped_storage().nbytes() for each in kept), tokens))
    return found


def test_real_layers_keep_what_the_formula_says():
    for found in launch(kept_by_layers, world_size=4):
        for number, (kept, tokens) in enumerate(found):
            shape = replace(SMALL, mlp="swiglu" if number % 2 else "gelu")
            assert kept == tokens * kept_bytes_per_token(shape, GRIDS[number // 2][3]), GRIDS[number // 2]


def test_a_layer_with_experts_keeps_the_rest_as_another():
    """Without an MLP, and without the input of its first matrix."""
    bytes_of = activation_bytes_per_layer(SMALL, 2, 2, expert_tp_size=1)
    mlp, tokens = 2 * 2 * SMALL.mlp_width / 2 + 2 * 16, 2 * 8
    dense = activation_bytes_per_layer(SMALL, 2, 2)
    assert bytes_of == dense + tokens * (kept_bytes_per_token(SMALL, 1) / 2 - mlp)
