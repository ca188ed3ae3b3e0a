"""Flattens parameters into a buffer that ranks gather and free, and of which each rank keeps a
shard.

A buffer of n numbers is divided into d equal shards, whose borders may fall inside a parameter. So
one all-gather fills the buffer without a copy, and one reduce-scatter reduces its gradients.
Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277), sections 3.2.1 (flat parameters)
and 4.2.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from labkit.collectives import all_gather_single, reduce_scatter_single
from labkit.data_parallel.borders import Missing, refuse
from labkit.data_parallel.gradients import GroupsOf, average_over
from labkit.data_parallel.replicas import grad_dtype_of, like
from labkit.groups import local_device
from labkit.placement import FlatShard, placement_of, set_placement

# Of each parameter, as torch allocates it alone: matmuls are as fast, and round the same.
ALIGNMENT_BYTES = 64
# Parameter -> each module that has it, and its name there.
Owners = dict[nn.Parameter, list[tuple[nn.Module, str]]]
Form = Literal["unsharded", "shard", "missing"]


@dataclass(eq=False)
class ShardedParameter:
    """A parameter in its three forms, the modules that have it, and its slices of the buffer and
    the shard.
    """

    shard: nn.Parameter  # [m], what this rank keeps and the optimizer updates
    unsharded: nn.Parameter  # what the module computes with
    missing: Missing  # what the module has while other units compute
    owners: list[tuple[nn.Module, str]]
    in_buffer: slice
    in_shard: slice
    has_grad: bool = False  # on this rank, since `assign_grads`


class FlatParameter:
    """Parameters of one kind, flattened into a buffer [n] that has memory only while gathered, and
    a shard [n/d].

    Communication: `gather` all-gathers the shards into the buffer; `start_reduce` reduce-scatters
    gradients laid out like the buffer, so each rank gets the sum of its shard; `start_average`
    all-reduces that sum over the ranks with the same shard. In the first two a rank sends (d-1)/d n
    numbers, in the last one 2(r-1)/r n/d for r replicas.

    Sharded parameters are views of the shard, unsharded ones of the buffer. Autograd saves the
    unsharded ones for backward, so these tensors stay while their memory is freed and allocated
    again. Micro-batches accumulate in ``sum``, reduced over this group, or in ``average``, reduced
    over the replicas of hybrid sharding too.
    """

    def __init__(self, owners: Owners, groups: GroupsOf, unit: str):
        first = next(iter(owners))
        self.groups, self.divisor = average_over(placement_of(*owners[first][0]), groups)
        *self.replicas, self.group = self.groups  # the shard group is the last one
        self.is_trained = first.requires_grad
        self.grad_dtype = grad_dtype_of(first)

        # Parameters follow each other, each padded to the alignment; the last shard is padded too.
        # With an alignment of 4, a of 5 and b of 3 numbers on 2 ranks: aaaaa... | bbb.
        # On 3 ranks, the borders of shards fall inside a: aaaa | a... | bbb.
        align = ALIGNMENT_BYTES // first.element_size()
        padded = [-(-p.numel() // align) * align for p in owners]
        size = max(1, -(-sum(padded) // self.group.size()))  # of a shard
        self.offset = size * self.group.rank()
        device = local_device() if first.is_meta else first.device
        self.buffer = torch.zeros(size * self.group.size(), dtype=first.dtype, device=device)
        self.shard = self.buffer.new_zeros(size)
        self.parameters: list[ShardedParameter] = []
        starts = accumulate(padded, initial=0)
        for (p, owners_of_p), start in zip(owners.items(), starts):
            self.parameters.append(self._divide(p, owners_of_p, start, unit))

        self.num_changes = 0  # of the shard
        self.version = -1  # of the shard, when it was last gathered
        self.gather_work: Any = None
        self.reduce_work: Any = None
        self.pending_sum = self.sum = self.pending_average = self.average = None

    def _divide(
        self, p: nn.Parameter, owners: list[tuple[nn.Module, str]], start: int, unit: str
    ) -> ShardedParameter:
        end = start + p.numel()
        in_buffer = slice(start, end)
        in_shard = slice(self._clamped(start - self.offset), self._clamped(end - self.offset))
        # .data: autograd must not see that the buffer's memory changes.
        unsharded = like(p, self.buffer[in_buffer].view(p.shape).data)
        if not p.is_meta:
            unsharded.data.copy_(p)
        flat = FlatShard(p.shape, max(self.offset - start, 0), tuple(self.replicas))
        shard = like(p, self.shard[in_shard]) if p.is_meta else p
        for module, name in owners:
            set_placement(module, name, replace(placement_of(module, name), flat=flat))
        shard.grad = None
        shard.data = self.shard[in_shard]
        missing = shard.detach().as_subclass(Missing)
        module, name = owners[0]
        rule = f"is used outside the forward of {unit}, where each rank has only a shard of it"
        way_out = "use it inside, or leave the modules that use it to the root"
        missing.why = f"{name} of {unit} (a {type(module).__name__}) {rule}: {way_out}"
        if self.is_trained:
            shard.register_post_accumulate_grad_hook(partial(refuse, missing.why))
        return ShardedParameter(shard, unsharded, missing, owners, in_buffer, in_shard)

    def _clamped(self, index: int) -> int:
        return min(max(index, 0), len(self.shard))

    def keep_shard(self) -> None:
        """Copy this rank's slice of the buffer to the shard."""
        self.shard.copy_(self.buffer[self.offset :][: len(self.shard)])
        self.num_changes += 1

    def gather(self, *, refresh: bool) -> None:
        """Start to gather the shards unless that is done or started; ``refresh``: again if this
        rank's has changed.
        """
        self._check_still_trained()
        memory = self.buffer.untyped_storage()
        version = self._shard_version()
        if memory.size() == 0 or (refresh and version != self.version):
            self.free()
            memory.resize_(self.buffer.nbytes)
            self.gather_work = all_gather_single(
                self.buffer, self.shard, group=self.group, async_op=True
            )
            self.version = version

    def _check_still_trained(self) -> None:
        for param in self.parameters:
            if param.shard.requires_grad != self.is_trained:
                module, name = param.owners[0]
                now = "frozen" if self.is_trained else "trained"
                raise ValueError(
                    f"{name} of a {type(module).__name__} is now {now}: change that before "
                    "you shard it"
                )

    def _shard_version(self) -> int:
        """Return a number that every change of the shard increments.

        The wrapper counts optimizer steps; other in-place changes increment the parameters'
        ``_version``.
        """
        return self.num_changes + sum(param.shard._version for param in self.parameters)

    def wait(self) -> None:
        if self.gather_work is not None:
            self.gather_work.wait()
            self.gather_work = None

    def free(self) -> None:
        self.wait()
        self.buffer.untyped_storage().resize_(0)

    def start_reduce(self) -> None:
        """Start to reduce-scatter the gradients, divided before the sum lest it overflow."""
        gradients = torch.empty_like(self.buffer, dtype=self.grad_dtype)
        for param in self.parameters:
            view = gradients[param.in_buffer].view(param.unsharded.shape)
            grad = param.unsharded.grad
            if grad is None:
                view.zero_()
            else:
                torch.div(grad.to_dense(), self.divisor, out=view)
            param.has_grad |= grad is not None
            param.unsharded.grad = None
        self.pending_sum = torch.empty_like(self.shard, dtype=self.grad_dtype)
        self.reduce_work = reduce_scatter_single(
            self.pending_sum, gradients, group=self.group, async_op=True
        )

    def finish_reduce(self) -> None:
        if self.pending_sum is not None:
            self.reduce_work.wait()
            self.sum = add(self.sum, self.pending_sum)
            self.reduce_work = self.pending_sum = None

    def start_average(self) -> None:
        """Start to all-reduce the sum over the replicas of hybrid sharding."""
        if self.sum is not None:
            self.finish_average()
            self.pending_average = self.sum
            self.sum = None
            self.average_works: list[Any] = [
                dist.all_reduce(self.pending_average, group=group, async_op=True)
                for group in self.replicas
            ]

    def finish_average(self) -> None:
        if self.pending_average is not None:
            for work in self.average_works:
                work.wait()
            self.average = add(self.average, self.pending_average)
            self.pending_average = None

    def assign_grads(self, on_any_rank: Iterable[float]) -> None:
        """Add the average to the gradients of the parameters whose flag is set."""
        assert self.average is not None
        for param, has_grad in zip(self.parameters, on_any_rank):
            if has_grad:
                param.shard.grad = add(param.shard.grad, self.average[param.in_shard])
            param.has_grad = False
        self.average = None

    def reset(self) -> None:
        self.finish_reduce()
        self.finish_average()
        self.sum = self.average = None
        for param in self.parameters:
            param.unsharded.grad = None
            param.has_grad = False


def add(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if total is None else total.add_(more)
