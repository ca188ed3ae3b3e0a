"""A plan refuses what does not fit together, each misfit with its rule, its numbers and the way out."""

import pickle
from dataclasses import replace

import pytest

from course.sizing import Plan
from labkit.shape import GPT
from labkit.sizes import Misfit

GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
KNOWN = dict(model=GPT_3, world_size=64, batch_size=128)


@pytest.mark.parametrize(("changes", "says"), [
    ({"world_size": 0}, r"world_size=0 must be at least 1"),
    ({"tp_size": 2.0}, r"tp_size=2.0 must be a whole number"),
    ({"micro_batch_size": True}, r"micro_batch_size=True must be a whole number"),
    ({"recompute": "some"}, r"recompute='some' is unknown: use none, selective or full"),
    ({"zero_stage": 4}, r"zero_stage=4 is unknown: use 0, 1, 2 or 3"),
    ({"gradient_bytes": 3}, r"gradient_bytes=3 is unknown: use 2 or 4"),
    ({"context_parallel": "star"}, r"context_parallel='star' is unknown: use ring, ulysses or all_gather"),
    ({"pp_size": 2, "stage_layers": [96, 0]}, r"stage_layers=0 must be at least 1"),
    ({"cp_size": 0}, r"cp_size=0 must be at least 1"),
    ({"model": replace(GPT_3, num_attention_heads=None)}, r"does not say its num_attention_heads"),
])  # fmt: skip
def test_values_that_are_wrong_on_their_own_are_refused(changes, says):
    with pytest.raises(ValueError, match=says) as refused:
        Plan(**KNOWN | changes)
    assert not isinstance(refused.value, Misfit)


@pytest.mark.parametrize(("changes", "rule", "fault", "advice"), [
    ({"tp_size": 5}, "tp_size must divide num_attention_heads", "tp_size=5 does not divide num_attention_heads=96",
     "use tp_size 1, 2, 3, 4, 6, 8, 12, 16, ... or 96, or num_attention_heads 95 or 100"),
    ({"pp_size": 3}, "tp_size * pp_size must divide world_size",
     "tp_size=1 * pp_size=3 = 3 does not divide world_size=64",
     "use pp_size 1, 2, 4, 8, 16, 32 or 64, or world_size 63 or 66"),
    ({"pp_size": 64, "num_chunks": 2}, "each stage must have 1 layer or more",
     "pp_size=64 * num_chunks=2 = 128 stages for num_layers=96", "use 128 layers or more, or fewer stages"),
    ({"pp_size": 32, "num_chunks": 2}, "pp_size * num_chunks must divide num_layers",
     "pp_size=32 * num_chunks=2 = 64 does not divide num_layers=96",
     "use a product of 1, 2, 3, 4, 6, 8, 12, 16, ... or 96"),
    ({"pp_size": 2, "stage_layers": [40, 40]},
     "each stage must have 1 layer or more, and all num_layers together",
     "stage_layers=(40, 40) gives stages of [40, 40] layers, but num_stages=2 must have 1 layer or more each, "
     "and num_layers=96 together", "change the numbers, or use fewer stages"),
    ({"micro_batch_size": 3}, "dp_size * micro_batch_size must divide batch_size",
     "dp_size=64 * micro_batch_size=3 = 192 does not divide batch_size=128",
     "use batch_size 192"),
    ({"num_chunks": 2}, "num_chunks needs a pipeline of several stages",
     "num_chunks=2 needs a pipeline of several stages", "pp_size=1 has one, use num_chunks=1"),
    ({"pp_size": 16, "num_chunks": 2, "micro_batch_size": 4},
     "pp_size must divide the micro-batches of interleaved chunks", "pp_size=16 does not divide the 8 micro-batches",
     "use num_chunks=1, or a different micro_batch_size (Megatron-LM interleaves in rounds of p)"),
    ({"sequence_parallel": True, "tp_size": 32, "model": replace(GPT_3, seq_length=100)},
     "tp_size must divide seq_length", "tp_size=32 does not divide seq_length=100",
     "use tp_size 1, 2, 4, 5, 10, 20, 25, 50 or 100, or seq_length 96 or 128"),
    ({"cp_size": 2}, "context parallelism needs fused attention", "cp_size=2 is modelled with fused attention only",
     "use fused_attention=True, or cp_size=1"),
    ({"fused_attention": True, "recompute": "selective"},
     "selective recomputation needs attention that is not fused",
     "recompute='selective' computes the scores again, as fused attention does anyway",
     "use recompute='none'"),
    ({"cp_size": 5, "fused_attention": True, "model": replace(GPT_3, seq_length=2050)},
     "tp_size * cp_size * pp_size must divide world_size",
     "tp_size=1 * cp_size=5 * pp_size=1 = 5 does not divide world_size=64",
     "use cp_size 1, 2, 4, 8, 16, 32 or 64, or world_size 60 or 65"),
    ({"cp_size": 2, "fused_attention": True, "model": replace(GPT_3, seq_length=6)},
     "2 * cp_size must divide seq_length",
     "zigzag chunks: 2 * cp_size=2 = 4 does not divide seq_length=6", "use seq_length 4 or 8, or zigzag=False"),
    ({"tp_size": 8, "model": replace(GPT_3, num_query_groups=4)}, "tp_size must divide num_query_groups",
     "tp_size=8 does not divide num_query_groups=4", "use tp_size 1, 2 or 4, or num_query_groups 8"),
    ({"tp_size": 2, "cp_size": 4, "context_parallel": "ulysses", "fused_attention": True,
      "model": replace(GPT_3, num_query_groups=4)}, "tp_size * cp_size must divide num_query_groups",
     "tp_size * cp_size=8 does not divide num_query_groups=4",
     "use tp_size * cp_size 1, 2 or 4, or num_query_groups 8"),
])  # fmt: skip
def test_a_misfit_knows_its_rule_its_fault_and_the_way_out(changes, rule, fault, advice):
    with pytest.raises(Misfit) as refused:
        Plan(**KNOWN | changes)
    for misfit in (refused.value, pickle.loads(pickle.dumps(refused.value))):
        assert (misfit.rule, misfit.fault, misfit.advice) == (rule, fault, advice)
        assert str(misfit) == f"{fault}: {advice}"


def test_the_sizes_that_follow():
    plan = Plan(GPT_3, 96, 96, tp_size=4, pp_size=2, micro_batch_size=2, num_chunks=2)
    assert (plan.dp_size, plan.num_micro_batches, plan.layers_per_chunk) == (12, 4, 24)
    assert plan.bubble_over_ideal == 1 / 8
    assert plan.layout.groups("pp")[0] == [0, 48]
    divided = replace(plan, cp_size=2, fused_attention=True)
    assert (divided.dp_size, divided.dp_cp_size, divided.num_micro_batches) == (6, 12, 8)
    assert divided.layout.groups("cp")[0] == [0, 4]
