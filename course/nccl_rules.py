"""A process group that behaves towards its caller as NCCL does, on CPU ranks: what stands still on GPUs does so here.

The rules, as torch's ProcessGroupNCCL has them:

- A group's communicator is made at its first use. All its members have to come, and nobody gives up waiting.
- `isend` and `irecv` that are not batched have a communicator for each pair of ranks and group, for both directions.
  Batched ones and collectives use the group's.
- A communicator runs what it is given one after the other, in the order in which it was given, and pairs it by that
  order alone. Tags are ignored. A send ends when its receiver has the data.
- A call without ``async_op``, and `wait`, return when the data is there (a CPU tensor has no stream that could wait).
  An asynchronous call returns at once.
- A tensor must be contiguous, and of a type that NCCL knows. A receive names its sender.
- Works stand in a recorder of their own, and what a function leaves unfinished is still there in the next.

It says nothing about what a GPU adds: streams, memory, speed, and errors that come late. Where different operations
or sizes meet, NCCL waits for ever or mixes up numbers; here the communicator prints both sides and stands still.

The messages travel through gloo, in one group for all ranks. Tensors on a GPU go through the CPU's memory, so that
several ranks can share one GPU.
"""
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# torch calls these methods by position; its stubs name their arguments differently.

import _thread
import json
import queue
import sys
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import _create_work_from_future  # pyright: ignore - private: pinned by a test
from torch.distributed import distributed_c10d
from torch.futures import Future

from labkit.c10d import Call, started
from labkit.launch.frames import Frame, stack_of

NAME = "nccl_rules"
_FOR_EVER = timedelta(days=1)
_UNKNOWN_TYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
_REDUCTIONS: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
    (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    (dist.ReduceOp.AVG, lambda rows: rows.sum(0) / len(rows)),
    (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
    (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
]


_recorded: deque[dict] = deque(maxlen=256)


def _dump_recorder(*_, **__) -> bytes:
    """Return what torch's `_dump_nccl_trace_json` returns in a build that has NCCL."""
    return json.dumps({"entries": list(_recorded)}).encode()


class Message(NamedTuple):
    """A message as its caller asked for it. Those of one ``queue`` are paired by their order, not by their tag."""

    queue: tuple[str, bool]  # the group, and whether the message is part of a batch
    kind: str  # "send" or "recv"
    peer: int  # a global rank
    tag: int
    stack: tuple[Frame, ...]  # innermost last


messages: list[Message] | None = None
"""All messages of this rank, once somebody has put a list here."""


class Mismatch(Exception):
    """Two ranks met in different operations, or with different sizes."""


class Under:
    """A function of ranks that talk by NCCL's rules: ``launch(Under(function), ..., world_size=4)``."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args, **kwargs):
        use_on_this_rank()
        return self.function(*args, **kwargs)


def use_on_this_rank() -> None:
    """Leave this rank's world, and join one that follows NCCL's rules. All ranks call this."""
    if dist.get_backend() == NAME:
        return  # kept from the call before, with all that was left unfinished there
    timeout = distributed_c10d.default_pg_timeout  # pyright: ignore - launch has set it
    _register()
    dist.barrier()  # gloo connects eagerly: if a rank closed now, a peer that is still connecting would fail
    left = dist.group.WORLD
    dist.destroy_process_group()
    _Wire.of_this_process = None
    _distributed_c10d._dump_nccl_trace_json = _dump_recorder  # pyright: ignore - where launch looks for works
    dist.init_process_group(NAME, timeout=timeout)
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        if left in (defaults := getattr(function, "__defaults__", None) or ()):  # the world when it was imported
            function.__defaults__ = tuple(dist.group.WORLD if each is left else each for each in defaults)


def _register() -> None:
    """Make torch know the backend, and batch its messages as it batches NCCL's."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    one_by_one = distributed_c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list):
        group = p2p_op_list[0].group if p2p_op_list else None
        group = group or dist.group.WORLD
        if not isinstance(group, NCCLRules):
            return one_by_one(p2p_op_list)
        distributed_c10d._check_p2p_op_list(p2p_op_list)  # pyright: ignore[reportAttributeAccessIssue]
        group._start_coalescing(p2p_op_list[0].tensor.device)
        for each in p2p_op_list:
            each.op(each.tensor, each.peer, each.group, each.tag)
        return [group._end_coalescing(p2p_op_list[0].tensor.device)]

    dist.batch_isend_irecv = distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _make_group(options, _) -> "NCCLRules":
    wire = _Wire.of_this_process
    if wire is None:  # the first group of a process is its world
        wire = _Wire.of_this_process = _Wire(options.store, options.group_rank, options.group_size)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return NCCLRules(wire, options.group_rank, ranks, options.group_id, options.timeout)


class _Wire:
    """Messages between any two ranks: one gloo group of all. A message says what it is for before its data."""

    of_this_process: "_Wire | None" = None

    def __init__(self, store, rank: int, num_ranks: int):
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = _FOR_EVER
        device = dist.ProcessGroupGloo.create_default_device()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [device]
        options._threads = 2
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("wire", store), rank, num_ranks, options)  # pyright: ignore
        self.rank = rank

    def send(self, peer: int, tag: int, purpose: str, data: torch.Tensor) -> list:
        """Start to send; return what has to be waited for, and be kept until then."""
        data = data.detach().cpu().contiguous()
        parts = [_head(purpose, data)]
        if data.numel():
            parts.append(data.view(-1).view(torch.uint8))
        return [(self.gloo.send([part], peer, tag), part) for part in parts]

    def receive(self, peer: int, tag: int, purpose: str, into: torch.Tensor) -> None:
        """Receive, and wait for it.

        Raises:
            Mismatch: what comes is for something else, or of a different size.
        """
        head = torch.empty_like(_head("", into))
        self.gloo.recv([head], peer, tag).wait()
        expected = _head(purpose, into)
        if not torch.equal(head, expected):
            raise Mismatch(f"rank {peer} is in {_in_words(head)}, rank {self.rank} in {_in_words(expected)}")
        if into.numel():
            data = torch.empty(into.numel() * into.element_size(), dtype=torch.uint8)
            self.gloo.recv([data], peer, tag).wait()
            into.detach().copy_(data.view(into.dtype).view(into.shape))


_HEAD_BYTES = 64


def _head(purpose: str, data: torch.Tensor) -> torch.Tensor:
    """Say what a message is for, and how much it brings, in a fixed number of bytes."""
    text = f"{purpose} of {data.numel()} {str(data.dtype).removeprefix('torch.')}".encode()[:_HEAD_BYTES]
    return torch.tensor(list(text.ljust(_HEAD_BYTES)), dtype=torch.uint8)


def _in_words(head: torch.Tensor) -> str:
    return bytes(head.tolist()).decode(errors="replace").strip()


class _Communicator:
    """What runs one after the other, between the same ranks: given as global ranks, the same on all of them."""

    def __init__(self, wire: _Wire, name: str, ranks: Sequence[int]):
        self.wire = wire
        self.ranks = list(ranks)
        self.tag = zlib.crc32(name.encode()) >> 4 << 1  # and one more, for what a receiver answers
        self.issued: queue.SimpleQueue = queue.SimpleQueue()
        self.operation = ""  # which runs
        self.failed: Exception | None = None  # why it stands still: keeps the messages that gloo still has
        self._meet()
        _thread.start_new_thread(self._run, ())  # like NCCL's, it is not one of Python's: launch sees its works only

    def _meet(self) -> None:
        """Wait for all members. The caller waits here, as NCCL lets it wait while a communicator is made."""
        nothing = torch.empty(0)
        peers = [rank for rank in self.ranks if rank != self.wire.rank]
        sent = [each for peer in peers for each in self.wire.send(peer, self.tag, "first use", nothing)]
        for peer in peers:
            self.wire.receive(peer, self.tag, "first use", nothing)
        for work, _ in sent:
            work.wait()

    def issue(self, run: Callable[["_Communicator"], Any], entry: dict):
        """Put an operation into the queue, which retires its entry in the recorder; return its work."""
        done = Future()
        self.issued.put((run, entry, done))
        return _create_work_from_future(done)

    def _run(self) -> None:
        while True:
            issued = self.issued.get()
            if issued is None:
                return
            run, entry, done = issued
            self.operation = entry["profiling_name"].removeprefix("nccl:")
            try:
                result = run(self)
            except Exception as error:
                self.failed = error
                print(f"NCCL would stand still here: {error}.", file=sys.stderr)
                return  # nobody is told
            entry["retired"] = True
            done.set_result(result)
            del issued, run, entry, done, result

    def exchange(self, given: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor]) -> None:
        """Send ``given`` to members and receive ``wanted`` from them, all at once; both by global rank."""
        me = self.wire.rank
        sent = []
        for peer, data in given.items():
            if peer != me:
                sent += self.wire.send(peer, self.tag, self.operation, data)
        for peer, into in wanted.items():
            if peer == me:
                into.detach().copy_(given[me])
            else:
                self.wire.receive(peer, self.tag, self.operation, into)
        for work, _ in sent:
            work.wait()

    def messages(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Run a batch of messages, all at once. A send ends when its receiver says that it has the data."""
        nothing = torch.empty(0)
        sent = [each for peer, data in sends for each in self.wire.send(peer, self.tag, "message", data)]
        for peer, into in receives:
            self.wire.receive(peer, self.tag, "message", into)
            sent += self.wire.send(peer, self.tag + 1, "answer", nothing)
        for peer, _ in sends:
            self.wire.receive(peer, self.tag + 1, "answer", nothing)
        for work, _ in sent:
            work.wait()


class NCCLRules(dist.ProcessGroup):
    """A group of ranks under these rules."""

    supports_coalescing = True

    def __init__(self, wire: _Wire, rank: int, ranks: list[int], name: str, timeout: timedelta):
        super().__init__(rank, len(ranks))  # pyright: ignore[reportCallIssue] - its stub knows the other constructor only
        self._wire = wire
        self._ranks = ranks
        self._name = name
        self._communicators: dict[str, _Communicator] = {}
        self._batch: list[tuple[str, int, torch.Tensor]] | None = None
        self._num_collectives = 0
        self._num_messages = 0  # a batch counts as one
        self.options = SimpleNamespace(_timeout=timeout)

    # -- what torch asks of a group

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def _get_backend(self, device) -> "NCCLRules":
        return self

    def _set_sequence_number_for_group(self) -> None:
        """There is none: who skips an operation is not told."""

    # -- the communicators

    def _communicator(self, name: str, ranks: Sequence[int]) -> _Communicator:
        if name not in self._communicators:
            self._communicators[name] = _Communicator(self._wire, f"{self._name} {name}", ranks)
        return self._communicators[name]

    def _collective(self, operation: str, run: Callable[[_Communicator], Any], buffer: Sequence, others: Sequence = ()):
        """Issue a collective. ``buffer``: the full one, of a gather or a scatter one rank's part of it."""
        for tensor in (*buffer, *others):
            _check(tensor)
        return self._start(operation, buffer, lambda: self._issue_collective(operation, run, buffer))

    def _issue_collective(self, operation: str, run: Callable[[_Communicator], Any], buffer: Sequence):
        communicator = self._communicator("all", self._ranks)
        self._num_collectives += 1
        return communicator.issue(run, self._record(operation, buffer))

    def _start(self, operation: str, tensors: Sequence[torch.Tensor], issue: Callable[[], Any]):
        return started(Call(operation, self, list(tensors), has_handle=True), issue)

    def _record(self, operation: str, tensors: Sequence[torch.Tensor], is_message: bool = False) -> dict:
        """Add an entry to the recorder, as ProcessGroupNCCL writes it."""
        entry = {
            "process_group": [self._name, ""],
            "profiling_name": f"nccl:{operation}",
            "collective_seq_id": self._num_collectives,
            "p2p_seq_id": self._num_messages,
            "is_p2p": is_message,
            "input_dtypes": [str(tensor.dtype).removeprefix("torch.").title() for tensor in tensors],
            "input_sizes": [list(tensor.shape) for tensor in tensors],
            "timeout_ms": self.options._timeout / timedelta(milliseconds=1),
            "retired": False,
        }
        _recorded.append(entry)
        return entry

    def shutdown(self) -> None:
        """End the threads, once they have done what was issued."""
        for communicator in self._communicators.values():
            communicator.issued.put(None)
        self._communicators.clear()

    # -- messages

    def send(self, tensors, dst: int, tag: int):
        return self._message("send", tensors[0], dst, tag)

    def recv(self, tensors, src: int, tag: int):
        return self._message("recv", tensors[0], src, tag)

    def recv_anysource(self, tensors, tag: int):
        raise RuntimeError("NCCL cannot receive from any rank: name the sender")

    def _message(self, kind: str, tensor: torch.Tensor, group_rank: int, tag: int):
        _check(tensor)
        peer = self._ranks[group_rank]
        if messages is not None:
            queue = (self._name, self._batch is not None)
            messages.append(Message(queue, kind, peer, tag, stack_of(sys._getframe(1))))
        return self._start(kind, [tensor], lambda: self._issue_message(kind, tensor, peer))

    def _issue_message(self, kind: str, tensor: torch.Tensor, peer: int):
        if self._batch is not None:
            self._batch.append((kind, peer, tensor))
            return None
        pair = sorted([self._wire.rank, peer])
        communicator = self._communicator(f"pair {pair}", pair)
        self._num_messages += 1
        return communicator.issue(_batch_of([(kind, peer, tensor)]), self._record(kind, [tensor], is_message=True))

    def _start_coalescing(self, device) -> None:
        self._batch = []

    def _end_coalescing(self, device):
        batch, self._batch = self._batch or [], None
        communicator = self._communicator("all", self._ranks)
        self._num_messages += 1
        for kind, _, tensor in batch:
            self._record(kind, [tensor], is_message=True)  # these entries never retire: that of the batch does
        return communicator.issue(_batch_of(batch), self._record("coalesced", [], is_message=True))

    # -- collectives

    def allreduce(self, tensors, opts=None):
        reduce_op = _reduction(opts)

        def run(communicator):
            for tensor in tensors:
                _reduce_into(communicator, tensor, [tensor] * self.size(), reduce_op)
            return tensors

        return self._collective("all_reduce", run, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts):
        root = self._ranks[opts.rootRank]

        def run(communicator):
            others = [rank for rank in self._ranks if rank != root]
            is_root = self._wire.rank == root
            given = dict.fromkeys(others, tensors[0]) if is_root else {}
            communicator.exchange(given, {} if is_root else {root: tensors[0]})
            return tensors

        return self._collective("broadcast", run, tensors)

    def reduce(self, tensors, opts):
        reduce_op = _reduction(opts)
        root = self._ranks[opts.rootRank]

        def run(communicator):
            rows = {}
            if self._wire.rank == root:
                rows = {rank: torch.empty_like(tensors[0]) for rank in self._ranks}
            communicator.exchange({root: tensors[0]}, rows)
            if rows:
                tensors[0].detach().copy_(reduce_op(torch.stack(list(rows.values()))))
            return tensors

        return self._collective("reduce", run, tensors)

    def allgather(self, outputs, inputs, opts=None):
        def run(communicator):
            for pieces, own in zip(outputs, inputs):
                _gather_into(communicator, pieces, own)
            return outputs

        return self._collective("all_gather", run, [piece for pieces in outputs for piece in pieces], inputs)

    def all_gather_single(self, output, input, opts=None):
        return self.__gather_single([output], [input])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self.__gather_single(outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def __gather_single(self, outputs, inputs):
        def run(communicator):
            for output, own in zip(outputs, inputs):
                _gather_into(communicator, output.view(-1).chunk(self.size()), own.reshape(-1))
            return outputs

        return self._collective("all_gather", run, outputs, inputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        reduce_op = _reduction(opts)

        def run(communicator):
            for output, pieces in zip(outputs, inputs):
                _reduce_into(communicator, output, pieces, reduce_op)
            return outputs

        return self._collective("reduce_scatter", run, [piece for pieces in inputs for piece in pieces], outputs)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.__scatter_single([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self.__scatter_single(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def __scatter_single(self, outputs, inputs, opts):
        reduce_op = _reduction(opts)

        def run(communicator):
            for output, whole in zip(outputs, inputs):
                pieces = whole.reshape(-1).chunk(self.size())
                _reduce_into(communicator, output.view(-1), pieces, reduce_op)
            return outputs

        return self._collective("reduce_scatter", run, inputs, outputs)

    def alltoall(self, outputs, inputs, opts=None):
        def run(communicator):
            communicator.exchange(dict(zip(self._ranks, inputs)), dict(zip(self._ranks, outputs)))
            return outputs

        return self._collective("all_to_all", run, inputs, outputs)

    def all_to_all_single(self, output, input, output_splits=None, input_splits=None, opts=None):
        def run(communicator):
            received = _split(output, output_splits, self.size())
            given = _split(input, input_splits, self.size())
            communicator.exchange(dict(zip(self._ranks, given)), dict(zip(self._ranks, received)))
            return [output]

        return self._collective("all_to_all", run, [input], [output])

    alltoall_base = all_to_all_single

    def gather(self, outputs, inputs, opts):
        root = self._ranks[opts.rootRank]

        def run(communicator):
            wanted = dict(zip(self._ranks, outputs[0])) if self._wire.rank == root else {}
            communicator.exchange({root: inputs[0]}, wanted)
            return outputs

        return self._collective("gather", run, inputs)

    def scatter(self, outputs, inputs, opts):
        root = self._ranks[opts.rootRank]

        def run(communicator):
            given = dict(zip(self._ranks, inputs[0])) if self._wire.rank == root else {}
            communicator.exchange(given, {root: outputs[0]})
            return outputs

        return self._collective("scatter", run, outputs)

    def barrier(self, opts=None):
        def run(communicator):
            _reduce_into(communicator, torch.zeros(1), [torch.zeros(1)] * self.size(), _REDUCTIONS[0][1])
            return []

        return self._collective("barrier", run, [])


def _batch_of(messages: Sequence[tuple[str, int, torch.Tensor]]) -> Callable[[_Communicator], list[torch.Tensor]]:
    sends = [(peer, tensor) for kind, peer, tensor in messages if kind == "send"]
    receives = [(peer, tensor) for kind, peer, tensor in messages if kind == "recv"]

    def run(communicator):
        communicator.messages(sends, receives)
        return [tensor for _, tensor in receives]

    return run


def _reduce_into(communicator: _Communicator, output: torch.Tensor, pieces, reduce_op) -> None:
    """Give each member its piece, and reduce what comes into ``output``: in the order of ranks, so alike on all."""
    rows = {rank: torch.empty_like(output, memory_format=torch.contiguous_format) for rank in communicator.ranks}
    communicator.exchange(dict(zip(communicator.ranks, pieces)), rows)
    output.detach().copy_(reduce_op(torch.stack(list(rows.values()))))


def _gather_into(communicator: _Communicator, pieces, own: torch.Tensor) -> None:
    given = dict.fromkeys(communicator.ranks, own)
    communicator.exchange(given, dict(zip(communicator.ranks, pieces)))


def _split(tensor: torch.Tensor, sizes, num_ranks: int) -> Sequence[torch.Tensor]:
    return tensor.split(list(sizes)) if sizes else tensor.chunk(num_ranks)


def _reduction(opts) -> Callable[[torch.Tensor], torch.Tensor]:
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, function in _REDUCTIONS:
        if asked == known:
            return function
    raise RuntimeError(f"NCCL has no reduction {asked}: use SUM, AVG, PRODUCT, MIN or MAX")


def _check(tensor: torch.Tensor) -> None:
    if tensor.dtype in _UNKNOWN_TYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
