"""The average of all replicas' gradients, in buckets, while backward still computes.

Backward runs from the last layer to the first, so the last layers' gradients are there early. They are
collected in *buckets*, and a bucket that is full travels while the layers in front of it are computed.
Source: Li et al., "PyTorch Distributed", VLDB 2020 (arXiv 2006.15704), section 3.2.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from labkit.data_parallel.replicas import check_replicas, copy_from_first


class DataParallel(nn.Module):
    """A replica of a module whose gradients, when backward is done, are the average over the group.

    Every rank gives it other rows. If each rank's loss is the mean over equally many rows, the gradients are those
    of the mean over all rows. With gradient accumulation, let only the last backward communicate:

        for rows in micro_batches[:-1]:
            with model.no_sync():
                loss(model(rows)).backward()
        loss(model(micro_batches[-1])).backward()

    ``parameter.grad`` is a view into its bucket: copy what should outlive the next step. A parameter that got a
    gradient on some ranks only counts as zero on the others; one that got none anywhere keeps what it had.

    Args:
        bucket_bytes: a bucket is full when it holds this much; 0 gives each parameter a message of its own.
        overlap: send a bucket as soon as it is full. Without, all are sent when backward is done.

    Raises:
        ValueError: the replicas' parameters or buffers are not the same in names, shapes and types; on every
            rank, at construction. Their values are those of the group's first rank afterwards. In forward: a
            parameter that was frozen then is trained now, and has no place in a bucket.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, *, bucket_bytes: int = 25 * 2**20, overlap: bool = True
    ):
        super().__init__()
        if bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} is no size: use 0 for a message per parameter, or more")
        check_replicas(module, group)
        copy_from_first(module, group)
        self.module, self.group, self.overlap = module, group, overlap
        self._accumulating = self._in_backward = False
        self._buckets = _make_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._next = 0  # the bucket to be sent next: all ranks send them in one order
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        me = weakref.ref(self)  # a parameter that held its replica would keep the group alive, with threads and sockets
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(lambda p: replica._arrived(p) if (replica := me()) else None)

    def forward(self, *args, **kwargs):
        for parameter in self._frozen:
            if parameter.requires_grad:
                name = self._name_of(parameter)
                raise ValueError(
                    f"{name} was frozen when DataParallel was made, so that its gradient is not averaged: unfreeze it "
                    "before that, or make DataParallel again"
                )
        if self._in_backward:  # an error ended it, so that nobody received
            self._next, self._in_backward = 0, False
            for bucket in self._buckets:
                bucket.forget()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to the gradients without communication."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def sync_gradients(self) -> None:
        """Send what has not been sent and wait for all. Backward does it; call it only if all was in `no_sync`."""
        for bucket in self._buckets[self._next :]:
            bucket.send(self.group)
        for bucket in self._buckets:
            bucket.receive()
        self._next, self._in_backward = 0, False

    def state_dict(self, *args, **kwargs):
        """The plain module's, which it loads into."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """As the plain module's."""
        return self.module.load_state_dict(*args, **kwargs)

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, each in self.module.named_parameters() if each is parameter)

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Backward has computed this gradient."""
        if self._accumulating:
            return
        bucket = self._bucket_of[parameter]
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self.sync_gradients)  # runs when this backward is done
        if self.overlap:
            if parameter in bucket.arrived:  # and may be on its way
                name = self._name_of(parameter)
                raise ValueError(
                    f"{name} got a second gradient in one backward, as happens when two parts under reentrant "
                    "checkpointing use it: take checkpoint(..., use_reentrant=False), or overlap=False"
                )
            bucket.put(parameter, self.group.size())
            while self._next < len(self._buckets) and self._buckets[self._next].is_full:
                self._buckets[self._next].send(self.group)
                self._next += 1


class _Bucket:
    """Gradients of some parameters, side by side in one buffer; behind them a flag for each: who got one."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        *views, self.flags = self.buffer.split([*sizes, len(sizes)])
        self.views = {p: view.view_as(p) for p, view in zip(parameters, views)}
        self.arrived: set[nn.Parameter] = set()
        self.travelling: dist.Work | None = None

    @property
    def is_full(self) -> bool:
        return len(self.arrived) == len(self.parameters)

    def put(self, parameter: nn.Parameter, num_replicas: int) -> None:
        """Add this rank's part of the average: divided before the sum, which then cannot overflow."""
        view = self.views[parameter]
        assert parameter.grad is not None
        torch.div(parameter.grad, num_replicas, out=view)
        parameter.grad = view
        self.arrived.add(parameter)

    def send(self, group: dist.ProcessGroup) -> None:
        """Start the sum over the ranks. Where there is no gradient, this rank's part is zero."""
        for parameter in self.parameters:
            if parameter not in self.arrived:
                if parameter.grad is not None:
                    self.put(parameter, group.size())
                else:
                    self.views[parameter].zero_()
        if self.is_full:
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor([parameter in self.arrived for parameter in self.parameters]))
        self.travelling = dist.all_reduce(self.buffer, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the sum. A parameter gets it if any rank had a gradient."""
        assert self.travelling is not None
        self.travelling.wait()
        if not self.is_full:
            for parameter, anywhere in zip(self.parameters, self.flags.tolist()):
                if anywhere:
                    parameter.grad = self.views[parameter]
        self.arrived.clear()
        self.travelling = None

    def forget(self) -> None:
        """Wait for what is under way, and take none of it."""
        if self.travelling is not None:
            self.travelling.wait()
        self.arrived.clear()
        self.travelling = None


def _make_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Parameters in about the order in which backward reaches them, the last first; one type and device a bucket."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device
        if kind not in filling:
            filling[kind] = []
            buckets.append(filling[kind])
        filling[kind].append(parameter)
        if sum(p.nbytes for p in filling[kind]) >= bucket_bytes:
            del filling[kind]
    return [_Bucket(bucket) for bucket in buckets]
