"""What stages hold, send and hide: by hand, against step_time, and against what a sharded model on real ranks holds."""

from dataclasses import astuple, replace

import pytest
import torch.distributed as dist

from course.communication import communication_log
from course.sizing import DGX_H100, Plan, memory, stage_parameters, step_time
from course.sizing.fully_sharded import collectives, moments, sharded_memory, sharding, unit_parameters
from course.sizing.ring import bus_factor
from course.sizing.stage_memory import layer_parameters
from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.shape import GPT
from labtrain import TrainConfig, training
from labtrain.model import ParallelGPT

SMALL = GPT(num_layers=4, hidden_size=64, seq_length=16, vocab_size=128, num_attention_heads=4)
UNTIED = replace(SMALL, tied=False, positions="rope")
EXPERTS = replace(UNTIED, num_experts=4, moe_layer_freq=2, num_shared_experts=1, moe_ffn_hidden_size=96)
PLAN = Plan(SMALL, 4, 16, micro_batch_size=1, recompute="none")
CLUSTER = Plan(SMALL, 64, 256, recompute="none")
SLOW = replace(DGX_H100, network_bytes_per_second=1e6)


def sent(plan, shard_size=None):
    """What a GPU sends in a step, in numbers per parameter: of weights, and of gradients."""
    found = [0.0, 0.0]
    for each in [each for way in collectives(plan, shard_size) for each in way]:
        is_gradient = each.operation != "all_gather"
        found[is_gradient] += each.times * each.sent_bytes / (4 if is_gradient else 2)
    return found


@pytest.mark.parametrize(("stage", "shard_size", "weights", "gradients"), [
    (0, None, 0, 1.5), (1, None, 0.75, 0.75), (2, None, 0.75, 3), (3, None, 6, 3), (3, 2, 4, 2.5),
])  # fmt: skip
def test_what_each_stage_sends_in_4_micro_batches_on_4_ranks(stage, shard_size, weights, gradients):
    assert sent(replace(PLAN, zero_stage=stage), shard_size) == [weights, gradients]


@pytest.mark.parametrize("model", [SMALL, UNTIED, EXPERTS], ids=["tied", "untied", "experts"])
def test_units_are_those_of_the_model(model):
    found = ParallelGPT(model, group_of_one())
    units = [sum(p.numel() for p in unit.parameters()) for unit in found.units]
    assert [sum(unit) for unit in unit_parameters(replace(PLAN, model=model))] == units


def most_whole(config):
    """On a rank: the most numbers of whole weights at a time, and of whole gradients that are not on their way yet."""
    with training(config) as trainer:
        [parallel], most = trainer.chunks, [0, 0]
        flats = [flat for unit in parallel._units for flat in unit.flats]
        wholes = [param.unsharded for flat in flats for param in flat.parameters]

        def look(_):
            whole = sum(flat.buffer.untyped_storage().size() for flat in flats)
            made = sum(p.grad.nbytes for p in wholes if p.grad is not None)
            for number, held in enumerate((whole, made)):
                most[number] = max(most[number], held // 4)

        for whole in wholes:
            whole.register_post_accumulate_grad_hook(look)
        trainer.compute_gradients()
    return most


LAYERS = dict(batch_size=16, micro_batch_size=2, seq_length=16, hidden_size=64, num_attention_heads=4, num_layers=4)
ROPE = dict(tied=False, positions="rope")
OF_EXPERTS = dict(num_experts=4, moe_layer_freq=2, num_shared_experts=1, moe_ffn_hidden_size=96)


def plan_of(config):
    """The same as a `Plan` for 4 ranks, the embedding padded as labkit pads it."""
    same = ("batch_size", "micro_batch_size", "tp_size", "cp_size", "ep_size", "expert_tp_size", "zero_stage")
    options = {name: getattr(config, name) for name in same}
    return Plan(config.shape, 4, recompute="none", fused_attention=True, pad_vocab_to=1, **options)


@pytest.mark.parametrize("options", [{}, ROPE, ROPE | {"ep_size": 2} | OF_EXPERTS], ids=str)
def test_whole_weights_are_those_of_a_sharded_model_on_real_ranks(options):
    config = TrainConfig(zero_stage=3, **LAYERS | options)
    plan = plan_of(config)
    held, units = sharded_memory(plan), unit_parameters(plan)
    shards = held.optimizer / 12
    weights, gradients = held.weights / 2 - shards, held.gradients / 4 - shards
    whole, made = launch(most_whole, config, world_size=4, backend="gloo")[0]
    assert whole == pytest.approx(weights, rel=0.01)  # buffers are aligned
    if not config.tied:  # else autograd keeps the embedding's first gradient to itself until it has the second
        assert made + max(map(max, units)) == pytest.approx(gradients, rel=0.01)


SHARDED = [
    *({"zero_stage": stage, "ep_size": 2} | OF_EXPERTS for stage in (1, 2, 3)),
    {"zero_stage": 3, "ep_size": 4, "tied": False} | OF_EXPERTS,
    {"zero_stage": 3, "tp_size": 2, "ep_size": 2, "expert_tp_size": 1} | OF_EXPERTS,
    {"zero_stage": 2, "tp_size": 2, "cp_size": 2, "ep_size": 2, "expert_tp_size": 1} | OF_EXPERTS,
    {"zero_stage": 3, "tp_size": 2, "expert_tp_size": 1} | ROPE | OF_EXPERTS,  # 4 ranks with the same experts, not 2
    {"zero_stage": 3, "shard_size": 2} | OF_EXPERTS,
    {"zero_stage": 3, "shard_size": 2, "ep_size": 2, "mlp": "swiglu", "bias": False} | OF_EXPERTS,  # experts undivided
    {"zero_stage": 3},
    {"zero_stage": 3, "shard_size": 2, "tied": False},
]  # fmt: skip


def steps_of(configs):
    """On a rank, for a step of each run: the bytes that rings send for its shards; of weights, gradients and states."""
    found = []
    for config in configs:
        with training(config) as trainer:
            with communication_log() as log:
                trainer.step()
            of_copies, sent = {}, 0.0  # the all-reduces of hybrid sharding, and in each a flag for each parameter
            for flat in trainer.chunks[0]._flats:
                for group in flat.replica_groups:
                    ranks = tuple(dist.get_process_group_ranks(group))
                    of_copies[ranks] = of_copies.get(ranks, 0) + 4 * len(flat.parameters)
            for operation, group, size, *_ in map(astuple, log.records):
                if operation in ("all_gather", "reduce_scatter") or (operation == "all_reduce" and group in of_copies):
                    sent += bus_factor(operation, len(group)) * size
            sent -= sum(bus_factor("all_reduce", len(group)) * size for group, size in of_copies.items())
            states = [each for state in trainer.optimizer.state.values() for each in state.values() if each.dim()]
            held = [sum(each.nbytes for each in tensors)
                    for tensors in (trainer.parameters, [p.grad for p in trainer.parameters], states)]  # fmt: skip
            found.append((sent, held))
    return found


def of_two_layers(options):
    """One of them may have experts; and two micro-batches, however many replicas there are."""
    config = TrainConfig(precision="bfloat16", **LAYERS | {"num_layers": 2} | options)
    return replace(config, batch_size=2 * config.micro_batch_size * config.layout(4).dp_size)


def test_steps_send_and_ranks_hold_what_the_formulas_say_to_the_byte():
    configs = [of_two_layers(options) for options in SHARDED]
    for options, config, ranks in zip(SHARDED, configs, zip(*launch(steps_of, configs, world_size=4))):
        found = sharding(plan_of(config), DGX_H100, config.shard_size)
        shards = found.memory.optimizer / 12
        for sent, held in ranks:
            assert held == [2 * shards, 4 * shards, 12 * shards], options
            assert sent == found.sent_bytes, options


def test_a_stage_holds_what_the_paper_counts_and_what_is_whole_for_a_moment():
    layer, total = sum(layer_parameters(CLUSTER)), stage_parameters(CLUSTER, 0)
    more = []
    for stage in range(4):
        plan = replace(CLUSTER, zero_stage=stage)
        found, paper = sharded_memory(plan), memory(plan)
        assert (found.optimizer, found.activations) == (paper.optimizer, paper.activations)
        more.append([(found.weights - paper.weights) / 2, (found.gradients - paper.gradients) / 4])
    whole, shard = total - 2 * layer, total / 64  # the root, and two of four layers
    assert more == [pytest.approx(each) for each in ([0, 0], [shard, layer], [shard, whole], [whole, whole])]
    hybrid = sharded_memory(replace(CLUSTER, zero_stage=3), shard_size=8)
    assert hybrid.optimizer == 12 * total / 8


def test_messages_hide_where_the_network_is_fast_but_not_at_the_ends():
    fast, plan = replace(DGX_H100, network_bytes_per_second=1e18, node_bytes_per_second=1e18), CLUSTER
    for stage in range(4):
        found = sharding(replace(plan, zero_stage=stage), fast)
        assert found.hides and 0 < found.waiting_seconds < found.message_seconds
        total, layers = stage_parameters(plan, 0), 4 * sum(layer_parameters(plan))
        sent = total + layers / 2 if stage == 3 else total  # the root, here all that is in no layer, is gathered once
        assert found.waiting_seconds == pytest.approx((total - layers) / sent * found.message_seconds)


def test_what_does_not_hide_waits_for_what_a_layer_leaves():
    plan = replace(CLUSTER, zero_stage=3)
    found, computing = sharding(plan, SLOW), step_time(replace(CLUSTER, zero_stage=0), SLOW)
    assert not found.hides
    in_layers = computing.products + computing.memory_bound + computing.overhead
    assert found.message_seconds - in_layers < found.waiting_seconds < found.message_seconds


def test_hybrid_sharding_keeps_the_gathers_in_the_node():
    plan = replace(CLUSTER, zero_stage=3)
    flat, hybrid = sharding(plan, SLOW), sharding(plan, SLOW, shard_size=8)
    total, layers = stage_parameters(plan, 0), 4 * sum(layer_parameters(plan))
    assert flat.leaving_bytes == pytest.approx(4 * 63 / 64 * ((2 + 4) * total + 2 * layers) / 8)  # 4 micro-batches
    assert hybrid.leaving_bytes == pytest.approx(4 * 2 * 7 / 8 * total / 8)  # one all-reduce of an eighth
    assert hybrid.waiting_seconds < flat.waiting_seconds / 4
    assert sharding(plan, DGX_H100, 8).memory.total > sharding(plan, DGX_H100).memory.total
    inside = replace(plan, world_size=8, batch_size=32)
    assert sharding(inside, SLOW).leaving_bytes == 0


def test_without_prefetch_one_unit_is_whole_at_a_time():
    found = moments([4, 8, 4], dp_size=2, prefetch=0)
    assert [each.name for each in found] == ["F0", "F1", "F2", "B2", "B1", "B0"]
    assert [sum(each.weights) for each in found] == [4, 8, 4, 4, 8, 4]
    assert {each.shards for each in found} == {8}
    assert [each.gradients for each in found[3:]] == [[0, 0, 4], [0, 8, 0], [4, 0, 0]]
