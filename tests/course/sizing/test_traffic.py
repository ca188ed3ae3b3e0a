"""Traffic against numbers worked by hand, a walk over the edges, and messages that real ranks sent."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import set_checkpoint_early_stop

from course.communication import communication_log
from course.measure.by_axis import sent_by_axis
from course.sizing import Plan, Traffic, plan_traffic, stage_parameters, step_traffic
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import TrainConfig, training
from labtrain.model import ParallelGPT

TINY = GPT(num_layers=2, hidden_size=4, seq_length=8, vocab_size=10)  # 560 parameters
SMALL = GPT(num_layers=12, hidden_size=16, seq_length=8, vocab_size=32, num_attention_heads=4)
GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)


# -- by hand --------------------------------------------------------------------------------------------------------


def test_sixteen_gpus_by_hand():
    """t=2, p=4, d=2 in two boxes of 8, B=4: a replica's activations are 4/2 * 8 * 4 = 64 elements = 128 bytes."""
    traffic = step_traffic(
        TINY, ParallelLayout(16, 2, 4), gpus_per_node=8, batch_size=4, gradient_bytes_per_element=2
    )  # fmt: skip
    # half a layer per stage: 2 all-reduces of 128 bytes; on a ring of two each rank sends the whole message once
    assert traffic["tp"] == Traffic(total_bytes=16 * 2 * 128, crossing_bytes=0)
    # 560 / 8 = 70 parameters per rank, 140 bytes, sent once; ranks 0 and 2, 1 and 3, ... share a box
    assert traffic["dp"] == Traffic(total_bytes=16 * 140, crossing_bytes=0)
    # 4 pipelines of 3 messages, 128 bytes there and 128 back; only 4 -> 8, 5 -> 9, ... leave the box
    assert traffic["pp"] == Traffic(total_bytes=4 * 3 * 256, crossing_bytes=4 * 256)


def test_the_paper_s_volume_per_device():
    """8bsh(t-1)/t elements per layer, device and micro-batch (section 3.2), here with m = 1."""
    t, b = 8, 3
    model = GPT(num_layers=1, hidden_size=64, seq_length=16, vocab_size=100)
    traffic = step_traffic(model, ParallelLayout(t, t), gpus_per_node=8, batch_size=b, bytes_per_element=1)
    assert traffic["tp"].total_bytes / t == pytest.approx(8 * b * 16 * 64 * (t - 1) / t)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-pp-dp-cp", "dp-tp-pp-cp", "pp-cp-tp-dp"])
@pytest.mark.parametrize("gpus_per_node", [1, 3, 4, 8, 48])
def test_crossing_bytes_by_walking_every_edge(order, gpus_per_node):
    """Rank by rank: what it sends to its successor, and whether that one is in a different node."""
    for t, p, c in itertools.product((1, 2, 4), (1, 2, 3), (1, 2)):
        layout = ParallelLayout(48, t, p, c, order)
        traffic = step_traffic(TINY, layout, gpus_per_node=gpus_per_node, batch_size=12)
        activation_bytes = 12 / layout.dp_size * 8 / c * 4 * 2
        replicas = layout.dp_size * c
        per_edge = {
            "tp": 4 * (2 / p) * activation_bytes * 2 * (t - 1) / t,
            "dp": 560 / (t * p) * 4 * 2 * (replicas - 1) / replicas,
            "pp": 2 * activation_bytes,
        }
        for axis, edge_bytes in per_edge.items():
            total = crossing = 0.0
            for rank in range(48):
                group = layout.group_of(rank, *(("dp", "cp") if axis == "dp" else (axis,)))
                place = group.index(rank)
                if axis == "pp" and place == len(group) - 1:
                    continue
                total += edge_bytes
                if group[(place + 1) % len(group)] // gpus_per_node != rank // gpus_per_node:
                    crossing += edge_bytes
            assert traffic[axis] == pytest.approx((total, crossing))


def test_attention_over_context_ranks_by_hand():
    """c=4, B=4: a rank has 2 of 8 tokens, 4 * 2 * 4 = 32 numbers, 64 bytes of each of k and v; 2 layers."""
    layout, known = ParallelLayout(4, cp_size=4), dict(gpus_per_node=2, batch_size=4)
    ring = step_traffic(TINY, layout, **known)["cp"]
    # 6 messages of k and v, 4 of their gradients in float32; ranks 1 and 3 send to a different node
    assert ring == Traffic(total_bytes=4 * 2 * (6 * 128 + 4 * 256), crossing_bytes=2 * 2 * (6 * 128 + 4 * 256))
    again = step_traffic(TINY, layout, recompute="full", **known)["cp"]
    assert again.total_bytes - ring.total_bytes == 4 * 2 * 3 * 128
    # 8 all-to-alls, of which 3/4 leave the rank and 2/4 leave the node
    ulysses = step_traffic(TINY, layout, context_parallel="ulysses", **known)["cp"]
    assert ulysses == Traffic(total_bytes=4 * 2 * 8 * 48, crossing_bytes=4 * 2 * 8 * 32)
    # two gathers of 4 * 128 bytes and a scatter of 4 * 256, of which 3/4 go around the ring
    gathered = step_traffic(TINY, layout, context_parallel="all_gather", **known)["cp"]
    assert gathered == Traffic(total_bytes=4 * 2 * (2 * 384 + 768), crossing_bytes=2 * 2 * (2 * 384 + 768))


def test_one_gpu_moves_nothing():
    traffic = step_traffic(TINY, ParallelLayout(1), gpus_per_node=8, batch_size=4)
    assert set(traffic.values()) == {Traffic(0, 0)}


def test_traffic_of_a_plan_counts_what_it_recomputes_interleaves_and_gathers():
    base = Plan(GPT_3, 64, 64, 4, 4, recompute="none")
    plain = plan_traffic(base, 8)
    assert plain == step_traffic(GPT_3, base.layout, gpus_per_node=8, batch_size=64)
    assert plan_traffic(replace(base, recompute="full"), 8)["tp"].total_bytes == 1.5 * plain["tp"].total_bytes
    divided = plan_traffic(replace(base, sequence_parallel=True), 8)
    assert divided["tp"].total_bytes == 5 / 4 * plain["tp"].total_bytes
    assert divided["pp"].total_bytes == plain["pp"].total_bytes / 4
    zero = plan_traffic(replace(base, zero_stage=1), 8)["dp"].total_bytes
    assert zero == pytest.approx(6 / 8 * plain["dp"].total_bytes)
    # 3 edges twice, and once from the last stage to the first: 7 messages instead of 3
    chunks = plan_traffic(replace(base, num_chunks=2), 8)["pp"]
    assert chunks.total_bytes == pytest.approx(7 / 3 * plain["pp"].total_bytes)
    assert chunks.crossing_bytes == chunks.total_bytes  # 16 ranks from stage to stage
    folds = plan_traffic(replace(base, num_chunks=2, schedule="zero-bubble-v"), 8)["pp"]
    assert folds.total_bytes == folds.crossing_bytes == 2 * plain["pp"].total_bytes  # 3 edges, there and back


# -- real ranks -----------------------------------------------------------------------------------------------------


def messages_of_models(sequence_parallel, recompute, early_stop):
    """What a tensor rank sends for models of 1 and 3 layers."""
    logs = []
    for num_layers in (1, 3):
        shape = replace(SMALL, num_layers=num_layers)
        model = ParallelGPT(shape, dist.group.WORLD, recompute=recompute, sequence_parallel=sequence_parallel)
        tokens = torch.zeros(2, shape.seq_length, dtype=torch.long)
        with communication_log() as log, set_checkpoint_early_stop(early_stop):
            model.loss(model(tokens), tokens).backward()
        logs.append(log)
    return logs


def counted_bytes(sequence_parallel, recompute, early_stop=False):
    """What two more layers send: everything that does not belong to a layer drops out."""
    layout = ParallelLayout(2, tp_size=2)
    ranks = launch(messages_of_models, sequence_parallel, recompute, early_stop, world_size=2)
    kinds = ["all_gather", "reduce_scatter"] if sequence_parallel else ["all_reduce"]
    one, three = (sum(sent_by_axis(logs, layout)["tp", kind] for kind in kinds) for logs in zip(*ranks))
    return three - one


def formula_bytes(sequence_parallel, recompute):
    known = dict(gpus_per_node=8, batch_size=2, bytes_per_element=4)
    options = dict(sequence_parallel=sequence_parallel, recompute=recompute)
    layout = ParallelLayout(2, tp_size=2)
    return step_traffic(replace(SMALL, num_layers=2), layout, **known, **options)["tp"].total_bytes


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_messages_of_layers_are_those_of_real_ranks(sequence_parallel, recompute):
    assert counted_bytes(sequence_parallel, recompute) == formula_bytes(sequence_parallel, recompute)


def test_torch_stops_before_the_last_message_of_a_recomputed_layer():
    each = formula_bytes(False, "none") / 4  # one all-reduce in each of the layers
    assert counted_bytes(False, "full", early_stop=True) == formula_bytes(False, "full") - each


def bytes_between_stages():
    """What a tensor rank hands to the next stage, without sequence parallelism and with it."""
    tokens = torch.zeros(2, SMALL.seq_length, dtype=torch.long)
    models = [ParallelGPT(SMALL, dist.group.WORLD, num_stages=2, sequence_parallel=way) for way in (False, True)]
    return [model(tokens).nbytes for model in models]


def test_what_a_stage_hands_over_is_what_real_ranks_hand_over():
    layout, known = ParallelLayout(4, tp_size=2, pp_size=2), dict(gpus_per_node=8, batch_size=2, bytes_per_element=4)
    ranks = launch(bytes_between_stages, world_size=2)
    for sequence_parallel, handed_over in zip((False, True), zip(*ranks)):
        formula = step_traffic(SMALL, layout, sequence_parallel=sequence_parallel, **known)["pp"].total_bytes
        assert formula == 2 * sum(handed_over)  # there and back


def sent_in_a_step(configs):
    """What this rank sends in a step of each of these runs, by group, and how many parameters it has."""
    runs = []
    for config in configs:
        with training(config) as trainer, communication_log() as log:
            trainer.step()
        sent = [(record.group, record.operation, record.message_bytes) for record in log.records]
        runs.append((sent, len(trainer.parameters)))
    return runs


KNOWN = dict(batch_size=4, micro_batch_size=2, seq_length=16, num_layers=2, hidden_size=16, num_attention_heads=4)
TODAY = dict(num_query_groups=2, mlp="swiglu", positions="rope", norm="rmsnorm", bias=False, tied=False)
RUNS = [
    TrainConfig(context_parallel="ring", cp_size=4, **KNOWN),
    TrainConfig(context_parallel="ring", cp_size=2, tp_size=2, recompute="full", **KNOWN, **TODAY),
    TrainConfig(context_parallel="ulysses", cp_size=2, recompute="full", **KNOWN, **TODAY),
    TrainConfig(context_parallel="all_gather", cp_size=2, pp_size=2, recompute="full", **KNOWN),
]


def test_messages_between_stages_are_those_of_real_steps():
    """To the byte: in turn, interleaved, and in a V, which sends nothing between its middle stages."""
    one, two = (dict(KNOWN, pp_size=4, micro_batch_size=1, num_layers=n) for n in (4, 8))
    folds = TrainConfig(schedule="v-half", **two)
    configs = [TrainConfig(**one), TrainConfig(schedule="interleaved", num_chunks=2, **two), folds]
    totals = []
    for config, runs in zip(configs, zip(*launch(sent_in_a_step, configs, world_size=4))):
        is_v = config.schedule == "v-half"
        options = dict(num_chunks=2 if is_v else config.num_chunks, folds=is_v, bytes_per_element=4)
        formula = step_traffic(config.shape, config.layout(4), gpus_per_node=8, batch_size=4, **options)[
            "pp"
        ].total_bytes
        totals.append(sum(size for sent, _ in runs for _, operation, size in sent if operation == "send"))
        assert totals[-1] == formula
    assert [total / totals[0] for total in totals] == [1, 7 / 3, 2]


def test_messages_of_context_ranks_are_those_of_real_steps():
    """To the byte: attention's, and the gradients, which travel in one bucket with a flag for each parameter."""
    for config, runs in zip(RUNS, zip(*launch(sent_in_a_step, RUNS, world_size=4))):
        layout, recompute = config.layout(4), config.recompute
        options = dict(recompute=recompute, context_parallel=config.context_parallel, bytes_per_element=4)
        formula = step_traffic(config.shape, layout, gpus_per_node=8, batch_size=4, **options)["cp"].total_bytes
        share = (layout.cp_size - 1) / layout.cp_size  # what leaves the rank
        shares = {"send": 1, "all_to_all": share, "all_gather": share, "reduce_scatter": share}
        for rank, (sent, num_parameters) in enumerate(runs):
            own = [(operation, size) for group, operation, size in sent if group == tuple(layout.group_of(rank, "cp"))]
            assert sum(shares.get(operation, 0) * size for operation, size in own) == formula / 4, config
            copies = tuple(layout.group_of(rank, "dp", "cp"))
            bucket = max(size for group, operation, size in sent if (group, operation) == (copies, "all_reduce"))
            t, p, c = layout.tp_size, layout.pp_size, layout.cp_size
            held = stage_parameters(
                Plan(config.shape, 4, 4, t, p, cp_size=c, fused_attention=True), layout.coords(rank).pp
            )
            padding = -config.shape.vocab_size % t / t * config.hidden_size * (1 if config.tied else 2)
            assert bucket == 4 * (held + padding + num_parameters), config
