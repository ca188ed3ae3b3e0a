"""Averages gradients over replicas: first the naive way, then in buckets, overlapped with backward.

Backward runs from the last layer to the first, so the last layers' gradients are ready early.
`DataParallel` collects them in *buckets*, and all-reduces a full bucket while the gradients of
earlier layers are computed.
Source: Li et al., "PyTorch Distributed", VLDB 2020 (arXiv 2006.15704), section 3.2.
"""

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from labkit.data_parallel.replicas import (
    DataParallelBase,
    GradSync,
    Hook,
    check_replicas,
    copy_from_first,
    grad_dtype_of,
    materialize,
)
from labkit.groups import local_device
from labkit.placement import PlacedParameters, Placement, placed_parameters
from labkit.sizes import check_size

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
Groups = tuple[dist.ProcessGroup, ...]
# The groups over which a gradient is summed, by its parameter's `Placement.replica_group`; the key
# None is for parameters without one. A group in the tuple may be None: it is skipped.
GroupsOf = Mapping[Any, tuple[dist.ProcessGroup | None, ...]]


def average_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Average all gradients after backward, one message each.

    A parameter must have a gradient on all ranks or on none: otherwise some ranks wait forever.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= group.size()
            # NCCL takes no transposed tensor, and the gradient of a transposed weight is one.
            message = parameter.grad if parameter.grad.is_sparse else parameter.grad.contiguous()
            dist.all_reduce(message, group=group)
            parameter.grad.copy_(message)


class DataParallel(DataParallelBase):
    """A replica of a module whose gradients, after backward, are the average over the group.

    Communication:

    - when it is made: the first rank broadcasts parameters and buffers.
    - during backward: one all-reduce for each bucket, of its gradients and one flag for each
      parameter (does this rank have its gradient?). A bucket is sent when its last gradient is
      there and all buckets before it are sent. In a ring, a rank sends 2(d-1)/d numbers for each
      parameter.
    - at backward's end: each rank waits for all buckets, and the first rank broadcasts the module's
      buffers.

    If each rank's loss is the mean over equally many rows, these are the gradients of the mean over
    all rows. With gradient accumulation, let only the last backward communicate:

        for rows in micro_batches[:-1]:
            with model.no_sync():
                loss(model(rows)).backward()
        loss(model(micro_batches[-1])).backward()

    From its first backward on, ``parameter.grad`` is a view into its bucket: copy what should
    outlive the next step. A gradient that only some ranks have counts as zero on the others; one
    that no rank has is left as it is. A sparse gradient becomes dense. Gradients are sent in their
    parameter's ``grad_dtype``. All replicas start with the values of the group's first rank, and
    get its buffers (such as BatchNorm's running mean) with each average. A module on the meta
    device is materialized by its ``reset_parameters()``. The gradient of a
    parameter with a ``replica_group``, as an expert's, which fewer ranks share, is summed over that
    group, and divided by its ``grad_divisor``, by default the group's size.

    Args:
        bucket_bytes: a bucket is full when its parameters have this size; with 0, each
            parameter has its own message.
        overlap: send each bucket as soon as it is full, not all of them after backward.

    Raises:
        ValueError: on every rank, if the replicas' parameters or buffers differ in names, shapes or
            types, or if a DataParallel already averages one of them. In forward, if a parameter is
            in no bucket.
            In ``backward(create_graph=True)``, and in backward if the wrapper is gone.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_bytes=BUCKET_BYTES,
        overlap=True,
    ):
        super().__init__()
        bucket_bytes = check_size("bucket_bytes", bucket_bytes, least=0)
        _refuse_second_wrapper(module)
        check_replicas(module, group)
        materialize(module, local_device())
        placed = placed_parameters(module)
        for parameter, placement in placed.items():
            copy_from_first([parameter], placement.replica_group or group)
        copy_from_first(module.buffers(), group)
        self.module = module
        self.groups = (group,)
        self.overlap = overlap
        # Reversed: about the order in which backward computes the gradients.
        trained = {p: placed[p] for p in reversed(placed) if p.requires_grad}
        self._buckets = [_Bucket(kind, group) for kind in in_buckets(trained, bucket_bytes)]
        self._next_bucket = 0  # all ranks send buckets in the same order
        self._bucket_of = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        for parameter in self._bucket_of:
            # Hook holds self weakly: parameters must not keep the wrapper and its group alive.
            parameter.register_post_accumulate_grad_hook(Hook(self._arrived))

    def forward(self, *args, **kwargs):
        self._check_buckets_have_all()
        self._discard_failed_backward()
        outputs = self.module(*args, **kwargs)
        _refuse_backward_without(self, outputs)
        return outputs

    def _check_buckets_have_all(self) -> None:
        modules = [self.module]
        # The list grows while we walk it. module.parameters() would take three times as long,
        # before every micro-batch.
        for submodule in modules:
            modules += filter(None, submodule._modules.values())
            for param in submodule._parameters.values():
                if param is None or not param.requires_grad or param in self._bucket_of:
                    continue
                fault = f"this DataParallel does not average {self._name_of(param)}"
                cause = "which was frozen or missing when the wrapper was made"
                way_out = "delete the wrapper, and wrap the plain module"
                raise ValueError(f"{fault}, {cause}: {way_out}")

    def sync_gradients(self) -> None:
        """Send the remaining buckets, and wait for all.

        Autograd calls it at the end of each backward, except in `no_sync` and `reducing`:
        `DataParallelBase._begin_backward` queues that.
        """
        for bucket in self._buckets[self._next_bucket :]:
            bucket.start_reduce()
        for bucket in self._buckets:
            bucket.finish_reduce()
            bucket.assign_grads()
        copy_from_first(self.module.buffers(), *self.groups)
        self._next_bucket = 0

    def state_dict(self, *args, **kwargs):
        """Return the plain module's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """Load the plain module's state dict."""
        return self.module.load_state_dict(*args, **kwargs)

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, param in self.module.named_parameters() if param is parameter)

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Record that backward has computed this gradient; send the buckets that are complete."""
        if torch.is_grad_enabled():  # in backward only with create_graph=True
            name = self._name_of(parameter)
            fault = f"{name} got a gradient with a graph from backward(create_graph=True)"
            way_out = "use torch.autograd.grad(..., create_graph=True), then backward()"
            raise ValueError(f"{fault}, and the average has none: {way_out}")
        bucket = self._bucket_of[parameter]
        bucket.put(parameter)
        # Nothing to send yet. REDUCE_SHARDS is for sharded wrappers, and this one has no shards.
        if self._grad_mode in (GradSync.ACCUMULATE, GradSync.REDUCE_SHARDS):
            return
        self._begin_backward()  # from the first gradient on: sync_gradients comes at the end
        if not self.overlap:
            return
        if parameter in bucket.arrived:  # and may have been sent
            name = self._name_of(parameter)
            fault = f"{name} got a second gradient in one backward"
            cause = "as it does when two parts under reentrant checkpointing share it"
            way_out = "use checkpoint(..., use_reentrant=False), or overlap=False"
            raise ValueError(f"{fault}, {cause}: {way_out}")
        bucket.arrived.add(parameter)
        # In the buckets' order, which is the same on all ranks: a complete one waits for those
        # before it.
        for bucket in self._buckets[self._next_bucket :]:
            if not bucket.is_complete:
                break
            bucket.start_reduce()
            self._next_bucket += 1

    def _reset(self) -> None:
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.finish_reduce()
            bucket.arrived.clear()


def _refuse_second_wrapper(module: nn.Module) -> None:
    """Raise a ValueError if a wrapper already averages a parameter: both would divide
    its gradient.
    """
    for name, parameter in module.named_parameters():
        hooks = parameter._post_accumulate_grad_hooks or {}
        if any(isinstance(hook, Hook) and hook.method() is not None for hook in hooks.values()):
            raise ValueError(
                f"a DataParallel already averages {name}: use that wrapper, or delete it first"
            )


def _refuse_backward_without(wrapper: DataParallel, outputs: Any) -> None:
    """Let backward from these outputs raise a ValueError if the wrapper is gone: nothing would
    average the gradients. ``DataParallel(module, group)(x)`` keeps no reference to it.
    """
    reference = weakref.ref(wrapper)

    def check(gradient: torch.Tensor) -> None:
        if reference() is None:
            fault = "the DataParallel that made this output was deleted before backward"
            raise ValueError(f"{fault}: give the wrapper a name, and call that")

    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(check)


class _Bucket:
    """A flat buffer of some parameters' gradients, then one flag for each: whether it has a
    gradient.
    """

    def __init__(self, parameters: PlacedParameters, group: dist.ProcessGroup):
        self.parameters = list(parameters)
        first = self.parameters[0]
        [self.group], self.divisor = average_over(parameters[first], {None: (group,)})
        sizes = [parameter.numel() for parameter in parameters]
        dtype = grad_dtype_of(first)
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=first.device)
        *views, self.flags = self.buffer.split([*sizes, len(sizes)])
        self.views = {p: view.view_as(p) for p, view in zip(parameters, views)}
        self.arrived: set[nn.Parameter] = set()
        self.work: dist.Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all its gradients are there."""
        return len(self.arrived) == len(self.parameters)

    def put(self, parameter: nn.Parameter) -> None:
        """Make the gradient a view of the buffer, so that later micro-batches accumulate there."""
        view = self.views[parameter]
        assert parameter.grad is not None
        if parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad.to_dense())

    def start_reduce(self) -> None:
        """Start the all-reduce. A missing gradient counts as zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                self.views[parameter].zero_()
            else:
                self.put(parameter)
                self.arrived.add(parameter)
        if self.is_complete:
            self.flags.fill_(1)  # without a host-to-device copy, for which the host would wait
        else:
            self.flags.copy_(
                torch.tensor([parameter in self.arrived for parameter in self.parameters])
            )
        # Before the sum, so that it cannot overflow. The flags too: of these only matters whether
        # they are zero.
        self.buffer /= self.divisor
        self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)

    def finish_reduce(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def assign_grads(self) -> None:
        """Set the gradients that only other ranks had; the rest are views of the buffer already."""
        if not self.is_complete:
            for parameter, on_any_rank in zip(self.parameters, self.flags.tolist()):
                if on_any_rank:
                    parameter.grad = self.views[parameter]
        self.arrived.clear()


def average_over(placement: Placement, groups: GroupsOf) -> tuple[Groups, int]:
    """Return the groups over which to sum a gradient, and by what to divide it: the placement's
    ``grad_divisor``, or else the number of ranks in the groups.
    """
    replica_group = placement.replica_group
    candidates = groups.get(replica_group, (replica_group,))
    over = tuple(group for group in candidates if group is not None)
    size = math.prod(group.size() for group in over)
    if replica_group is not None and size != replica_group.size():
        raise ValueError(
            f"own_groups have {size} ranks in all, but their replica_group has "
            f"{replica_group.size()}: divide those"
        )
    return over, placement.grad_divisor or size


def in_buckets(parameters: PlacedParameters, bucket_bytes: float) -> list[PlacedParameters]:
    """Return parameters in buckets, each of one dtype, device and group; the last of each kind may
    not be full.
    """
    buckets: list[PlacedParameters] = []
    filling: dict[tuple, PlacedParameters] = {}
    for p, placement in parameters.items():
        kind = (
            p.dtype,
            grad_dtype_of(p),
            p.device,
            p.requires_grad,
            placement.replica_group,
            placement.grad_divisor,
        )
        if kind not in filling:
            filling[kind] = {}
            buckets.append(filling[kind])
        filling[kind][p] = placement
        if sum(param.nbytes for param in filling[kind]) >= bucket_bytes:
            del filling[kind]
    return buckets
