"""Rows, layers and chunks are dealt out completely, each to one place; what cannot be cut is refused."""

import re

import pytest

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
    with pytest.raises(ValueError, match="dp_size=3 does not divide batch_size=8: use dp_size 1, 2, 4 or 8, or batch_"):
        rows_of_replica(8, 3, 0)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(8, 4), (10, 4), (3, 3), (7, 2), (5, 1)])
def test_every_layer_is_on_one_stage_and_stages_differ_by_one_layer_at_most(num_layers, num_stages):
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


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "rules", "said"),
    [
        (6, 2, {"stage_layers": [2, 3]}, "stage_layers=[2, 3] gives stages of [2, 3] layers, but num_stages=2 must"),
        (6, 3, {"stage_layers": [3, 3]}, "num_stages=3 must have 1 layer or more each, and num_layers=6 together: "),
        (6, 2, {"stage_layers": [6, 0]}, "stage_layers=0 must be at least 1"),
        (6, 2, {"stage_layers": [3.0, 3]}, "stage_layers=3.0 must be a whole number"),
        (6, 2, {"stage_layers": 3}, "stage_layers=3 must be a list: give one number for each stage"),
        (6, 3, {"first_stage_layers": 5}, "first_stage_layers=5 gives stages of [5, 0, 1] layers, but"),
        (6, 2, {"first_stage_layers": 2, "last_stage_layers": 3}, "last_stage_layers=3 gives stages of [2, 3] layers"),
        (6, 3, {"first_stage_layers": 4, "last_stage_layers": 4}, "gives stages of [4, -2, 4] layers, but"),
        (6, 1, {"first_stage_layers": 2}, "gives stages of [2] layers, but num_stages=1 must"),
        (6, 3, {"last_stage_layers": 0}, "last_stage_layers=0 must be at least 1"),
        (2, 4, {}, "an equal split gives stages of [0, 1, 0, 1] layers, but"),
        (6.0, 2, {}, "num_layers=6.0 must be a whole number"),
        (6, 0, {}, "num_stages=0 must be at least 1"),
        (2, 2, {"account_for_embedding_in_pipeline_split": True}, "=True gives stages of [0, 2] layers, but"),
        (6, 2, {"stage_layers": [3, 3], "first_stage_layers": 3}, "first_stage_layers=3: two of these say how many"),
        (6, 2, {"stage_layers": [3, 3], **BOTH}, "in_pipeline_split=True: two of these say how many layers one stage"),
        (6, 2, {"first_stage_layers": 2, **BOTH}, "in_pipeline_split=True: two of these say how many layers one stage"),
        (6, 2, {"last_stage_layers": 2, **BOTH}, "in_pipeline_split=True: two of these say how many layers one stage"),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_do_not_add_up_are_refused_with_a_way_out(num_layers, num_stages, rules, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        split_layers(num_layers, num_stages, **rules)


@pytest.mark.parametrize("stage", [4, -1, 1.0])
def test_a_stage_that_is_not_there_has_no_layers(stage):
    with pytest.raises(ValueError, match=rf"stage={stage} is not one of num_stages=4: use 0 to 3"):
        layers_of_stage(10, stage, 4)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_element_is_in_a_chunk_of_one_rank_and_ranks_share_each_fused_matrix(tp_size, stride):
    size = 24
    ranks = [chunks_of_rank(size, tp_size, rank, stride) for rank in range(tp_size)]
    assert sorted(index for chunks in ranks for chunk in chunks for index in chunk) == list(range(size))
    matrix = size // stride
    for rank, chunks in enumerate(ranks):
        for number, chunk in enumerate(chunks):
            start = number * matrix + rank * matrix // tp_size
            assert chunk == range(start, start + matrix // tp_size)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (4, "output_size", 10),
            "tp_size=4 does not divide output_size=10: use tp_size 1, 2, 5 or 10, or output_size 8 or 12",
        ),
        (
            (2, "output_size", 9, 3),
            "tp_size=2 * stride=3 = 6 does not divide output_size=9: use tp_size 1 or 3, or output_size 6 or 12",
        ),
        ((2, "output_size", 8, 3), "tp_size=2 * stride=3 = 6 does not divide output_size=8: use output_size 6 or 12"),
        ((4, "input_size", 3), "tp_size=4 does not divide input_size=3: use tp_size 1 or 3, or input_size 4"),
        ((1, "input_size", 8.0), "input_size=8.0 must be a whole number"),
        ((1, "input_size", "8"), "input_size='8' must be a whole number"),
        ((1, "input_size", -8), "input_size=-8 must be at least 1"),
        ((1, "input_size", 8, 0), "stride=0 must be at least 1"),
    ],
)
def test_a_dim_that_cannot_be_cut_is_refused(arguments, text):
    with pytest.raises(ValueError) as error:
        check_divides(*arguments)
    assert str(error.value) == text


def test_the_advice_of_a_refusal_is_accepted():
    check_divides(2, "output_size", 10)
    check_divides(4, "output_size", 12)
    check_divides(4, "hidden_size", 12, parts_name="num_attention_heads")
    for number in range(1, 30):
        for of in range(1, 12):
            for multiple in multiples_near(number, of):
                check_divides(of, "size", multiple)
