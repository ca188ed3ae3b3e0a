"""What travels between this rank and its neighbours: activations down the pipeline, gradients up.

Each message has its own tag: with interleaving on two ranks, both neighbours are the same rank. NCCL knows no tags and
delivers in the order of sending. There each kind and direction has its own group (`ProcessGroups.channel`), in which
schedules send in the order in which they receive.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.groups import ProcessGroups, local_device
from labkit.launch import waiting_for
from labkit.schedules import BACKWARD, FORWARD, Op, Schedule
from labkit.timeline.spans import WAIT

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class _Way(NamedTuple):
    """How messages travel between two chunks: the other one's rank and number, their group, and their first tag."""

    rank: int
    chunk: int
    group: dist.ProcessGroup
    first_tag: int  # micro-batch i has the i-th after it, the announcement the one after all of these


class Messages:
    """The mail of one rank in one step; ``rows`` says how many rows each micro-batch has, and ``span`` notes waits."""

    def __init__(self, schedule: Schedule, groups: ProcessGroups, rows: Sequence[int], span: Callable, ahead: int):
        self.schedule, self.groups, self.rows, self.span, self.ahead = schedule, groups, rows, span, ahead
        self.rank, self.device = groups.coords.pp, local_device()
        self._to_take = deque(schedule.ranks[self.rank])
        self._announcements: dict[int, tuple[torch.Tensor, Any]] = {}  # by chunk: the form of what it gets, under way
        self._forms: dict[int, list[int]] = {}  # by chunk, once announced
        self._announced: dict[int, tuple[Any, torch.Tensor]] = {}  # by chunk: the form of what it gives
        self._arriving: dict[Op, tuple[torch.Tensor, Any, dist.ProcessGroup]] = {}
        self._handed_over: dict[Op, torch.Tensor] = {}  # from one chunk of this rank to another
        self._leaving: dict[Op, tuple[Any, torch.Tensor]] = {}  # what is sent must live until it has left

    def take(self, op: Op) -> torch.Tensor | None:
        """Return what ``op``, the schedule's next, needs; wait if it is not here yet. None if it needs nothing."""
        for coming in islice(self._to_take, self.ahead):
            if not self._expect(coming):
                break  # receives start in the order of the ops, as NCCL wants it
        self._to_take.popleft()
        way = self._way(op, is_incoming=True)
        if way is None or way.rank == self.rank:
            return self._handed_over.pop(op, None)
        with self.span(WAIT, f"for {op}", op), waiting_for(op):
            if not self._expect(op):
                announcement, travelling = self._announcements[op.chunk]
                travelling.wait()
                self._forms[op.chunk] = announcement.tolist()
                self._expect(op)
            tensor, travelling, _ = self._arriving.pop(op)
            travelling.wait()
            if op.kind == BACKWARD:  # then the activation has arrived there, too
                self._let_go(op._replace(kind=FORWARD))
        return tensor

    def send(self, op: Op, result: torch.Tensor | None) -> None:
        """Start to send what ``op`` gave to the stage that needs it; do nothing if none does."""
        way = self._way(op, is_incoming=False)
        if way is None:
            return
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or result.dtype not in DTYPES or result.dim() > MAX_DIMS:
            what = f"{result.dtype} of {result.dim()} dims" if is_tensor else type(result).__name__
            raise ValueError(f"{op} gave a {what}: a stage must give one tensor of floats, of at most {MAX_DIMS} dims")
        tensor = result.detach().contiguous()
        if way.rank == self.rank:
            self._handed_over[op._replace(chunk=way.chunk)] = tensor
            return
        isend = partial(dist.isend, group=way.group, group_dst=way.rank)
        if op.kind == FORWARD and op.chunk not in self._announced:
            form = [DTYPES.index(tensor.dtype), op.micro_batch, tensor.dim(), *tensor.shape]
            announcement = torch.tensor(form + [0] * (3 + MAX_DIMS - len(form)), device=self.device)
            self._announced[op.chunk] = isend(announcement, tag=way.first_tag + len(self.rows)), announcement
        self._leaving[op] = isend(tensor, tag=way.first_tag + op.micro_batch), tensor

    def flush(self) -> None:
        """Wait until everything has left."""
        for op in list(self._leaving):
            self._let_go(op)
        for travelling, _ in self._announced.values():
            travelling.wait()

    def _let_go(self, op: Op) -> None:
        with waiting_for(op):
            travelling, _ = self._leaving.pop(op)
            travelling.wait()

    def _expect(self, op: Op) -> bool:
        """Start to receive what ``op`` needs, if anything; return False if that must wait.

        It must wait while nobody knows how large the message is. On a GPU it must also wait while the channel has an
        open receive: a second one in the queue can hold up the computation that the other one waits for.
        """
        way = self._way(op, is_incoming=True)
        if op in self._arriving or way is None or way.rank == self.rank:
            return True
        if self.groups.keeps_order and way.group in (group for *_, group in self._arriving.values()):
            return False
        tensor, irecv = self._room_for(op), partial(dist.irecv, group=way.group, group_src=way.rank)
        if tensor is not None:
            self._arriving[op] = tensor, irecv(tensor, tag=way.first_tag + op.micro_batch), way.group
        elif op.kind == FORWARD and op.chunk not in self._announcements:
            announcement = torch.empty(3 + MAX_DIMS, dtype=torch.int64, device=self.device)
            self._announcements[op.chunk] = announcement, irecv(announcement, tag=way.first_tag + len(self.rows))
        return tensor is not None

    def _room_for(self, op: Op) -> torch.Tensor | None:
        """Return an empty tensor for what ``op`` needs, or None while nobody knows how large it will be."""
        if op.kind == BACKWARD:  # as large as the activation that was sent
            sent = self._leaving.get(op._replace(kind=FORWARD))
            return torch.empty_like(sent[1]) if sent else None
        if op.chunk not in self._forms:
            return None
        dtype, announced, num_dims, *shape = self._forms[op.chunk]
        shape, known, wanted = shape[:num_dims], self.rows[announced], self.rows[op.micro_batch]
        if known != wanted:
            if shape[:1] != [known]:
                rule = "where micro-batches differ in size, the first dim of what a stage gives must be the rows"
                raise ValueError(f"micro-batch {announced} has {known} rows, but activations of shape {shape}: {rule}")
            shape[0] = wanted
        return torch.empty(shape, dtype=DTYPES[dtype], device=self.device)

    def _way(self, op: Op, is_incoming: bool) -> _Way | None:
        """Return the way of the message that ``op`` needs (if ``is_incoming``) or gives; None if there is none."""
        if op.kind not in (FORWARD, BACKWARD):
            return None
        own, onward = self.schedule.stage_of(self.rank, op.chunk), 1 if op.kind == FORWARD else -1
        sender, receiver = (own - onward, own) if is_incoming else (own, own + onward)
        place = self.schedule.place_of(sender if is_incoming else receiver)
        if place is None:  # an end of the pipeline
            return None
        p, number = self.schedule.num_stages, sender + (op.kind == BACKWARD) * self.schedule.num_model_chunks
        group = self.groups.channel(op.kind, wraps=sender // p != receiver // p)
        return _Way(*place, group, first_tag=number * (len(self.rows) + 1))
