"""Rotary positions: angles of a base, and products that depend on distances only."""

import pytest
import torch

from labkit.tensor_parallel.blocks import apply_rotary, rotation


@pytest.mark.parametrize(("options", "base"), [({}, 10_000.0), (dict(base=500_000.0), 500_000.0)])
def test_a_pair_turns_by_its_power_of_the_base(options, base):
    """A pair is a complex number, which is multiplied by one of length 1."""
    positions, x = torch.tensor([0, 3, 8191]), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    got = apply_rotary(x, rotation(positions, 8, x.dtype, **options))
    angles = positions[:, None] * torch.tensor([base ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(got, torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-11)
