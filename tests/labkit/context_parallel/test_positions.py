"""Who holds which tokens, and who has what to do."""

import pytest
import torch

from labkit.context_parallel import part_with_work, positions
from labkit.sizes import divisors


@pytest.mark.parametrize(
    ("zigzag", "expected"),
    [
        (True, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ],
)
def test_positions_of_four_ranks(zigzag, expected):
    assert [positions(16, 4, rank, zigzag).tolist() for rank in range(4)] == expected


def test_one_rank_holds_everything_whatever_its_length():
    assert positions(5, cp_size=1, cp_rank=0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("c", divisors(4))
def test_the_parts_cover_the_mask_once(c, zigzag, causal):
    """Every pair that the mask allows is computed, by one part, and no pair that it forbids."""
    s = 8 * c
    seen, held = torch.zeros(s, s, dtype=torch.int), [positions(s, c, rank, zigzag) for rank in range(c)]
    for rank in range(c):
        for source in range(c):
            if part := part_with_work(rank, source, s // c, causal, zigzag):
                pairs = torch.ones(len(held[rank][part.queries]), len(held[source][part.keys]), dtype=torch.int)
                pairs = pairs.tril() if part.causal else pairs
                seen[held[rank][part.queries, None], held[source][part.keys]] += pairs
    expected = torch.ones_like(seen)
    assert torch.equal(seen, expected.tril() if causal else expected)
