"""Pretends to be several ranks, as threads of this process that exchange tensors: for the exercises' own functions.

A small change to a solution may leave real ranks waiting for ever. Here a rank that fails frees the others at once, and
no process starts. What a learner has written always runs on real ranks.
"""

import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from course.exercises.calling import Raised, unwritten_memory_shows


class _Message(NamedTuple):
    op: Callable
    tensor: torch.Tensor
    peer: int


class _Done:
    def wait(self) -> None:
        """Return at once: a pretended message has come when it is sent."""


class _Meeting:
    """What the members of a group have brought to their collectives: the first of all, the second, and so on."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = list(ranks)
        self.brought: dict[int, list] = {rank: [] for rank in self.ranks}


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
        self.messages: dict[tuple[int, int], deque] = defaultdict(deque)
        self.changed = threading.Condition()
        self.alive, self.waiting = set(everybody), {}
        found: list = [None] * self.world_size

        def on_rank(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = function(rank)
            except Exception as error:
                found[rank] = Raised(f"{type(error).__name__}: {error}")
            with self.changed:
                self.alive.remove(rank)
                self.changed.notify_all()

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

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for the others; fail if none of them can go on."""
        with self.changed:
            self.waiting[self.here.rank] = ready
            self.changed.notify_all()
            try:
                while not ready():
                    if self.waiting.keys() >= self.alive and not any(each() for each in self.waiting.values()):
                        raise RuntimeError("no rank can go on")
                    self.changed.wait()
            finally:
                del self.waiting[self.here.rank]

    def _meet(self, group, what: str, value) -> list:
        """Return what all members of a group have brought; fail if one has called something else."""
        meeting = group or self.world
        number = len(meeting.brought[self.here.rank])
        meeting.brought[self.here.rank].append((what, value))
        self._wait_until(lambda: all(len(brought) > number for brought in meeting.brought.values()))
        found = [meeting.brought[rank][number] for rank in meeting.ranks]
        if any(name != what for name, _ in found):
            raise RuntimeError("different operations meet")
        return [each for _, each in found]

    # -- the functions of torch.distributed that exercises use -----------------------------------------------------

    def get_rank(self, group=None) -> int:
        return (group or self.world).ranks.index(self.here.rank)

    def get_world_size(self, group=None) -> int:
        return len((group or self.world).ranks)

    def get_backend(self, group=None) -> str:
        return "gloo"

    def new_group(self, ranks: Sequence[int]) -> _Meeting | None:
        with self.changed:
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
                self.messages[self.here.rank, message.peer].append(message.tensor.clone())
        for message in messages:
            if message.op.__name__ == "irecv":
                arrived = self.messages[message.peer, self.here.rank]
                self._wait_until(lambda arrived=arrived: len(arrived) > 0)
                message.tensor.copy_(arrived.popleft())
        return [_Done() for _ in messages]


def _reduced(tensors: list[torch.Tensor], op) -> torch.Tensor:
    together = torch.stack(tensors)
    if op == dist.ReduceOp.MAX:
        return together.amax(0)
    return together.amin(0) if op == dist.ReduceOp.MIN else together.sum(0)
