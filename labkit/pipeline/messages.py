"""Sends activations to the next stage and gradients to the one before, and receives both ahead of
need.

Each message has its own tag: with interleaving on two ranks, both neighbours are the same rank.
NCCL knows no tags, so there each kind and direction has its own channel (`ProcessGroups.channel`),
which keeps the order of sending. Receives are posted in that order, whatever the receiver's own is,
and what comes before its op does is kept.

A shape message, if shapes are unknown, goes through the channel of gradients in its direction: the
first of those comes only after all shapes, and in the activations' own channel it would hold up the
activation that follows.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.groups import ProcessGroups, local_device
from labkit.launch import waiting_for
from labkit.schedules import BACKWARD, FORWARD, Op, Schedule, ScheduleDeadlock
from labkit.sizes import check_size
from labkit.timeline.spans import WAIT

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class Route(NamedTuple):
    """Where one message goes to or comes from, and what both ends know it by."""

    rank: int
    op: Op  # of that rank: needs the message, or gives it
    group: dist.ProcessGroup
    tag: int
    shape_group: dist.ProcessGroup  # of the shape message, if one goes ahead
    shape_tag: int
    stage: int  # which gives the activation


class Messages:
    """Sends and receives the tensors of one rank in one step.

    A shape message goes ahead of a stage's first activation, unless ``activation`` says what all of
    them are.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: ProcessGroups,
        inputs,
        activation,
        span,
        recv_prefetch: int,
    ):
        self.schedule = schedule
        self.groups = groups
        self.span = span
        # On a GPU a second receive in a channel's queue can hold up the computation that the first
        # one waits for.
        self.recv_prefetch = (
            1 if groups.has_channels else check_size("recv_prefetch", recv_prefetch)
        )
        self.due = _due(schedule) if groups.has_channels else {}
        self.rank = groups.coords.pp
        self.device = local_device()
        self.rows = [len(rows) for rows in inputs]
        self.shapes: dict[int, tuple] = {}  # stage -> dtype, shape, and for how many rows
        self.order_of = cache(
            lambda rank: {op: index for index, op in enumerate(schedule.ranks[rank])}
        )
        self.handed_over: dict[Op, torch.Tensor] = {}  # from one chunk of this rank to another
        self.needs = {op: self._route(op, -1) for op in schedule.ranks[self.rank]}
        self.recvs: dict[
            tuple[str, int], tuple[deque[Route], dict[Route, tuple]]
        ] = {}  # kind, sender: to post, posted
        from_others = [route for route in self.needs.values() if route and route.rank != self.rank]
        for route in sorted(from_others, key=lambda route: self.order_of(route.rank)[route.op]):
            self.recvs.setdefault((route.op.kind, route.rank), (deque(), {}))[0].append(route)
        self.stages_before = {
            route.stage for key in self.recvs if key[0] == FORWARD for route in self.recvs[key][0]
        }
        self.pending_sends: dict[Route, list[tuple[torch.Tensor, Any]]] = {}
        for stage in range(1, schedule.num_stages):  # in one order on all ranks
            before = schedule.rank_of_stage(stage - 1)
            after = schedule.rank_of_stage(stage)
            groups.connect(FORWARD, before, after)
            groups.connect(BACKWARD, after, before)
            if activation is not None:
                self.shapes[stage - 1] = *activation, self.rows[0]
            else:
                groups.connect(BACKWARD, before, after)  # for shapes

    def take(self, op: Op) -> torch.Tensor | None:
        """Return what ``op``, the schedule's next, needs; wait if it is not here yet.

        None if it needs nothing.
        """
        self._post_recvs()
        for key, num_left in self.due.get((self.rank, op), ()):
            while len(self.recvs[key][0]) > num_left:
                with waiting_for(op):
                    self._post_recv(*self.recvs[key])
        route = self.needs[op]
        if route is None or route.rank == self.rank:
            return self.handed_over.pop(op, None)
        with self.span(WAIT, f"for {op}", op), waiting_for(op):
            to_post, posted = self.recvs[op.kind, route.rank]
            while route not in posted:
                self._post_recv(to_post, posted)
                self._post_recvs()
            tensor, work = posted.pop(route)
            work.wait()
        # The sender has done all its ops up to this one, so it has received what this rank sent for
        # them.
        order = self.order_of(route.rank)
        self._release(
            to
            for to in self.pending_sends
            if to.rank == route.rank and order[to.op] <= order[route.op]
        )
        return tensor

    def send(self, op: Op, result: torch.Tensor | None) -> None:
        """Start to send what ``op`` gave to the stage that needs it, if any does; keep it until it
        has left.
        """
        route = self._route(op, 1)
        if route is None:
            return
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or result.dtype not in DTYPES or result.dim() > MAX_DIMS:
            what = f"{result.dtype} of {result.dim()} dims" if is_tensor else type(result).__name__
            raise ValueError(
                f"{op} gave a {what}: a stage must give one tensor of floats, of at most "
                f"{MAX_DIMS} dims"
            )
        tensor = result.detach().contiguous()
        if route.rank == self.rank:
            self.handed_over[route.op] = tensor
            return
        self._release(takewhile(self._has_left, self.pending_sends))
        if route.stage not in self.shapes:
            self._send_shape(route, tensor)
        dtype, shape = self._shape(route)
        if (dtype, shape) != (tensor.dtype, tensor.shape):
            gave = f"{tensor.dtype} {list(tensor.shape)}"
            rule = "for like inputs a stage must give like shapes, with the rows in the first dim"
            raise ValueError(
                f"{op} gave {gave}, but the next stage expects {dtype} {list(shape)}: {rule}"
            )
        self._post_send(route, tensor, route.group, route.tag)

    def flush(self) -> None:
        """Wait until everything has left."""
        self._release(self.pending_sends)

    def _release(self, routes: Iterable[Route]) -> None:
        for route in list(routes):
            with waiting_for(route.op):
                for _, work in self.pending_sends.pop(route):
                    work.wait()

    def _has_left(self, route: Route) -> bool:
        return all(
            work.is_completed() for _, work in self.pending_sends[route]
        )  # NCCL knows, gloo does not

    def _post_send(
        self, route: Route, tensor: torch.Tensor, group: dist.ProcessGroup, tag: int
    ) -> None:
        work = dist.isend(tensor, group=group, group_dst=route.rank, tag=tag)
        self.pending_sends.setdefault(route, []).append((tensor, work))

    def _post_recvs(self) -> None:
        """Start to receive the next messages of each kind from each sender, as far as their shapes
        are known.
        """
        for (kind, _), (to_post, posted) in self.recvs.items():
            # Shapes come through the channels of gradients, and before them.
            to_know = self.stages_before if kind == BACKWARD else set()
            while (
                to_post
                and len(posted) < self.recv_prefetch
                and {to_post[0].stage} | to_know <= self.shapes.keys()
            ):
                self._post_recv(to_post, posted)

    def _post_recv(self, to_post: deque[Route], posted: dict[Route, tuple]) -> None:
        """Start to receive the next message, after its shape, and in a channel once the one before
        it is here.
        """
        if posted and self.groups.has_channels:
            posted[next(reversed(posted))][1].wait()
        route = to_post.popleft()
        if route.stage not in self.shapes:
            self._recv_shape(route)
        dtype, shape = self._shape(route)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        posted[route] = (
            tensor,
            dist.irecv(tensor, group=route.group, group_src=route.rank, tag=route.tag),
        )

    def _send_shape(self, route: Route, tensor: torch.Tensor) -> None:
        rows = self.rows[route.op.micro_batch]
        self.shapes[route.stage] = tensor.dtype, tensor.shape, rows
        padding = [0] * (MAX_DIMS - tensor.dim())
        numbers = [rows, DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]
        message = torch.tensor(numbers, device=self.device)
        self._post_send(route, message, route.shape_group, route.shape_tag)

    def _recv_shape(self, route: Route) -> None:
        message = torch.empty(3 + MAX_DIMS, dtype=torch.int64, device=self.device)
        work: Any = dist.irecv(
            message, group=route.shape_group, group_src=route.rank, tag=route.shape_tag
        )
        work.wait()
        rows, dtype, num_dims, *shape = message.tolist()  # on a GPU, the host waits
        self.shapes[route.stage] = DTYPES[dtype], torch.Size(shape[:num_dims]), rows

    def _shape(self, route: Route) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape that both ends know of a message: as noted, but with its own
        number of rows.
        """
        dtype, shape, rows = self.shapes[route.stage]
        own_rows = self.rows[route.op.micro_batch]
        return dtype, shape if own_rows == rows else torch.Size([own_rows, *shape[1:]])

    def _route(self, op: Op, steps: int) -> Route | None:
        """Return the route of the message that ``op`` gives (``steps`` is 1) or needs (-1); None if
        there is none.
        """
        neighbor = self.schedule.neighbor(self.rank, op, steps)
        if neighbor is None:
            return None
        rank, there = neighbor
        group, of_shapes = (
            self.groups.channel(kind, *(self.rank, rank)[::steps]) for kind in (op.kind, BACKWARD)
        )
        stage = min(
            self.schedule.stage_of(self.rank, op.chunk), self.schedule.stage_of(rank, there.chunk)
        )
        number = stage + (op.kind == BACKWARD) * self.schedule.num_stages
        shape_tag = number * (len(self.rows) + 1)
        return Route(
            rank, there, group, shape_tag + 1 + op.micro_batch, of_shapes, shape_tag, stage
        )


@lru_cache(maxsize=64)
def _due(schedule: Schedule) -> dict[tuple[int, Op], deque]:
    """Return by rank and op which receives to post before it: kind and sender, and how many may be
    left to post.

    If all ops took the same time, these are of all that was sent but each channel's newest message.
    So no rank waits for ever: in that order each send finds the message before it received, and
    each receive finds its message sent.
    """
    steps: dict[tuple[int, Op], int] = {}  # when each op runs
    last_step: Counter[int] = Counter()  # of each rank
    next_op: dict[int, Op] = {}  # of each rank, going backwards
    due: dict[Any, deque] = defaultdict(deque)
    num_left: Counter[tuple[str, int, int]] = Counter()  # messages by kind, sender and receiver
    with suppress(ScheduleDeadlock):
        for rank, op, needs in schedule.in_order():
            last_step[rank] = steps[rank, op] = 1 + max(
                [last_step[rank], *(steps[need] for need in needs)]
            )
        for rank, op in sorted(steps, key=steps.__getitem__, reverse=True):
            next_op[rank] = op
            receiver, _ = schedule.neighbor(rank, op, 1) or (rank, op)
            if receiver != rank:
                num_left[op.kind, rank, receiver] += 1  # this one and those after it
                due[receiver, next_op.get(receiver)].appendleft(
                    ((op.kind, rank), num_left[op.kind, rank, receiver])
                )
    return due
