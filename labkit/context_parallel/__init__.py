"""Computes attention over a sequence that is split across a context-parallel group."""

from labkit.context_parallel.blockwise import all_gather_attention
from labkit.context_parallel.positions import Part, part_with_work, positions
from labkit.context_parallel.ring import ring_attention
from labkit.context_parallel.ulysses import ulysses_attention

__all__ = [
    "Part",
    "all_gather_attention",
    "part_with_work",
    "positions",
    "ring_attention",
    "ulysses_attention",
]
