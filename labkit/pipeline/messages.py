"""Sends activations to the next stage and gradients to the one before, and receives both ahead of
need.

When a rank sends and when it posts a receive is the schedule's (`labkit.schedules.lowered`). Each
message has a tag: with interleaving on two ranks, both neighbours are the same rank. NCCL knows no
tags, so there each kind and direction has its own channel (`ProcessGroups.channel`), in which
messages arrive in the order in which they are sent.

What travels has one dtype and shape between all stages (`ActivationSpec`), so no shape has to be
sent. Micro-batches may differ in their number of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.groups import ProcessGroups, local_device
from labkit.launch import waiting_for
from labkit.schedules import BACKWARD, FORWARD, SEND, Message, Op, Schedule
from labkit.timeline.spans import WAIT

ActivationSpec = tuple[torch.dtype, torch.Size]
"""What a stage gives for the first micro-batch, and the shape of its gradient: [rows, ...]."""


class Messages:
    """Sends and receives the tensors of one rank in one step.

    Communication: for each micro-batch and border between stages on different ranks, the rank
    before it sends one activation, and gets back one gradient of the same shape. In bfloat16 that
    is 2 * 2 * rows * seq * hidden bytes for a Transformer. Without sequence parallelism each of t
    tensor ranks sends the same bytes (Megatron-LM's scatter/gather, arXiv 2104.04473, section 4.1,
    sends 1/t of them; so does sequence parallelism).

    A send does not keep its rank from computing. But at the next one of its kind and direction the
    host, with NCCL the compute stream, waits until the peer has received the one before: so a rank
    holds one sent tensor for each channel, however far it runs ahead.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: ProcessGroups,
        inputs: Sequence[torch.Tensor],
        activation_spec: ActivationSpec | None,
        span: Callable,
    ):
        self.schedule = schedule
        self.groups = groups
        self.span = span
        self.rank = groups.coords.pp
        self.device = local_device()
        self.num_rows = [len(rows) for rows in inputs]
        self.dtype, self.shape = activation_spec or (inputs[0].dtype, inputs[0].shape)
        self.results: dict[Op, torch.Tensor] = {}  # of this rank's ops, to be sent
        self.handed_over: dict[Op, torch.Tensor] = {}  # from one chunk of this rank to another
        self.received: dict[Op, tuple[torch.Tensor, Any]] = {}  # for the op that needs it
        # By kind and peer, so of each channel: what was sent last, and may not have left
        self.sent: dict[tuple[str, int], tuple[Op, torch.Tensor, Any]] = {}
        # In one order on all ranks. Now, as no message is under way yet: to connect, NCCL allocates
        # memory, and on a GPU that may wait for whatever runs there.
        for stage in range(1, schedule.num_stages):
            before = schedule.rank_of_stage(stage - 1)
            after = schedule.rank_of_stage(stage)
            groups.connect(FORWARD, before, after)
            groups.connect(BACKWARD, after, before)

    def take(self, op: Op) -> torch.Tensor | None:
        """Return what ``op`` needs of another stage; wait if it is not here yet.

        None if it needs nothing.
        """
        if op not in self.received:
            return self.handed_over.pop(op, None)
        tensor, work = self.received.pop(op)
        with self.span(WAIT, f"for {op}", op), waiting_for(op):
            work.wait()
        return tensor

    def give(self, op: Op, result: torch.Tensor | None) -> None:
        """Keep what ``op`` gave until it is sent, or until this rank's next chunk takes it."""
        receiver = self.schedule.neighbor(self.rank, op, 1)
        if receiver is None:
            return
        assert result is not None
        tensor = result.detach().contiguous()
        peer, need = receiver
        if peer == self.rank:
            self.handed_over[need] = tensor
        else:
            self.results[op] = tensor

    def do(self, message: Message) -> None:
        """Start to send or to receive a message."""
        op = message.op
        number = message.stage * len(self.num_rows) + op.micro_batch
        tag = 1 + 2 * number + (op.kind == BACKWARD)  # 0 is what messages without a tag have
        if message.action == SEND:
            self._send(op, message.peer, tag)
        else:
            self._recv(op, message.peer, tag)

    def flush(self) -> None:
        """Wait until everything has left."""
        for channel in list(self.sent):
            self._wait_until_left(channel)

    def _send(self, op: Op, peer: int, tag: int) -> None:
        tensor = self.results.pop(op)
        self._check(op, tensor)
        channel = (op.kind, peer)
        self._wait_until_left(channel)
        group = self.groups.channel(op.kind, self.rank, peer)
        work = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
        self.sent[channel] = op, tensor, work

    def _wait_until_left(self, channel: tuple[str, int]) -> None:
        if channel in self.sent:
            op, _, work = self.sent.pop(channel)
            with waiting_for(op):
                work.wait()

    def _recv(self, op: Op, peer: int, tag: int) -> None:
        tensor = torch.empty(self._shape(op), dtype=self.dtype, device=self.device)
        group = self.groups.channel(op.kind, peer, self.rank)
        work = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
        self.received[op] = tensor, work

    def _shape(self, op: Op) -> torch.Size:
        """Return the activation's shape, with as many rows as this micro-batch has."""
        num_rows = self.num_rows[op.micro_batch]
        if num_rows == self.num_rows[0]:
            return self.shape
        return torch.Size([num_rows, *self.shape[1:]])

    def _check(self, op: Op, tensor: torch.Tensor) -> None:
        """Raise a ValueError unless the tensor is what the other end expects."""
        shape = self._shape(op)
        if (tensor.dtype, tensor.shape) != (self.dtype, shape):
            gave = f"{tensor.dtype} {list(tensor.shape)}"
            wanted = f"{self.dtype} {list(shape)}"
            rule = "all stages but the last give the same, with the rows in the first dim"
            way_out = "unless it is what inputs are, state it: activation_spec=(dtype, shape)"
            raise ValueError(
                f"{op} gave {gave}, but the next stage expects {wanted}: {rule}; {way_out}"
            )
