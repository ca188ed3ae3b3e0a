"""Counts the bytes that autograd keeps for backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Saved:
    """The memory that was saved for backward, by its address."""

    def __init__(self):
        self.bytes_at: dict[int, int] = {}

    def total_bytes(self) -> int:
        """Return how many bytes were saved; each piece of memory counts once."""
        return sum(self.bytes_at.values())


@contextmanager
def saved_for_backward(weights: Iterable[torch.Tensor] = ()) -> Iterator[Saved]:
    """Note every tensor that autograd saves inside, except the ``weights``, which exist anyway.

    >>> x = torch.ones(5, requires_grad=True)
    >>> with saved_for_backward() as saved:
    ...     y = x.exp()
    >>> saved.total_bytes()
    20
    """
    saved, own = Saved(), {weight.untyped_storage().data_ptr() for weight in weights}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            saved.bytes_at[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
