"""Hears every collective and message of this process, through whichever API of torch it is sent.

All of them pass through an operator of torch's library ``c10d``: the functions of `dist`,
functional collectives and their backward, DTensor, FSDP2, and the reducer of
DistributedDataParallel. So this is the one place to listen. While nobody does, torch is as it was.

What cannot be heard:

- Waits inside C++, as in DistributedDataParallel's reducer.
- A ProcessGroup written in Python, unless it tells (`started`): its methods are called without an
  operator.
- Compiled code.
- Functional collectives in a thread that started before the block, because torch asks each thread
  for itself. The functions of `dist` are heard there too.

The private names of torch that listening needs are all in this file.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from labkit.torch_versions import LISTENING_KEY


class Operation(NamedTuple):
    """Where an operation goes: operators of ``c10d``, and methods of ProcessGroup by all names."""

    buffer: int | None
    """Which argument of its operators is the full buffer; of gather and scatter, one shard."""
    operators: tuple[str, ...]
    methods: tuple[str, ...]


OPERATIONS = {
    "all_reduce": Operation(
        0,
        ("allreduce_", "allreduce_coalesced_"),
        ("allreduce", "allreduce_coalesced"),
    ),
    "broadcast": Operation(0, ("broadcast_",), ("broadcast",)),
    "reduce": Operation(0, ("reduce_",), ("reduce",)),
    "all_gather": Operation(
        0,
        (
            "allgather_",
            "_allgather_base_",
            "allgather_coalesced_",
            "allgather_into_tensor_coalesced_",
        ),
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
    "all_to_all": Operation(
        1,
        ("alltoall_", "alltoall_base_"),
        ("alltoall", "all_to_all_single", "alltoall_base"),
    ),
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
    """Whether a method of the group was called, which gives its caller a handle to wait for. What
    functional collectives return waits by itself where it is used."""


class Heard(Protocol):
    """What a listener makes of a call, to be told how it goes on."""

    def note_start(self, work: dist.Work | None) -> None:
        """The call was started; there is no work where nothing is left to wait for."""

    def note_wait(self) -> Callable[[], None]:
        """A wait for it begins; what is returned is called when the wait ends."""
        ...


class _Listener:
    """One open `listening` block: whom to tell, and its calls that somebody may still wait for."""

    def __init__(self, hear: Callable[[Call], Heard]):
        self.hear = hear
        # weak, so that a work that is dropped frees its tensors
        self.of_work: WeakKeyDictionary[dist.Work, Heard] = WeakKeyDictionary()
        self.of_storage: dict[StorageWeakRef, Heard] = {}


class _Ear:
    """What torch calls while any block is open. It tells all open blocks."""

    def __init__(self):
        self.listeners: list[_Listener] = []
        self.thread = threading.local()
        self.lock = threading.Lock()
        self.patches = ExitStack()

    def open(self, listener: _Listener) -> None:
        with self.lock:
            if not self.listeners:
                self.patch()
            # a new list, because other threads may be reading the old one
            self.listeners = [*self.listeners, listener]

    def close(self, listener: _Listener) -> None:
        with self.lock:
            self.listeners = [other for other in self.listeners if other is not listener]
            if not self.listeners:
                self.patches.close()

    def patch(self) -> None:
        """Until ``patches`` are closed, hear groups' methods in all threads, and new threads."""
        _kernels()
        with ExitStack() as stack:
            methods = {name for operation in OPERATIONS.values() for name in operation.methods}
            for name in vars(dist.ProcessGroup).keys() & methods:
                method = self.method_of(getattr(dist.ProcessGroup, name))
                stack.enter_context(patch.object(dist.ProcessGroup, name, method))
            stack.enter_context(patch.object(dist.Work, "wait", self.wait_of(dist.Work.wait)))
            # Who takes the future waits through it: torch does not say when.
            future_of = self.wait_of(dist.Work.get_future)
            stack.enter_context(patch.object(dist.Work, "get_future", future_of))
            start = _start_of(threading.Thread.start)
            stack.enter_context(patch.object(threading.Thread, "start", start))
            self.patches = stack.pop_all()

    def kernel_of(self, operation: str, buffer: int | None, operator: Any) -> Callable:
        """Return what torch calls in the place of an operator, which it then calls itself."""
        names = [argument.name for argument in operator._schema.arguments]
        group_index = names.index("process_group")

        def kernel(keyset, *args, **kwargs):
            if getattr(self.thread, "in_kernel", False):  # what a backend sends is not another call
                return _go_on(operator, keyset, *args, **kwargs)
            in_method = getattr(self.thread, "in_method", False)
            group = dist.ProcessGroup.unbox(args[group_index])
            tensors = [] if buffer is None else tree_leaves(args[buffer])
            call = Call(operation, group, tensors, in_method)
            heard_by = [(listener, listener.hear(call)) for listener in self.listeners]
            self.thread.in_kernel = True
            try:
                result = _go_on(operator, keyset, *args, **kwargs)
            finally:
                self.thread.in_kernel = False
            boxed = result[-1] if isinstance(result, tuple) else result
            work = None if boxed is None else dist.Work.unbox(boxed)
            for listener, heard in heard_by:
                heard.note_start(work)
                if in_method and work is not None:
                    listener.of_work[work] = heard
                if not in_method:  # functional collectives wait for tensors of the first argument
                    for tensor in tree_leaves(args[0]):
                        listener.of_storage[StorageWeakRef(tensor.untyped_storage())] = heard
            if in_method:
                self.thread.work = work  # so that the method returns this very object
            return result

        return kernel

    def method_of(self, method: Callable) -> Callable:
        """Return what is called in the place of a group's method; its caller may wait."""

        def call_method(group, *args, **kwargs):
            self.thread.in_method = True
            try:
                with torch._C._IncludeDispatchKeyGuard(_KEY):
                    return method(group, *args, **kwargs)
            finally:
                self.thread.in_method = False
                self.thread.work = None

        return call_method

    def wait_of(self, wait: Callable) -> Callable:
        """Return what is called in the place of a method of Work by which its caller waits."""

        def traced_wait(work, *args, **kwargs):
            waits = [listener.of_work.get(work) for listener in self.listeners]
            return _noted(waits, lambda: wait(work, *args, **kwargs))

        return traced_wait

    def wait_tensor(self, keyset, tensor):
        """Is called before the operator by which the result of a functional collective waits."""
        storage = StorageWeakRef(tensor.untyped_storage())
        waits = [listener.of_storage.pop(storage, None) for listener in self.listeners]
        operator = torch.ops._c10d_functional.wait_tensor.default
        return _noted(waits, lambda: _go_on(operator, keyset, tensor))


_EAR = _Ear()


def started(call: Call, start: Callable[[], dist.Work | None]) -> dist.Work | None:
    """Start a call of a ProcessGroup that is written in Python, and tell who listens."""
    heard_by = [(listener, listener.hear(call)) for listener in _EAR.listeners]
    work = start()
    for listener, heard in heard_by:
        heard.note_start(work)
        if work is not None:
            listener.of_work[work] = heard
    return work


# A thread that includes this dispatch key calls the kernels below before the operators of c10d. All
# other operators pass the key at no cost. It lies below the keys of autograd and of dispatch modes,
# so these cannot hide a call, and torch itself does not use it. The kernels stay registered: if
# they came and went with the blocks, another thread might be calling one that is being freed.
_KEY = torch._C._dispatch_key_parse(LISTENING_KEY)
_ALL_KEYS_AFTER = torch._C._dispatch_keyset_full_after(_KEY)


@cache
def _kernels() -> list[torch.library.Library]:
    """Register the kernels, once in a process."""
    names = "_", "c10d", "_c10d_functional"
    libraries = {name: torch.library.Library(name, "IMPL") for name in names}
    if LISTENING_KEY == "Fake":  # for all other operators; torch itself does so for BackendSelect
        libraries["_"].fallback(torch.library.fallthrough_kernel, LISTENING_KEY)
    for operation, (buffer, operators, _) in OPERATIONS.items():
        for name in operators:
            kernel = _EAR.kernel_of(operation, buffer, getattr(torch.ops.c10d, name).default)
            libraries["c10d"].impl(name, kernel, LISTENING_KEY, with_keyset=True)
    functional = libraries["_c10d_functional"]
    functional.impl("wait_tensor", _EAR.wait_tensor, LISTENING_KEY, with_keyset=True)
    return [*libraries.values()]


def _go_on(operator: Any, keyset: torch._C.DispatchKeySet, *args, **kwargs) -> Any:
    """Let torch go on with the operator itself."""
    return operator.redispatch(keyset & _ALL_KEYS_AFTER, *args, **kwargs)


def _start_of(start: Callable) -> Callable:
    """Return what is called in the place of `Thread.start`: all that the thread calls is heard."""

    def start_heard(thread):
        run = thread.run

        def run_heard():
            with torch._C._IncludeDispatchKeyGuard(_KEY):
                run()

        thread.run = run_heard
        start(thread)

    return start_heard


def _noted(waits: list[Heard | None], wait: Callable) -> Any:
    """Wait, and tell those who have heard the call when the wait begins and when it has ended."""
    ends = [heard.note_wait() for heard in waits if heard is not None]
    result = wait()
    for end in ends:
        end()
    return result


@contextmanager
def listening(hear: Callable[[Call], Heard]) -> Iterator[None]:
    """Until the block ends, call ``hear`` before each collective and message of this process."""
    listener = _Listener(hear)
    _EAR.open(listener)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _EAR.close(listener)
