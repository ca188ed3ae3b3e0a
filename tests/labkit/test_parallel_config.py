"""How a model lies over ranks, and what follows from the number of ranks. Refusals are in test_refusals.py."""

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


def test_numbers_of_numpy_become_pythons_own():
    config = replace(CONFIG, tp_size=np.int64(2), expert_tp_size=np.int32(2))
    assert (type(config.tp_size), type(config.expert_tp_size)) == (int, int)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_leave_before_a_split_backward_has_them_where_zero_shards_them(schedule, zero_stage):
    config = replace(CONFIG, schedule=schedule, zero_stage=zero_stage)
    if zero_stage >= 2 and schedule not in ("gpipe", "1f1b", "interleaved"):
        with pytest.raises(Misfit, match="use zero_stage=1, or schedule='1f1b'"):
            config.check_zero()
    else:
        config.check_zero()


def test_selective_recomputation_is_for_attention_that_is_not_fused():
    selective = replace(CONFIG, recompute="selective")
    selective.check_recompute(fused_attention=False)
    replace(CONFIG, recompute="full").check_recompute(fused_attention=True)


def test_it_consists_of_numbers_and_words():
    for field in fields(ParallelConfig):
        value = getattr(CONFIG, field.name)
        assert value is None or isinstance(value, int | str)
