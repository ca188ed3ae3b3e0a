"""Rows, layers and chunks are dealt out completely, each to one place; what cannot be cut is refused."""

import pytest

from labkit.partition import BatchCut, check_divides, chunks_of_rank, layers_of_stage, multiples_near

CUTS = [(128, 4, 1), (128, 4, 2), (96, 3, 4), (8, 1, 1), (16, 16, 1), (1024, 16, 8)]


@pytest.mark.parametrize("sizes", CUTS)
def test_every_row_is_seen_once(sizes):
    cut = BatchCut(*sizes)
    pieces = [cut.rows(rank, number) for rank in range(cut.dp_size) for number in range(cut.num_micro_batches)]
    assert [row for rows in pieces for row in rows] == list(range(cut.batch_size))
    assert {len(rows) for rows in pieces} == {cut.micro_batch_size}
    replicas = [cut.rows_of_replica(rank) for rank in range(cut.dp_size)]
    assert [row for rows in replicas for row in rows] == list(range(cut.batch_size))


def test_rows_are_what_chunk_deals_out():
    torch = pytest.importorskip("torch")
    cut, rows = BatchCut(96, 3, 4), torch.arange(96)
    for rank in range(3):
        for number in range(4):
            assert rows.chunk(3)[rank].chunk(4)[number].tolist() == list(cut.rows(rank, number))
        assert rows.chunk(3)[rank].tolist() == list(cut.rows_of_replica(rank))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((128, 3, 1), "= 3 does not divide batch_size=128: use batch_size 126 or 129"),
        ((4, 4, 2), "dp_size=4 * num_micro_batches=2 = 8 does not divide batch_size=4: use batch_size 8"),
        ((0, 1, 1), "batch_size=0 must be at least 1"),
        ((8, 1, -1), "num_micro_batches=-1 must be at least 1"),
        ((8.0, 1, 1), "batch_size=8.0 must be a whole number"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(sizes, text):
    with pytest.raises(ValueError) as error:
        BatchCut(*sizes)
    assert text in str(error.value)


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
