"""Defines a schedule.

A batch is split into m micro-batches, and the model into p*v stages, v per rank: the rank's chunks.
A schedule is p lists of ops. It also says where the stages live (`labkit.schedules.stages`); a
micro-batch visits each rank v times.
"""

import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from labkit.schedules.stages import check_stages, round_robin
from labkit.sizes import check_size, counted

KINDS = FORWARD, BACKWARD, WEIGHT_GRADIENT = "forward", "backward", "weight_gradient"
LETTER = {FORWARD: "F", BACKWARD: "B", WEIGHT_GRADIENT: "W"}


class Op(NamedTuple):
    """One step of a rank's work: one ``kind`` of pass of one micro-batch through one of the rank's
    chunks.

    Where the backward is split, ``backward`` computes the gradient of the input, which the stage
    before waits for, and ``weight_gradient`` that of the weights. In the zero-bubble paper these
    are B and W, as here; torch calls them I and W, and a whole backward B.

    >>> str(Op("forward", 3)), str(Op("backward", 0, chunk=1))
    ('F3', 'B0.1')
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{LETTER.get(self.kind, self.kind)}{self.micro_batch}" + (
            f".{self.chunk}" if self.chunk else ""
        )


class ScheduleDeadlock(ValueError):
    """Ranks that wait for each other; ``waits`` has each one's next op, and the rank and op it
    waits for.

    Where messages were looked at, these may be messages.
    """

    def __init__(self, name: str, waits: dict[int, tuple[Any, int, Any]]):
        super().__init__(name, waits)
        self.name = name
        self.waits = waits

    def __str__(self) -> str:
        waits = [(rank, *wait) for rank, wait in self.waits.items()]
        texts = [
            f"rank {rank} waits at {op} for {need} of rank {other}"
            for rank, op, other, need in waits
        ]
        way_out = "move an op that another rank waits for before the op at which its own rank waits"
        return f"deadlock in {self.name!r}: {'; '.join(texts)}: {way_out}"


@dataclass(frozen=True)
class Schedule:
    """What each of ``pp_size`` ranks does, in order. Write your own, and let `check` look at it.

    >>> ops = [Op("forward", 0), Op("backward", 0)]
    >>> print(Schedule("mine", pp_size=1, num_micro_batches=1, ranks=[ops]))
    mine: 1 rank, 1 micro-batch
    rank 0 | F0 B0
    """

    name: str
    pp_size: int  # p, the number of ranks in the pipeline
    num_micro_batches: int  # m
    ranks: Sequence[Sequence[Op]]  # the ops of each rank, in its order
    num_chunks: int = 1  # v, the number of chunks of the model on each rank
    # Forward alone in evaluation, all three if the backward is split
    kinds: tuple[str, ...] = (FORWARD, BACKWARD)
    # Of each rank, chunk by chunk: `round_robin` unless given, or `v_shape`
    stages: Sequence[Sequence[int]] = ()

    def __post_init__(self):
        for name in ("pp_size", "num_micro_batches", "num_chunks"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        object.__setattr__(self, "ranks", tuple(tuple(ops) for ops in self.ranks))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        if self.kinds not in (KINDS[:1], KINDS[:2], KINDS):
            raise ValueError(
                f"kinds={self.kinds} must be the first one, the first two or all of "
                f"{', '.join(KINDS)}"
            )
        stages = self.stages if len(self.stages) else round_robin(self.pp_size, self.num_chunks)
        object.__setattr__(self, "stages", check_stages(stages, self.pp_size, self.num_chunks))

    @property
    def num_stages(self) -> int:
        """p*v: into how many consecutive stages the model is divided."""
        return self.pp_size * self.num_chunks

    @cached_property
    def _homes(self) -> dict[int, tuple[int, int]]:
        """The rank and the chunk of each stage."""
        return {
            stage: (rank, chunk)
            for rank, stages in enumerate(self.stages)
            for chunk, stage in enumerate(stages)
        }

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """Return which stage this chunk is, counted from the model's input."""
        return self.stages[rank][chunk]

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank that has this stage."""
        return self._homes[stage][0]

    def chunk_of_stage(self, stage: int) -> int:
        """Return which of its rank's chunks this stage is."""
        return self._homes[stage][1]

    @property
    def end_ranks(self) -> set[int]:
        """The ranks of the first and the last stage, which have the embedding and the loss."""
        return {self.rank_of_stage(0), self.rank_of_stage(self.num_stages - 1)}

    def neighbor(self, rank: int, op: Op, steps: int) -> tuple[int, Op] | None:
        """Return the (rank, op) that needs the result of ``op`` (``steps`` is 1) or gives it its
        input (-1), if any.
        """
        stage = self.stage_of(rank, op.chunk) + (steps if op.kind == FORWARD else -steps)
        if op.kind == WEIGHT_GRADIENT or stage not in self._homes:
            return None
        return self.rank_of_stage(stage), op._replace(chunk=self.chunk_of_stage(stage))

    def needs(self, rank: int, op: Op) -> list[tuple[int, Op]]:
        """Return the (rank, op) pairs that must have finished before ``rank`` can start ``op``.

        >>> from labkit.schedules import one_f_one_b
        >>> [f"{op} of rank {rank}" for rank, op in one_f_one_b(4, 8).needs(2, Op("backward", 5))]
        ['B5 of rank 3', 'F5 of rank 2']
        """
        pairs = []
        sender = self.neighbor(rank, op, -1)
        if sender is not None:
            pairs.append(sender)
        earlier_kind = {BACKWARD: FORWARD, WEIGHT_GRADIENT: BACKWARD}.get(op.kind)
        if earlier_kind is not None:  # what this rank itself must have done
            pairs.append((rank, op._replace(kind=earlier_kind)))
        return pairs

    def in_order(self) -> Iterator[tuple[int, Op, list[tuple[int, Op]]]]:
        """Yield each rank, op, and what it needs, in an order that can run, or raise a
        `ScheduleDeadlock`.
        """
        done: set[tuple[int, Op]] = set()
        left = [deque(ops) for ops in self.ranks]
        while any(left):
            waits = {}
            num_before = len(done)
            for rank, ops in enumerate(left):
                while ops and rank not in waits:
                    needs = self.needs(rank, ops[0])
                    if missing := [need for need in needs if need not in done]:
                        waits[rank] = (ops[0], *missing[0])
                    else:
                        yield rank, ops[0], needs
                        done.add((rank, ops.popleft()))
            if len(done) == num_before:
                raise ScheduleDeadlock(self.name, waits)

    def peak_in_flight(self, rank: int) -> int:
        """Return the largest number of micro-batches whose activations ``rank`` holds at once.

        Each counts from its forward until its last op is done; with v chunks, each pass counts, and
        holds 1/v as much.

        >>> from labkit.schedules import gpipe, one_f_one_b
        >>> [gpipe(4, 8).peak_in_flight(rank) for rank in range(4)]
        [8, 8, 8, 8]
        >>> [one_f_one_b(4, 8).peak_in_flight(rank) for rank in range(4)]
        [4, 3, 2, 1]
        """
        peak = held = 0
        for op in self.ranks[rank]:
            held += op.kind == FORWARD
            peak = max(peak, held)
            held -= op.kind == self.kinds[-1]
        return peak

    def forward_only(self) -> "Schedule":
        """Return the same order without gradients, for evaluation."""
        ranks = [[op for op in ops if op.kind == FORWARD] for ops in self.ranks]
        return replace(self, name=f"{self.name}, forward only", ranks=ranks, kinds=(FORWARD,))

    def __str__(self) -> str:
        """Return one row per rank, with its ops in order."""
        chunks = [counted(self.num_chunks, "chunk") + " per rank"] if self.num_chunks > 1 else []
        sizes = [
            counted(self.pp_size, "rank"),
            counted(self.num_micro_batches, "micro-batch"),
            *chunks,
        ]
        lines = [f"{self.name}: {', '.join(sizes)}"]
        for rank, ops in enumerate(self.ranks):
            head = f"rank {rank:<{len(str(len(self.ranks) - 1))}} | "
            text = " ".join(map(str, ops))
            lines.append(
                textwrap.fill(
                    text, 100, initial_indent=head, subsequent_indent="| ".rjust(len(head))
                )
            )
        return "\n".join(lines)
