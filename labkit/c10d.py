"""Hears every collective and message of this process, from whichever thread and through whichever API it starts.

All of them pass through an operator of torch's library ``c10d``: the functions of `dist`, functional collectives and
their backward, DTensor, FSDP2, and the reducer of DistributedDataParallel. So this is the one place to listen. While
nobody does, torch is as it was. A fake tensor's calls are heard too.

Not heard: a ProcessGroup written in Python, whose methods are called directly; compiled code, where `torch.compile`
has left the operators out; and waits inside C++, as those of DistributedDataParallel's reducer and of NCCL's streams.

The private names of torch that listening needs are all in this file.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


class Operation(NamedTuple):
    """Where an operation passes: the operators of ``c10d``, and the methods of ProcessGroup, by old and new names."""

    buffer: int | None
    """Which argument of its operators is the full buffer (of gather and scatter, one rank's shard of it)."""
    operators: tuple[str, ...]
    methods: tuple[str, ...]


OPERATIONS = {
    "all_reduce": Operation(0, ("allreduce_", "allreduce_coalesced_"), ("allreduce", "allreduce_coalesced")),
    "broadcast": Operation(0, ("broadcast_",), ("broadcast",)),
    "reduce": Operation(0, ("reduce_",), ("reduce",)),
    "all_gather": Operation(
        0,
        ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        (
            "allgather",
            "all_gather_single",
            "_allgather_base",
            "allgather_coalesced",
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
        ),
    ),
    "reduce_scatter": Operation(
        1,
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        (
            "reduce_scatter",
            "reduce_scatter_single",
            "_reduce_scatter_base",
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
        ),
    ),
    "all_to_all": Operation(1, ("alltoall_", "alltoall_base_"), ("alltoall", "all_to_all_single", "alltoall_base")),
    "gather": Operation(1, ("gather_",), ("gather",)),
    "scatter": Operation(0, ("scatter_",), ("scatter",)),
    "send": Operation(0, ("send",), ("send",)),
    "recv": Operation(0, ("recv_", "recv_any_source_"), ("recv", "recv_anysource")),
    "barrier": Operation(None, ("barrier", "monitored_barrier_"), ("barrier", "monitored_barrier")),
}


@dataclass(frozen=True)
class Call:
    """A collective or message that is about to start."""

    operation: str
    group: dist.ProcessGroup
    tensors: list[torch.Tensor]
    """The full buffer; of gather and scatter, one rank's shard of it; none for a barrier."""
    has_handle: bool
    """Whether a method of the group was called, which gives its caller a handle to wait for. What functional
    collectives return waits by itself where it is used."""


class Heard(Protocol):
    """What a listener makes of a call, to be told how it goes on."""

    def note_start(self, work: dist.Work | None) -> None:
        """The call was started; there is no work where nothing is left to wait for."""

    def note_wait(self) -> Callable[[], None]:
        """A wait for it begins; what is returned is called when the wait ends."""
        ...


class _Listener:
    """One open `listening` block: whom to tell, and which of its calls somebody may still wait for."""

    def __init__(self, hear: Callable[[Call], Heard]):
        self.hear = hear
        self.of_work: WeakKeyDictionary[dist.Work, Heard] = WeakKeyDictionary()  # a dropped work frees its tensors
        self.of_storage: dict[StorageWeakRef, Heard] = {}


class _Ear:
    """Takes the place of torch's operators and methods while any block is open, and tells all open blocks."""

    def __init__(self):
        self.listeners: list[_Listener] = []
        self.thread, self.lock, self.torchs_own = threading.local(), threading.Lock(), ExitStack()
        self.kernels = deque(maxlen=50)  # the last blocks' kernels: another thread may be about to call one
        # torch.library calls a kernel of the key BackendSelect first, in all threads, for all devices, then the rest.
        self.rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def open(self, listener: _Listener) -> None:
        with self.lock:
            if not self.listeners:
                self.replace()
            self.listeners = [*self.listeners, listener]  # a new list: other threads may be reading the old one

    def close(self, listener: _Listener) -> None:
        with self.lock:
            self.listeners = [each for each in self.listeners if each is not listener]
            if not self.listeners:
                self.torchs_own.close()

    def replace(self) -> None:
        """Put what listens in the place of torch's own, until ``torchs_own`` is closed."""
        with ExitStack() as stack:
            kernels = {}
            for operation, (buffer, operators, methods) in OPERATIONS.items():
                for name in operators:
                    kernels["c10d", name] = self.kernel_of(operation, buffer, getattr(torch.ops.c10d, name).default)
                for name in vars(dist.ProcessGroup).keys() & set(methods):
                    method = self.method_of(getattr(dist.ProcessGroup, name))
                    stack.enter_context(patch.object(dist.ProcessGroup, name, method))
            kernels["_c10d_functional", "wait_tensor"] = self.wait_tensor
            for library in ("c10d", "_c10d_functional"):
                registered = torch.library.Library(library, "IMPL")
                stack.callback(registered._destroy)
                for (of_library, name), kernel in kernels.items():
                    if of_library == library:
                        registered.impl(name, kernel, "BackendSelect", with_keyset=True)
            self.kernels.append([torch.library.get_kernel("::".join(names), "BackendSelect") for names in kernels])
            stack.enter_context(patch.object(dist.Work, "wait", self.wait_of(dist.Work.wait)))
            self.torchs_own = stack.pop_all()

    def kernel_of(self, operation: str, buffer: int | None, operator: Any) -> Callable:
        """Return what is called in the place of an operator: it tells all listeners before and after."""
        group_place = [argument.name for argument in operator._schema.arguments].index("process_group")

        def kernel(keyset, *args, **kwargs):
            in_method = getattr(self.thread, "in_method", False)
            group = dist.ProcessGroup.unbox(args[group_place])
            tensors = [] if buffer is None else tree_leaves(args[buffer])
            call = Call(operation, group, tensors, in_method)
            heard = [(listener, listener.hear(call)) for listener in self.listeners]
            result = operator.redispatch(keyset & self.rest, *args, **kwargs)
            boxed = result[-1] if isinstance(result, tuple) else result
            work = None if boxed is None else dist.Work.unbox(boxed)
            for listener, each in heard:
                each.note_start(work)
                if in_method and work is not None:
                    listener.of_work[work] = each
                if not in_method:  # functional collectives wait for the tensors of the first argument
                    for tensor in tree_leaves(args[0]):
                        listener.of_storage[StorageWeakRef(tensor.untyped_storage())] = each
            if in_method:
                self.thread.work = work  # so that the method returns this very object
            return result

        return kernel

    def method_of(self, method: Callable) -> Callable:
        """Return what is called in the place of a group's method: its caller gets the work, and may wait for it."""

        def call_method(group, *args, **kwargs):
            self.thread.in_method = True
            try:
                return method(group, *args, **kwargs)
            finally:
                self.thread.in_method, self.thread.work = False, None

        return call_method

    def wait_of(self, wait: Callable) -> Callable:
        """Return what is called in the place of `Work.wait`."""

        def traced_wait(work, *args, **kwargs):
            waits = [listener.of_work.get(work) for listener in self.listeners]
            return _noted([heard for heard in waits if heard], lambda: wait(work, *args, **kwargs))

        return traced_wait

    def wait_tensor(self, keyset, tensor):
        """Is called in the place of the operator by which the result of a functional collective waits."""
        storage = StorageWeakRef(tensor.untyped_storage())
        waits = [listener.of_storage.pop(storage, None) for listener in self.listeners]
        operator = torch.ops._c10d_functional.wait_tensor.default
        return _noted([heard for heard in waits if heard], lambda: operator.redispatch(keyset & self.rest, tensor))


def _noted(waits: list[Heard], wait: Callable) -> Any:
    """Wait, and tell those who hear when it begins and when it has ended."""
    ends = [heard.note_wait() for heard in waits]
    result = wait()
    for end in ends:
        end()
    return result


_EAR = _Ear()


@contextmanager
def listening(hear: Callable[[Call], Heard]) -> Iterator[None]:
    """Call ``hear`` just before each collective and message of this process until the block ends."""
    listener = _Listener(hear)
    _EAR.open(listener)
    try:
        yield
    finally:
        _EAR.close(listener)
