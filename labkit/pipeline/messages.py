"""What travels between this rank and its neighbours: activations down the pipeline, gradients up.

Each message has a tag of its own, so that none is taken for another: with interleaving on two ranks both
neighbours are the same rank. NCCL knows no tags and delivers in the order of sending; there each kind and direction
has a group of its own (`ProcessGroups.channel`), in which schedules send in the order in which they receive.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from labkit.groups import ProcessGroups, local_device
from labkit.launch import waiting_for
from labkit.schedules import BACKWARD, FORWARD, Op, Schedule

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 8


class _Form(NamedTuple):
    """What a tensor looks like that will come in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    micro_batch: int


class Messages:
    """The mail of one rank in one step; ``rows`` says how many rows each micro-batch has."""

    def __init__(self, schedule: Schedule, groups: ProcessGroups, rows: Sequence[int]):
        self.schedule, self.groups, self.rows = schedule, groups, rows
        self.rank, self.device = groups.coords.pp, local_device()
        self._announcements: dict[int, tuple[torch.Tensor, dist.Work]] = {}  # of a chunk's first activation: its form
        self._activation: dict[int, _Form] = {}  # for each chunk, once announced
        self._gradient: dict[Op, _Form] = {}  # for each backward: as the activation that was sent
        self._arriving: dict[Op, tuple[torch.Tensor, dist.Work]] = {}
        self._handed_over: dict[Op, torch.Tensor] = {}  # from one chunk of this rank to another
        self._leaving: dict[Op, list] = {}  # tensors and works: what is sent must live until it has left

    def comes_from_elsewhere(self, op: Op) -> bool:
        """Whether ``op`` needs a message from another rank."""
        place = self._partner(op, -1)
        return place is not None and place[0] != self.rank

    def expect(self, op: Op) -> bool:
        """Start to receive what ``op`` needs; False if that must wait.

        It must while nobody knows how large the message is. On a GPU also while another is to come first in the same
        channel: a receive that stands in a queue there can hold up the computation that the other one waits for.
        """
        if op in self._arriving or not self.comes_from_elsewhere(op):
            return True
        if self.groups.keeps_order and self._way_in(op) in map(self._way_in, self._arriving):
            return False
        form = self._activation.get(op.chunk) if op.kind == FORWARD else self._gradient.get(op)
        if form is None:
            if op.kind == FORWARD and op.chunk not in self._announcements:
                announcement = torch.empty(3 + MAX_DIMS, dtype=torch.int64, device=self.device)
                self._announcements[op.chunk] = announcement, self._receive(announcement, op, is_announcement=True)
            return False
        tensor = torch.empty(self._shape(form, op), dtype=form.dtype, device=self.device)
        self._arriving[op] = tensor, self._receive(tensor, op)
        return True

    def take(self, op: Op) -> torch.Tensor | None:
        """What ``op`` needs, waited for; None where it needs nothing."""
        if not self.comes_from_elsewhere(op):
            return self._handed_over.pop(op, None)
        if not self.expect(op):
            announcement, travelling = self._announcements[op.chunk]
            _wait(travelling, op)
            dtype, micro_batch, num_dims, *sizes = announcement.tolist()
            self._activation[op.chunk] = _Form(tuple(sizes[:num_dims]), DTYPES[dtype], micro_batch)
            self.expect(op)
        tensor, travelling = self._arriving.pop(op)
        _wait(travelling, op)
        if op.kind == BACKWARD:  # then the activation has arrived there, too
            self._let_go(op._replace(kind=FORWARD))
        return tensor

    def send(self, op: Op, result: torch.Tensor) -> None:
        """Start to send what ``op`` has given to the stage that needs it."""
        place = self._partner(op, +1)
        if place is None:
            return
        if not isinstance(result, torch.Tensor) or result.dtype not in DTYPES or result.dim() > MAX_DIMS:
            what = (
                f"{result.dtype} of {result.dim()} dims" if isinstance(result, torch.Tensor) else type(result).__name__
            )
            raise ValueError(f"{op} gave a {what}: a stage must give one tensor of floats, of {MAX_DIMS} dims at most")
        tensor = result.detach().contiguous()
        if place[0] == self.rank:
            self._handed_over[op._replace(chunk=place[1])] = tensor
            return
        works = self._leaving[op] = []
        if op.kind == FORWARD:
            if not any(other.chunk == op.chunk for other in self._gradient):
                form = [DTYPES.index(tensor.dtype), op.micro_batch, tensor.dim(), *tensor.shape]
                form += [0] * (3 + MAX_DIMS - len(form))
                announcement = torch.tensor(form, device=self.device)
                works.append((self._send(announcement, op, place, is_announcement=True), announcement))
            self._gradient[op._replace(kind=BACKWARD)] = _Form(tuple(tensor.shape), tensor.dtype, op.micro_batch)
        works.append((self._send(tensor, op, place), tensor))

    def flush(self) -> None:
        """Wait until everything has left."""
        for op in list(self._leaving):
            self._let_go(op)

    def _let_go(self, op: Op) -> None:
        for travelling, _ in self._leaving.pop(op):
            _wait(travelling, op)

    def _partner(self, op: Op, step: int) -> tuple[int, int] | None:
        """The (rank, chunk) that ``op`` hears from (-1) or writes to (+1); None at the pipeline's ends."""
        if op.kind not in (FORWARD, BACKWARD):
            return None
        onward = step if op.kind == FORWARD else -step
        return self.schedule.place_of(self.schedule.stage_of(self.rank, op.chunk) + onward)

    def _shape(self, form: _Form, op: Op) -> tuple[int, ...]:
        """The form is that of the first micro-batch: others differ in the number of rows at most."""
        known, wanted = self.rows[form.micro_batch], self.rows[op.micro_batch]
        if known == wanted:
            return form.shape
        if form.shape[:1] != (known,):
            raise ValueError(
                f"micro-batch {form.micro_batch} has {known} rows, but activations of shape {list(form.shape)}: "
                "where micro-batches differ in size, the first dim of what a stage gives must be the rows"
            )
        return wanted, *form.shape[1:]

    def _send(self, tensor: torch.Tensor, op: Op, place: tuple[int, int], is_announcement: bool = False) -> dist.Work:
        sender = self.schedule.stage_of(self.rank, op.chunk)
        group, tag = self._channel(op.kind, sender), self._tag(op, sender, is_announcement)
        return dist.isend(tensor, group=group, group_dst=place[0], tag=tag)  # type: ignore[return-value]

    def _receive(self, tensor: torch.Tensor, op: Op, is_announcement: bool = False) -> dist.Work:
        tag = self._tag(op, self._sender(op), is_announcement)
        return dist.irecv(tensor, group=self._way_in(op), group_src=self._partner(op, -1)[0], tag=tag)  # type: ignore

    def _sender(self, op: Op) -> int:
        """The model's chunk that sends what ``op`` needs."""
        return self.schedule.stage_of(self.rank, op.chunk) - (1 if op.kind == FORWARD else -1)

    def _way_in(self, op: Op) -> dist.ProcessGroup:
        return self._channel(op.kind, self._sender(op))

    def _channel(self, kind: str, sender: int) -> dist.ProcessGroup:
        """The group for what the model's chunk ``sender`` sends."""
        receiver = sender + (1 if kind == FORWARD else -1)
        return self.groups.channel(kind, sender // self.schedule.num_stages != receiver // self.schedule.num_stages)

    def _tag(self, op: Op, sender: int, is_announcement: bool) -> int:
        kind = 2 if is_announcement else int(op.kind == BACKWARD)
        tag = (kind * self.schedule.num_model_chunks + sender) * self.schedule.num_micro_batches
        return tag if is_announcement else tag + op.micro_batch  # sender and receiver may start with different ones


def _wait(travelling: dist.Work, op: Op) -> None:
    """Wait for a message of this op; if it never comes, the launcher's report names the op."""
    with waiting_for(op):
        travelling.wait()
