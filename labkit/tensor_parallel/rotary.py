"""Rotates queries and keys by angles that grow with the position in the sequence (rotary positions).

A product of a query and a key then depends on how far they are apart. Nothing is learned, and no length is built in.
Numbers i and i + d/2 of a head make a pair, which is rotated by position * base^(-2i/d). Source: arXiv 2104.09864,
section 3.4, with the pairs as in Llama's code at Hugging Face.
"""

import torch


def rotation(positions: torch.Tensor, head_size: int, dtype: torch.dtype, base: float = 10_000.0) -> torch.Tensor:
    """Return the cosines and sines, [2, seq, head_size/2], for tokens at these positions, in float32 or better."""
    frequencies = base ** -(torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64) / head_size)
    angles = positions[:, None] * frequencies  # in float64: position 100,000 in float32 has an error of 0.01
    return torch.stack([angles.cos(), angles.sin()]).to(torch.promote_types(dtype, torch.float32))


def apply_rotary(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return queries or keys, [batch, heads, seq, head_size], rotated by the angles of their positions."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
