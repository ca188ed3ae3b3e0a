"""Rows, layers and chunks are dealt out completely, each to one place; what cannot be cut is refused."""

import pytest

from labkit.partition import check_divides, chunks_of_rank, layers_of_stage, multiples_near, rows_of_replica


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


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_element_is_in_a_chunk_of_one_rank_and_ranks_share_each_fused_matrix(tp_size, stride):
    size = 24
    ranks = [chunks_of_rank(size, tp_size, rank, stride) for rank in range(tp_size)]
    assert sorted(place for chunks in ranks for chunk in chunks for place in chunk) == list(range(size))
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
