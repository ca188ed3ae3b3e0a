"""The shape of a GPT: its parameters against a published table and by hand."""

import pytest

from labkit.shape import GPT

# P in billions, h, l: table 1 of arXiv 2104.04473, with V = 51200 and s = 2048
TABLE = [
    (1.7, 2304, 24), (3.6, 3072, 30), (7.5, 4096, 36), (18.4, 6144, 40), (39.1, 8192, 48),
    (76.1, 10240, 60), (145.6, 12288, 80), (310.1, 16384, 96), (529.6, 20480, 105), (1008.0, 25600, 128),
]  # fmt: skip


@pytest.mark.parametrize(("billions", "hidden_size", "num_layers"), TABLE)
def test_parameters_of_the_paper(billions, hidden_size, num_layers):
    model = GPT(num_layers, hidden_size, seq_length=2048, vocab_size=51200)
    assert round(model.num_parameters / 1e9, 1) == billions


def test_parameters_counted_piece_by_piece():
    h, vocab_size, seq_length = 4, 10, 8
    attention = (h * 3 * h + 3 * h) + (h * h + h)  # query, key and value; projection
    mlp = (h * 4 * h + 4 * h) + (4 * h * h + h)
    norms = 2 * (h + h)
    embeddings = vocab_size * h + seq_length * h
    model = GPT(num_layers=2, hidden_size=h, seq_length=seq_length, vocab_size=vocab_size)
    assert model.num_parameters == 2 * (attention + mlp + norms) + embeddings == 560
