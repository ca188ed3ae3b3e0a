"""How a model lies over ranks: what fits, what does not, and the one wording of each refusal."""

import pickle
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest

from labkit.layout import ParallelLayout
from labkit.parallel_config import SCHEDULES, V_SHAPED, ParallelConfig, ScheduleName
from labkit.schedules import interleaved, one_f_one_b, v_half
from labkit.shape import GPT
from labkit.sizes import Misfit

MODEL = GPT(num_layers=8, hidden_size=16, seq_length=16, vocab_size=64, num_attention_heads=8)
EXPERTS = replace(MODEL, num_experts=8)
CONFIG = ParallelConfig(batch_size=16)


def test_every_schedule_has_a_name_and_is_made():
    assert get_args(ScheduleName) == tuple(SCHEDULES)
    for name in SCHEDULES:
        config = replace(CONFIG, pp_size=2, schedule=name, num_chunks=2 if name == "interleaved" else 1)
        config.check(MODEL, world_size=4)
        schedule = config.make_schedule(world_size=4)
        assert (schedule.pp_size, schedule.num_micro_batches, schedule.num_chunks) == (2, 8, config.chunks_per_rank)
        assert config.chunks_per_rank == (2 if name in (*V_SHAPED, "interleaved") else 1)
    assert replace(CONFIG, pp_size=2).make_schedule(2) == one_f_one_b(2, 16)
    assert replace(CONFIG, pp_size=2, schedule="v-half").make_schedule(2) == v_half(2, 16)
    assert replace(CONFIG, pp_size=2, schedule="interleaved", num_chunks=3).make_schedule(2) == interleaved(2, 16, 3)


def test_what_follows_from_the_number_of_ranks():
    config = ParallelConfig(batch_size=48, micro_batch_size=2, tp_size=2, cp_size=2, pp_size=2, order="cp-tp-dp-pp")
    assert config.layout(24) == ParallelLayout(24, tp_size=2, cp_size=2, pp_size=2, order="cp-tp-dp-pp")
    assert config.num_micro_batches(24) == 48 // (3 * 2)
    experts = replace(config, ep_size=4, expert_tp_size=1)
    assert (experts.expert_shards, config.expert_shards) == (1, 2)
    assert experts.layout(24).expert_dp_size == 24 // (2 * 4)


def test_how_many_layers_each_stage_has():
    assert replace(CONFIG, pp_size=3).layers_per_stage(8) == (2, 3, 3)
    assert replace(CONFIG, pp_size=2, schedule="v-min", first_stage_layers=1).layers_per_stage(10) == (1, 3, 3, 3)
    listed = replace(CONFIG, pp_size=2, stage_layers=np.array([3, 5]))
    assert listed == replace(CONFIG, pp_size=2, stage_layers=[3, 5])
    assert listed.stage_layers == listed.layers_per_stage(8) == (3, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 0}, "tp_size=0 must be at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"pp_size": True}, "pp_size=True must be a whole number"),
        ({"shard_size": 0}, "shard_size=0 must be at least 1"),
        ({"zigzag": "yes"}, "zigzag='yes' is unknown: use True or False"),
        ({"context_parallel": "star"}, "context_parallel='star' is unknown: use ring, ulysses or all_gather"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes' is unknown: use True or False"),
        ({"zero_stage": 4}, "zero_stage=4 is unknown: use 0, 1, 2 or 3"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown: use gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v"),
        ({"recompute": True}, "recompute=True is unknown: use none, selective or full"),
        ({"stage_layers": 8}, "stage_layers=8 must be a list: give one number for each stage"),
        ({"stage_layers": "35"}, "stage_layers='35' must be a list: give one number for each stage"),
        ({"stage_layers": (8, 0)}, "stage_layers=0 must be at least 1"),
    ],
    ids=str,
)
def test_a_value_that_is_wrong_on_its_own_is_refused_at_once(options, message):
    with pytest.raises(ValueError) as refused:
        replace(CONFIG, **options)
    assert str(refused.value).startswith(message)
    assert not isinstance(refused.value, Misfit)


def test_numbers_of_numpy_become_pythons_own():
    config = replace(CONFIG, tp_size=np.int64(2), expert_tp_size=np.int32(2))
    assert (type(config.tp_size), type(config.expert_tp_size)) == (int, int)


MISFITS = [  # options, number of ranks, rule, fault, advice
    (
        {"schedule": "interleaved"},
        1,
        "schedule='interleaved' needs num_chunks=2 or more",
        "schedule='interleaved' needs num_chunks=2 or more",
        "with one, use '1f1b'",
    ),
    (
        {"num_chunks": 2},
        1,
        "num_chunks needs schedule='interleaved'",
        "num_chunks=2 needs schedule='interleaved', not '1f1b'",
        "use that, or num_chunks=1",
    ),
    (
        {"schedule": "v-half", "num_chunks": 3},
        1,
        "num_chunks needs schedule='interleaved'",
        "num_chunks=3 needs schedule='interleaved', not 'v-half'",
        "use that, or num_chunks=1",
    ),
    (
        {"pp_size": 8, "schedule": "v-min"},
        8,
        "each stage must have 1 layer or more",
        "pp_size=8 * num_chunks=2 = 16 stages for num_layers=8",
        "use 16 layers or more, or fewer stages",
    ),
    (
        {"pp_size": 2, "stage_layers": (4, 3)},
        2,
        "each stage must have 1 layer or more, and all num_layers together",
        "stage_layers=(4, 3) gives stages of [4, 3] layers, but num_stages=2 must have 1 layer or more each, "
        "and num_layers=8 together",
        "change the numbers, or use fewer stages",
    ),
    (
        {"pp_size": 2, "stage_layers": (4, 4), "last_stage_layers": 4},
        2,
        "two of these say how many layers one stage has",
        "stage_layers=(4, 4), last_stage_layers=4: two of these say how many layers one stage has",
        "leave one out",
    ),
    (
        {"tp_size": 3},
        3,
        "tp_size must divide num_attention_heads",
        "tp_size=3 does not divide num_attention_heads=8",
        "use tp_size 1, 2, 4 or 8, or num_attention_heads 6 or 9",
    ),
    (
        {"tp_size": 4, "cp_size": 4, "context_parallel": "ulysses"},
        16,
        "tp_size * cp_size must divide num_attention_heads",
        "tp_size * cp_size=16 does not divide num_attention_heads=8",
        "use tp_size * cp_size 1, 2, 4 or 8, or num_attention_heads 16",
    ),
    (
        {"zero_stage": 2, "schedule": "zero-bubble"},
        1,
        "ZeRO stages 2 and 3 do not go with a schedule that splits backward",
        "zero_stage=2 sends a layer's gradients when its backward is done, and schedule='zero-bubble' computes those "
        "of its weights later",
        "use zero_stage=1, or schedule='1f1b'",
    ),
    (
        {"shard_size": 2},
        4,
        "shard_size needs a ZeRO stage",
        "shard_size=2 shards nothing with zero_stage=0",
        "use 1, 2 or 3",
    ),
    (
        {"cp_size": 16},
        16,
        "2 * cp_size must divide seq_length",
        "zigzag chunks: 2 * cp_size=16 = 32 does not divide seq_length=16",
        "use seq_length 32, or zigzag=False",
    ),
    (
        {"cp_size": 3, "zigzag": False},
        3,
        "cp_size must divide seq_length",
        "cp_size=3 does not divide seq_length=16",
        "use cp_size 1, 2, 4, 8 or 16, or seq_length 15 or 18",
    ),
    (
        {"pp_size": 2, "first_stage_layers": 8},
        2,
        "each stage must have 1 layer or more, and all num_layers together",
        "first_stage_layers=8 gives stages of [8, 0] layers, but num_stages=2 must have 1 layer or more each, "
        "and num_layers=8 together",
        "change the numbers, or use fewer stages",
    ),
    (
        {"cp_size": 4, "tp_size": 8, "sequence_parallel": True},
        32,
        "tp_size must divide seq_length / cp_size",
        "tp_size=8 does not divide seq_length / cp_size=4",
        "use tp_size 1, 2 or 4, or seq_length / cp_size 8",
    ),
    (
        {"ep_size": 2},
        2,
        "ep_size needs a model with experts",
        "ep_size=2 is for experts",
        "give num_experts too, or leave ep_size out",
    ),
    (
        {"tp_size": 2, "pp_size": 2},
        6,
        "tp_size * pp_size must divide world_size",
        "tp_size=2 * pp_size=2 = 4 does not divide world_size=6",
        "use tp_size 1 or 3, or pp_size 1 or 3, or world_size 4 or 8",
    ),
    (
        {"micro_batch_size": 4},
        8,
        "dp_size * micro_batch_size must divide batch_size",
        "dp_size=8 * micro_batch_size=4 = 32 does not divide batch_size=16",
        "use batch_size 32",
    ),
    (
        {"zero_stage": 3, "shard_size": 3},
        8,
        "shard_size must divide dp_size * cp_size",
        "shard_size=3 does not divide dp_size * cp_size = 8",
        "use 1, 2, 4 or 8",
    ),
    (
        {"order": "tp-dp-pp", "cp_size": 2},
        4,
        "order must name cp if cp_size is above 1",
        "order='tp-dp-pp' leaves out cp while cp_size=2",
        "name cp in it, as in 'tp-cp-dp-pp'",
    ),
    (
        {"pp_size": 4, "schedule": "dualpipe-v", "batch_size": 7},
        4,
        "schedule='dualpipe-v' needs 2 * pp_size micro-batches",
        "schedule='dualpipe-v' needs 2 * pp_size=8 micro-batches, there are 7",
        "use a larger batch_size, or schedule='zero-bubble-v'",
    ),
]
EXPERT_MISFITS = [
    (
        {"ep_size": 3},
        3,
        "ep_size must divide num_experts",
        "ep_size=3 does not divide num_experts=8",
        "use ep_size 1, 2, 4 or 8, or num_experts 6 or 9",
    ),
    (
        {"expert_tp_size": 3},
        3,
        "expert_tp_size must divide width of an expert",
        "expert_tp_size=3 does not divide width of an expert=64",
        "use expert_tp_size 1, 2, 4, 8, 16, 32 or 64, or width of an expert 63 or 66",
    ),
    (
        {"ep_size": 8},
        4,
        "expert_tp_size * ep_size must divide the expert grid's world_size/pp_size",
        "expert_tp_size=1 * ep_size=8 = 8 does not divide the expert grid's world_size/pp_size=4",
        "use ep_size 1, 2 or 4",
    ),
]


GROUPS_MISFITS = [
    (
        {"tp_size": 4},
        4,
        "tp_size must divide num_query_groups",
        "tp_size=4 does not divide num_query_groups=2",
        "use tp_size 1 or 2, or num_query_groups 4",
    ),
    (
        {"tp_size": 2, "cp_size": 2, "context_parallel": "ulysses"},
        4,
        "tp_size * cp_size must divide num_query_groups",
        "tp_size * cp_size=4 does not divide num_query_groups=2",
        "use tp_size * cp_size 1 or 2, or num_query_groups 4",
    ),
]
CASES = [(MODEL, *case) for case in MISFITS]
CASES += [(EXPERTS, *case) for case in EXPERT_MISFITS]
CASES += [(replace(MODEL, num_query_groups=2), *case) for case in GROUPS_MISFITS]


@pytest.mark.parametrize(
    ("model", "options", "world_size", "rule", "fault", "advice"),
    CASES,
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_misfit_says_its_rule_its_fault_and_the_way_out(model, options, world_size, rule, fault, advice):
    config = replace(CONFIG, **options)
    with pytest.raises(Misfit) as refused:
        config.check(model, world_size)
    error = refused.value
    assert (error.rule, error.fault, error.advice) == (rule, fault, advice)
    assert str(error) == f"{fault}: {advice}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # ranks send their errors


def test_of_a_model_that_is_given_no_other_size_is_advised():
    for options, expected in [
        ({"tp_size": 3}, "use tp_size 1, 2, 4 or 8"),
        ({"pp_size": 16}, "use fewer stages"),
    ]:
        with pytest.raises(Misfit) as refused:
            replace(CONFIG, **options).check_model(MODEL, is_given=True)
        assert refused.value.advice == expected


def test_selective_recomputation_is_for_attention_that_is_not_fused():
    selective = replace(CONFIG, recompute="selective")
    selective.check_recompute(fused_attention=False)
    with pytest.raises(Misfit, match="as fused attention does anyway: use recompute='none'"):
        selective.check_recompute(fused_attention=True)
    replace(CONFIG, recompute="full").check_recompute(fused_attention=True)


def test_it_consists_of_numbers_and_words():
    for field in fields(ParallelConfig):
        value = getattr(CONFIG, field.name)
        assert value is None or isinstance(value, int | str)
