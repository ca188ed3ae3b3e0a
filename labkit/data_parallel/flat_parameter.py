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

# Each parameter starts at a multiple of this, as if torch had allocated it alone: so matrix
# products are as fast as with separate tensors, and round the same.
ALIGNMENT_BYTES = 64
# Parameter -> each module that has it, and its name there.
Owners = dict[nn.Parameter, list[tuple[nn.Module, str]]]
# What a module has as its parameter: the whole one, this rank's part of it, or a stand-in that
# refuses to be used
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
        *self.replica_groups, self.group = self.groups  # the shard group is the last one
        if len(self.replica_groups) > 1:  # their sums would be added up in one tensor at a time
            fault = f"{unit} has {len(self.replica_groups)} replicate groups"
            raise ValueError(f"{fault}: give one, over all ranks with the same shard")
        self.is_trained = first.requires_grad
        self.grad_dtype = grad_dtype_of(first)

        # Parameters follow each other, each padded to the alignment; the last shard is padded too.
        # With an alignment of 4, a of 5 and b of 3 numbers on 2 ranks: aaaaa. | ..bbb.
        # (shards of 6). On 3 ranks a border falls inside a: aaaa | a... | bbb.
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
        self.pending_sum: Any = None  # of one backward: its reduce-scatter is under way
        self.sum: Any = None  # of the backward passes before
        self.pending_average: Any = None  # its all-reduce over the replicas is under way
        self.average: Any = None  # complete: `assign_grads` hands it out
        self.average_works: list[Any] = []

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
        flat = FlatShard(p.shape, max(self.offset - start, 0), tuple(self.replica_groups))
        # The parameter object itself becomes the shard, so that an optimizer that has it keeps it.
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
            # Autograd gives a shard a gradient only if it was used outside its unit.
            shard.register_post_accumulate_grad_hook(partial(refuse, missing.why))
        return ShardedParameter(shard, unsharded, missing, owners, in_buffer, in_shard)

    def _clamped(self, index: int) -> int:
        return min(max(index, 0), len(self.shard))

    def keep_shard(self) -> None:
        """Copy this rank's slice of the buffer to the shard."""
        self.shard.copy_(self.buffer[self.offset :][: len(self.shard)])
        self.num_changes += 1

    def gather(self, *, refresh: bool) -> None:
        """Start to gather the shards, unless the buffer has memory. With ``refresh``, gather again
        if this rank's shard has changed.
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
        """Start to reduce-scatter the gradients, divided before the sum lest it overflow.

        Until they are packed, a unit's gradients exist twice, as in FSDP2's copy-in.
        """
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
        """Start to all-reduce the sum over the replicas of hybrid sharding. Without replicas
        nothing is sent: the sum is the average.
        """
        if self.sum is not None:
            self.finish_average()
            self.pending_average = self.sum
            self.sum = None
            self.average_works = [
                dist.all_reduce(self.pending_average, group=group, async_op=True)
                for group in self.replica_groups
            ]

    def finish_average(self) -> None:
        if self.pending_average is not None:
            for work in self.average_works:
                work.wait()
            self.average = add(self.average, self.pending_average)
            self.pending_average = None

    def assign_grads(self, on_any_rank: Iterable[float]) -> None:
        """Add the average to the gradients of the parameters whose flag is set.

        ``on_any_rank`` may be an iterator that several flat parameters share: each takes its flags.
        """
        assert self.average is not None
        # The flags come last: zip would take one too many from the first that it asks.
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
