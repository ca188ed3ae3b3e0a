"""Counts the bytes that are kept for backward: by autograd, or by anybody."""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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


class Made(TorchDispatchMode):
    """The memory that operations made, for as long as anything holds it."""

    def __init__(self, weights: Iterable[torch.Tensor]):
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._bytes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """Run the operation, and note the memory of what it returns."""
        results = operation(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, torch.Tensor):
                self._note(result.untyped_storage())
        return results

    def _note(self, memory: torch.UntypedStorage) -> None:
        if memory.data_ptr() not in self._weights:
            self._bytes[StorageWeakRef(memory)] = memory.nbytes()

    def held_bytes(self) -> int:
        """Return how many bytes exist now, or a moment later; each piece of memory counts once."""
        gc.collect()  # what only a cycle of Python objects still holds is on its way out
        time.sleep(0.2)  # and so is what a thread of gloo has just added up
        return sum(nbytes for memory, nbytes in self._bytes.items() if not memory.expired())


@contextmanager
def memory_made(weights: Iterable[torch.Tensor] = ()) -> Iterator[Made]:
    """Note all memory that operations make inside, whoever keeps it, except the ``weights`` seen through a view.

    >>> with memory_made() as made:
    ...     x = torch.ones(5, requires_grad=True)
    ...     y = (x + 1).exp().sum()  # keeps what exp returned; x + 1 is gone
    >>> made.held_bytes() - x.nbytes - y.nbytes
    20
    """
    with Made(weights) as made:
        yield made
