"""A config that does not fit, alone or with a number of ranks, is refused before anything runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.labtrain.tiny import TINY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"steps": "4"}, "steps='4' must be a whole number"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1 must be at least 1"),
        ({"hidden_size": 16.0}, "hidden_size=16.0 must be a whole number"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"eval_interval": 1.5}, "eval_interval=1.5 must be a whole number"),
        ({"save_interval": 1.5}, "save_interval=1.5 must be a whole number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number from 0 up, of at most 63 bits"),
        ({"seed": 1 << 63}, "seed=9223372036854775808 must be a whole number from 0 up, of at most 63 bits"),
        ({"clip_norm": math.nan}, "clip_norm=nan must be a number from 0 to 1000"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1' must be a number from 0 to 1000"),
        ({"weight_decay": 1e308}, "weight_decay=1e+308 must be a number from 0 to 1000"),
        ({"min_learning_rate": -1}, "min_learning_rate=-1 must be a number from 0 to 1000"),
        ({"min_learning_rate": 0.02}, "min_learning_rate=0.02 is above learning_rate=0.01, so the rate would rise"),
        ({"learning_rate": math.inf}, "learning_rate=inf must be a number from 0 to 1000"),
        ({"learning_rate": 1e308}, "learning_rate=1e+308 must be a number from 0 to 1000"),
        ({"learning_rate": None}, "learning_rate=None must be a number from 0 to 1000"),
        ({"learning_rate": 0.0}, "learning_rate=0 learns nothing: use a number above 0, such as 0.003"),
        ({"dropout": 1.0}, "dropout=1.0 must be in [0, 1)"),
        ({"dropout": "0.1"}, "dropout='0.1' must be in [0, 1)"),
        ({"text": 3}, "text=3 is not a file: name one, or use 'invented'"),
        ({"precision": "float16"}, "precision='float16' is unknown: use float32, float64 or bfloat16"),
        ({"num_attention_heads": 3}, "does not divide hidden_size=16: use num_attention_heads 1, 2, 4, 8 or 16, or"),
        ({"tp_size": 3}, "tp_size=3 does not divide num_attention_heads=8: use tp_size 1, 2, 4 or 8, or"),
        ({"cp_size": 2, "dropout": 0.1}, "dropout=0.1 does not work with cp_size=2: use dropout=0"),
        ({"norm": "batchnorm"}, "norm='batchnorm' is unknown: use layernorm or rmsnorm"),
        ({"positions": "rope", "num_attention_heads": 16}, "a head has 1: use a num_attention_heads that leaves"),
        ({"resume": True}, "resume=True needs a checkpoint_dir: name a folder"),
        ({"recompute": True}, "recompute=True is unknown: use none, selective or full"),
        ({"recompute": "selective"}, "recompute='selective' computes the scores again, as fused attention does"),
        ({"keep": -1}, "keep=-1 must be at least 0"),
        ({"keep": 2}, "keep=2 needs a checkpoint_dir: name a folder"),
        ({"checkpoint_dir": 3}, "checkpoint_dir=3 is not a folder: name one, or leave it out"),
        ({"checkpoint_dir": ""}, "checkpoint_dir='' is not a folder: name one, or leave it out"),
        ({"save_interval": 5}, "save_interval=5 needs a checkpoint_dir: name a folder"),
        ({"text": "no/such/file"}, "the text no/such/file cannot be read (No such file or directory): name a file"),
        ({"text": "."}, "the text . is a folder, a pipe or a device: name a file"),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(options, message):
    """Where the layout does not fit, the sentences are labkit's (tests/labkit/test_parallel_config.py)."""
    with pytest.raises(ValueError) as caught:
        replace(TINY, **options)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    config = replace(TINY, steps=np.int64(4), hidden_size=np.int32(16), learning_rate=np.float32(0.5))
    assert (type(config.steps), type(config.hidden_size)) == (int, int)
    assert config == replace(TINY, steps=4, hidden_size=16, learning_rate=0.5)


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (6, {"tp_size": 4}, "tp_size=4 * pp_size=1 = 4 does not divide world_size=6"),
        (3, {}, "dp_size=3 * micro_batch_size=2 = 6 does not divide batch_size=8: use batch_size 6 or 12"),
        (8, {}, "dp_size=8 * micro_batch_size=2 = 16 does not divide batch_size=8: use batch_size 16"),
        (8, {"order": "tp-dp"}, "order='tp-dp'"),
    ],
    ids=str,
)
def test_a_world_that_does_not_fit_is_refused(world_size, options, message):
    with pytest.raises(ValueError) as caught:
        replace(TINY, **options).layout(world_size)
    assert message in str(caught.value)


def test_how_many_layers_each_stage_has():
    uneven = replace(TINY, num_layers=10, pp_size=2, schedule="v-half", first_stage_layers=np.int64(1))
    assert uneven.layers_per_stage(10) == (1, 3, 3, 3)
    listed = replace(TINY, pp_size=2, stage_layers=np.array([1, 3]))
    assert listed == replace(TINY, pp_size=2, stage_layers=[1, 3])
    assert listed.stage_layers == listed.layers_per_stage(4) == (1, 3)
    resized = replace(listed, fit_ranks=True, tp_size=2).resize_to(2)  # a list is for its number of stages
    assert (resized.tp_size, resized.pp_size) == (1, 2)
    with pytest.raises(ValueError, match="fit 3 ranks: use 2 ranks, or leave out stage_layers, which keep pp_size=2"):
        replace(listed, fit_ranks=True).resize_to(3)
    both = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert replace(TINY, num_layers=6, pp_size=4, **both).layers_per_stage(6) == (1, 2, 2, 1)
    assert replace(TINY, pp_size=4).layers_per_stage(4) == (1, 1, 1, 1)


@pytest.mark.parametrize(("learning_rate", "least"), [(1e-4, 1e-5), (3e-3, 3e-4)])
def test_without_a_minimum_the_rate_falls_to_a_tenth(learning_rate, least):
    """Also in a config that was changed after it was made."""
    config = replace(TINY, min_learning_rate=None)
    config = replace(config, learning_rate=learning_rate, warmup_steps=1, steps=100)
    rates = [config.learning_rate_at(step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == pytest.approx((learning_rate, least))


@pytest.mark.parametrize(
    ("world_size", "batch_size", "sizes"),
    [
        (8, 8, (2, 2, 2)),  # which fit as they are
        (24, 12, (2, 2, 2)),
        (24, 8, (2, 2, 3)),  # three replicas cannot share 8 rows in micro-batches of 2
        (12, 12, (2, 2, 3)),  # rather than more layers on a rank than before
        (6, 8, (2, 1, 3)),
        (4, 8, (2, 2, 1)),
        (2, 8, (2, 1, 1)),
        (9, 12, (1, 1, 3)),
        (1, 8, (1, 1, 1)),
    ],
)
def test_sizes_that_fit_the_ranks_that_are_left(world_size, batch_size, sizes):
    """tp and then cp keep what they can, pp grows before it shrinks, and what remains must share the batch."""
    asked = replace(TINY, tp_size=2, cp_size=2, pp_size=2, batch_size=batch_size)
    config = replace(asked, fit_ranks=True)
    resized = config.resize_to(world_size)
    assert (resized.tp_size, resized.cp_size, resized.pp_size) == sizes
    assert resized.layout(world_size).world_size == world_size
    assert (resized is config) == (sizes == (2, 2, 2))
    assert asked.resize_to(world_size) is asked


def test_ranks_that_no_sizes_fit():
    config = replace(TINY, tp_size=2, pp_size=2, fit_ranks=True)
    with pytest.raises(ValueError, match="no tp, cp and pp fit 10 ranks: use 8 ranks"):
        config.resize_to(10)
    with pytest.raises(
        ValueError, match="no tp, cp and pp fit 2 ranks: use a batch_size that micro_batch_size divides"
    ):
        replace(config, batch_size=7).resize_to(2)
