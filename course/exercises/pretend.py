"""Pretends to be several ranks, as threads of this process that exchange tensors: for the exercises' own functions.

A small change to a solution may leave real ranks waiting for ever. Here a rank that fails frees the others at once, and
no process starts. What a learner has written always runs on real ranks.
"""

import queue
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from course.exercises.calling import Raised, unwritten_memory_shows

_SECONDS = 0.1  # the longest that one waits for another: they compute for less than a millisecond


class _Message(NamedTuple):
    op: Callable
    tensor: torch.Tensor
    peer: int


class _Done:
    def wait(self) -> None:
        """Return at once: a pretended message has come when it is sent."""


class _Meeting:
    """Where the members of a group meet to exchange what they have."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks, self.barrier = list(ranks), threading.Barrier(len(ranks), timeout=_SECONDS)
        self.slots: dict[int, Any] = {}

    def exchange(self, rank: int, what: str, value) -> list:
        """Return what all members have; fails if one calls something else."""
        self.slots[rank] = what, value
        self.barrier.wait()
        found = [self.slots[each] for each in self.ranks]
        self.barrier.wait()
        if any(name != what for name, _ in found):
            raise RuntimeError("different operations meet")
        return [each for _, each in found]


class PretendedRanks:
    """``run`` calls functions on all of the pretended ranks, each in a thread, and returns their answers in order."""

    def __init__(self, world_size: int, names: dict[str, Any] | None = None):
        """``names`` are those of a module that has functions of torch.distributed under names of its own."""
        self.world_size, self.here = world_size, threading.local()
        self.names = names or {}

    def run(self, function: Callable[[int], Any]) -> list:
        """Return what the function returns on each rank, or what it raises."""
        everybody = tuple(range(self.world_size))
        self.world, self.groups = _Meeting(everybody), {}
        self.messages: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
        self.lock, found = threading.Lock(), [None] * self.world_size

        def on_rank(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = function(rank)
            except Exception as error:
                found[rank] = Raised(f"{type(error).__name__}: {error}")  # type: ignore[call-overload]
                for meeting in (self.world, *self.groups.values()):
                    meeting.barrier.abort()

        with ExitStack() as stack:
            stack.enter_context(unwritten_memory_shows())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            own = {name: getattr(self, name) for name in self.names if name.endswith("_single") and hasattr(self, name)}
            stack.enter_context(patch.dict(self.names, own))
            for name in (each for each in dir(self) if not each.startswith("_") and hasattr(dist, each)):
                stack.enter_context(patch.object(dist, name, getattr(self, name)))
            threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in everybody]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    def _meet(self, group, what: str, value) -> list:
        return (group or self.world).exchange(self.here.rank, what, value)

    # -- the functions of torch.distributed that exercises use -----------------------------------------------------

    def get_rank(self, group=None) -> int:
        return (group or self.world).ranks.index(self.here.rank)

    def get_world_size(self, group=None) -> int:
        return len((group or self.world).ranks)

    def get_backend(self, group=None) -> str:
        return "gloo"

    def new_group(self, ranks: Sequence[int]) -> _Meeting | None:
        with self.lock:
            meeting = self.groups.setdefault(tuple(ranks), _Meeting(ranks))
        return meeting if self.here.rank in ranks else None

    @torch.no_grad()
    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        tensor.copy_(_reduced(self._meet(group, f"all_reduce {op} {tensor.shape}", tensor.clone()), op))

    @torch.no_grad()
    def all_gather(self, tensors, tensor, group=None) -> None:
        for into, part in zip(tensors, self._meet(group, f"all_gather {tensor.shape}", tensor.clone()), strict=True):
            into.copy_(part)

    @torch.no_grad()
    def all_gather_single(self, output, tensor, group=None) -> None:
        parts = self._meet(group, f"all_gather {tensor.shape}", tensor.clone())
        output.copy_(torch.cat(parts).view(output.shape))

    @torch.no_grad()
    def reduce_scatter(self, output, tensors, op=dist.ReduceOp.SUM, group=None) -> None:
        everything = self._meet(group, f"reduce_scatter {op}", [tensor.clone() for tensor in tensors])
        output.copy_(_reduced([tensors[self.get_rank(group)] for tensors in everything], op))

    @torch.no_grad()
    def reduce_scatter_single(self, output, tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        self.reduce_scatter(output, list(tensor.chunk(self.get_world_size(group))), op, group)

    @torch.no_grad()
    def all_to_all_single(self, output, tensor, output_splits=None, input_splits=None, group=None) -> None:
        sizes = input_splits or [len(tensor) // self.get_world_size(group)] * self.get_world_size(group)
        everything = self._meet(group, "all_to_all", [part.clone() for part in tensor.split(sizes)])
        parts = [parts[self.get_rank(group)] for parts in everything]
        if output_splits and [len(part) for part in parts] != output_splits:
            raise RuntimeError("different sizes")
        output.copy_(torch.cat(parts))

    def P2POp(self, op, tensor, peer) -> _Message:
        return _Message(op, tensor, peer)

    @torch.no_grad()
    def batch_isend_irecv(self, messages: list[_Message]) -> list[_Done]:
        for message in messages:
            if message.op.__name__ == "isend":
                self.messages[self.here.rank, message.peer].put(message.tensor.clone())
        for message in messages:
            if message.op.__name__ == "irecv":
                message.tensor.copy_(self.messages[message.peer, self.here.rank].get(timeout=_SECONDS))
        return [_Done() for _ in messages]


def _reduced(tensors: list[torch.Tensor], op) -> torch.Tensor:
    together = torch.stack(tensors)
    if op == dist.ReduceOp.MAX:
        return together.amax(0)
    return together.amin(0) if op == dist.ReduceOp.MIN else together.sum(0)
