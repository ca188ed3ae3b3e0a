"""Sends activations to the next stage and gradients to the one before, and receives both ahead of need.

Each message has its own tag: with interleaving on two ranks, both neighbours are the same rank. NCCL knows no tags and
delivers in the order of sending. There the messages of one kind from one rank to another have their own communicator
(`ProcessGroups.channel`), in which schedules send in the order in which they receive.
"""

from collections import deque
from collections.abc import Iterable
from functools import cache, partial
from itertools import islice, takewhile
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from labkit.groups import ProcessGroups, local_device
from labkit.launch import waiting_for
from labkit.schedules import BACKWARD, FORWARD, Op, Schedule
from labkit.timeline.spans import WAIT

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class Route(NamedTuple):
    """Where a message goes to or comes from: a rank, and its op there; their group; and what both ends know it by."""

    rank: int
    op: Op
    group: dist.ProcessGroup
    first_tag: int  # micro-batch i has the i-th after it, the shape message the one after all of these
    shape_key: tuple[int, ...]  # the stage that gives the activation, and both ranks


class Messages:
    """Sends and receives the tensors of one rank in one step.

    A shape message goes ahead of a stage's first activation, unless ``shapes`` has it from an earlier step with inputs
    of the same shapes. Both ends note it there, so they always agree on which shape messages are sent.
    """

    def __init__(self, schedule: Schedule, groups: ProcessGroups, inputs, shapes, span, recv_prefetch: int):
        self.schedule, self.groups, self.span, self.recv_prefetch = schedule, groups, span, recv_prefetch
        self.rank, self.device, self.rows = groups.coords.pp, local_device(), [len(rows) for rows in inputs]
        input_shapes = tuple((x.dtype, x.shape) for x in inputs)
        self.inputs_hash = 0 if shapes is None else crc32(repr(input_shapes).encode())
        self.shapes = {} if shapes is None else shapes.setdefault(input_shapes, {})  # key -> dtype, shape, its rows
        self.to_take = deque(schedule.ranks[self.rank])
        self.order_of = cache(lambda rank: {op: index for index, op in enumerate(schedule.ranks[rank])})
        self.handed_over: dict[Op, torch.Tensor] = {}  # from one chunk of this rank to another
        self.pending_recvs: dict[Op, tuple[torch.Tensor, Any, dist.ProcessGroup]] = {}
        self.pending_sends: dict[tuple[int, Op], list[tuple[torch.Tensor, Any]]] = {}  # by the receiver and its op
        for stage in range(1, schedule.num_model_chunks):
            ends = schedule.rank_of_stage(stage - 1), schedule.rank_of_stage(stage)
            for kind, pair in ((FORWARD, ends), (BACKWARD, ends[::-1])):  # in one order on all ranks
                if kind in schedule.kinds:
                    groups.connect(kind, *pair)

    def take(self, op: Op) -> torch.Tensor | None:
        """Return what ``op``, the schedule's next, needs; wait if it is not here yet. None if it needs nothing."""
        for coming in islice(self.to_take, self.recv_prefetch):
            if not self._post_recv(coming):
                break  # receives start in the order of the ops, as NCCL wants it
        self.to_take.popleft()
        route = self._route(op, -1)
        if route is None or route.rank == self.rank:
            return self.handed_over.pop(op, None)
        with self.span(WAIT, f"for {op}", op), waiting_for(op):
            while not self._post_recv(op):
                self._recv_shape(route)
            tensor, work, _ = self.pending_recvs.pop(op)
            work.wait()
        # The sender has done all its ops up to this one, so it has received what this rank sent for them.
        order = self.order_of(route.rank)
        self._release(to for to in self.pending_sends if to[0] == route.rank and order[to[1]] <= order[route.op])
        return tensor

    def send(self, op: Op, result: torch.Tensor | None) -> None:
        """Start to send what ``op`` gave to the stage that needs it, if any does; keep it until it has left."""
        route = self._route(op, 1)
        if route is None:
            return
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or result.dtype not in DTYPES or result.dim() > MAX_DIMS:
            what = f"{result.dtype} of {result.dim()} dims" if is_tensor else type(result).__name__
            raise ValueError(f"{op} gave a {what}: a stage must give one tensor of floats, of at most {MAX_DIMS} dims")
        tensor = result.detach().contiguous()
        if route.rank == self.rank:
            self.handed_over[route.op] = tensor
            return
        sends, isend = [], partial(dist.isend, group=route.group, group_dst=route.rank)
        dtype, shape, rows = tensor.dtype, tensor.shape, self.rows[op.micro_batch]
        if route.shape_key not in self.shapes:
            self.shapes[route.shape_key] = dtype, shape, rows
            numbers = [self.inputs_hash, rows, DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
            message = torch.tensor(numbers, device=self.device)
            sends.append((message, isend(message, tag=route.first_tag + len(self.rows))))
        if (expected := self._shape(op, route)) != (dtype, shape):
            fault = f"{op} gave {dtype} {list(shape)}, but the next stage expects {expected[0]} {list(expected[1])}"
            raise ValueError(f"{fault}: for like inputs a stage must give like shapes, with the rows in the first dim")
        sends.append((tensor, isend(tensor, tag=route.first_tag + op.micro_batch)))
        self._release(takewhile(self._has_left, self.pending_sends))
        self.pending_sends[route.rank, route.op] = sends

    def flush(self) -> None:
        """Wait until everything has left."""
        self._release(self.pending_sends)

    def _release(self, receivers: Iterable[tuple[int, Op]]) -> None:
        for receiver in list(receivers):
            with waiting_for(receiver[1]):
                for _, work in self.pending_sends.pop(receiver):
                    work.wait()

    def _has_left(self, receiver: tuple[int, Op]) -> bool:
        return all(work.is_completed() for _, work in self.pending_sends[receiver])  # NCCL knows, gloo does not

    def _post_recv(self, op: Op) -> bool:
        """Start to receive what ``op`` needs, if anything; return False if that must wait.

        It must wait while its shape is unknown. On a GPU it must also wait while the channel has an open receive: a
        second one in the queue can hold up the computation that the other one waits for.
        """
        route = self._route(op, -1)
        if op in self.pending_recvs or route is None or route.rank == self.rank:
            return True
        is_open = self.groups.keeps_order and route.group in (group for *_, group in self.pending_recvs.values())
        if is_open or route.shape_key not in self.shapes:
            return False
        dtype, shape = self._shape(op, route)
        tensor, tag = torch.empty(shape, dtype=dtype, device=self.device), route.first_tag + op.micro_batch
        work = dist.irecv(tensor, group=route.group, group_src=route.rank, tag=tag)
        self.pending_recvs[op] = tensor, work, route.group
        return True

    def _recv_shape(self, route: Route) -> None:
        message = torch.empty(4 + MAX_DIMS, dtype=torch.int64, device=self.device)
        tag = route.first_tag + len(self.rows)
        work: Any = dist.irecv(message, group=route.group, group_src=route.rank, tag=tag)
        work.wait()
        inputs_hash, rows, dtype, num_dims, *shape = message.tolist()  # on a GPU, the host waits
        if inputs_hash != self.inputs_hash:
            fault = f"pipeline ranks {route.rank} and {self.rank} differ in shapes=, or in the shapes of their inputs"
            raise ValueError(f"{fault}: give both the same inputs, and a dict of shapes or none")
        self.shapes[route.shape_key] = DTYPES[dtype], torch.Size(shape[:num_dims]), rows

    def _shape(self, op: Op, route: Route) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape that both ends know of a message: as noted, but with its own number of rows."""
        dtype, shape, rows = self.shapes[route.shape_key]
        own_rows = self.rows[op.micro_batch]
        return dtype, shape if own_rows == rows else torch.Size([own_rows, *shape[1:]])

    def _route(self, op: Op, steps: int) -> Route | None:
        """Return the route of the message that ``op`` gives (``steps`` is 1) or needs (-1); None if there is none."""
        other = self.schedule.neighbor(self.rank, op, steps)
        if other is None:
            return None
        rank, there = other
        stage = min(self.schedule.stage_of(self.rank, op.chunk), self.schedule.stage_of(rank, there.chunk))
        number = stage + (op.kind == BACKWARD) * self.schedule.num_model_chunks
        group = self.groups.channel(op.kind, *(self.rank, rank)[::steps])
        return Route(rank, there, group, number * (len(self.rows) + 1), (stage, *sorted((self.rank, rank))))
