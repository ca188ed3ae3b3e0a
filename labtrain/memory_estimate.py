"""What a GPU holds when it is fullest: the four numbers that every estimate of memory
consists of.
"""

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MemoryEstimate:
    """What a GPU, or a rank, holds when it is fullest, in bytes.

    Not counted: what libraries allocate for themselves, fragmentation, and messages in flight.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = [f"{part.name} {gib(getattr(self, part.name))}" for part in fields(self)]
        return f"{gib(self.total)} ({', '.join(parts)})"


def gib(num_bytes: float) -> str:
    """Return a number of bytes as people read it: in GiB or, up to a quarter of one, in MiB."""
    if num_bytes > 2**28:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def node_memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
