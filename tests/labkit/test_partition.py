"""Rows, layers and chunks are dealt out completely, each to one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.partition import (
    check_divides,
    chunks_of_rank,
    layers_of_stage,
    multiples_near,
    rows_of_replica,
    split_layers,
)


def test_every_row_of_a_batch_is_on_one_replica():
    assert [list(rows_of_replica(6, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


@given(st.integers(1, 8), st.integers(0, 30))
def test_every_layer_is_on_one_stage_and_stages_differ_by_one_layer_at_most(num_stages, more_layers):
    num_layers = num_stages + more_layers
    stages = [layers_of_stage(num_layers, stage, num_stages) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    counts = [len(stage) for stage in stages]
    assert max(counts) - min(counts) <= 1


BOTH = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "rules", "expected"),
    [
        (126, 16, BOTH, (7, *[8] * 14, 7)),  # Llama 3: 128 with embedding and loss
        (126, 32, BOTH, (3, *[4] * 30, 3)),
        (7, 4, {"account_for_embedding_in_pipeline_split": True}, (1, 2, 2, 2)),
        (7, 4, {"account_for_loss_in_pipeline_split": True}, (2, 2, 2, 1)),
        (2, 1, BOTH, (2,)),
        (10, 4, {"first_stage_layers": 1}, (1, 3, 3, 3)),
        (10, 4, {"last_stage_layers": 1}, (3, 3, 3, 1)),
        (10, 4, {"first_stage_layers": 1, "last_stage_layers": 3}, (1, 3, 3, 3)),
        (5, 2, {"first_stage_layers": 1, "last_stage_layers": 4}, (1, 4)),
        (9, 3, {"first_stage_layers": 2, "account_for_loss_in_pipeline_split": True}, (2, 4, 3)),
        (10, 4, {"stage_layers": [1, 4, 2, 3]}, (1, 4, 2, 3)),
        (3, 1, {"first_stage_layers": 3}, (3,)),
    ],
    ids=str,
)
def test_stages_may_have_different_numbers_of_layers(num_layers, num_stages, rules, expected):
    split = split_layers(num_layers, num_stages, **rules)
    assert split == expected
    stages = [layers_of_stage(num_layers, stage, num_stages, split) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert tuple(map(len, stages)) == expected


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_every_element_is_in_a_chunk_of_one_rank_and_ranks_share_each_fused_matrix(tp_size, stride, chunk_size):
    size = tp_size * stride * chunk_size
    ranks = [chunks_of_rank(size, tp_size, rank, stride) for rank in range(tp_size)]
    assert sorted(index for chunks in ranks for chunk in chunks for index in chunk) == list(range(size))
    matrix = size // stride
    for rank, chunks in enumerate(ranks):
        for number, chunk in enumerate(chunks):
            start = number * matrix + rank * matrix // tp_size
            assert chunk == range(start, start + matrix // tp_size)


@given(st.integers(1, 100), st.integers(1, 12))
def test_the_advice_of_a_refusal_is_accepted(number, of):
    for multiple in multiples_near(number, of):
        check_divides(of, "size", multiple)
        assert abs(multiple - number) <= of
    assert any(multiple >= number for multiple in multiples_near(number, of))
