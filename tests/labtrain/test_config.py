"""What a config makes of its options, and how it fits the ranks that are there. (Refusals: test_refusals.py.)"""

from dataclasses import replace

import numpy as np
import pytest

from tests.labtrain.tiny import TINY


def test_numbers_of_numpy_are_numbers():
    config = replace(TINY, steps=np.int64(4), hidden_size=np.int32(16), learning_rate=np.float32(0.5))
    assert (type(config.steps), type(config.hidden_size)) == (int, int)
    assert config == replace(TINY, steps=4, hidden_size=16, learning_rate=0.5)


def test_how_many_layers_each_stage_has():
    uneven = replace(TINY, num_layers=10, pp_size=2, schedule="v-half", first_stage_layers=np.int64(1))
    assert uneven.layers_per_stage(10) == (1, 3, 3, 3)
    listed = replace(TINY, pp_size=2, stage_layers=np.array([1, 3]))
    assert listed == replace(TINY, pp_size=2, stage_layers=[1, 3])
    assert listed.stage_layers == listed.layers_per_stage(4) == (1, 3)
    resized = replace(listed, fit_ranks=True, tp_size=2).resize_to(2)  # a list is for its number of stages
    assert (resized.tp_size, resized.pp_size) == (1, 2)
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
