"""Pipeline schedules as data: what each rank does, in which order. No processes, no tensors, no times.

The model is cut into p stages, one a rank, and a batch into m micro-batches. A schedule is p lists of ops. A runtime
obeys it (`labkit.pipeline`), a simulation says when each op would run (`labkit.timeline`), a picture shows it.

With interleaving each rank has v chunks of the model instead of one: chunk c of rank r is model chunk c*p + r, so that
a micro-batch visits every rank v times. "Model chunk" and "stage" are the same thing where v is 1.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from labkit.sizes import check_size

FORWARD, BACKWARD, WEIGHT_GRADIENT = "forward", "backward", "weight_gradient"
LETTER = {FORWARD: "F", BACKWARD: "B", WEIGHT_GRADIENT: "W"}


class Op(NamedTuple):
    """One step of a rank: ``kind`` of work on one micro-batch, by one of the rank's chunks.

    Where the backward is split, ``backward`` computes the gradient of the input, which the stage before waits for,
    and ``weight_gradient`` the gradient of the weights, which nobody waits for.

    >>> str(Op("forward", 3)), str(Op("backward", 0, chunk=1))
    ('F3', 'B0.1')
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{LETTER.get(self.kind, self.kind)}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


def read_ops(text: str) -> list[Op]:
    """Ops as they are printed, separated by spaces, for a schedule of your own.

    >>> [op == Op("forward", 3) for op in read_ops("F3 B0.1")]
    [True, False]

    Raises:
        ValueError: a word that is no op.
    """
    kinds = {letter: kind for kind, letter in LETTER.items()}
    ops = []
    for word in text.split():
        parts = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word)
        if not parts:
            raise ValueError(
                f"{word!r} is no op: write F, B or W, the micro-batch, and .chunk above chunk 0, as in F3.1"
            )
        ops.append(Op(kinds[parts[1]], int(parts[2]), int(parts[3] or 0)))
    return ops


@dataclass(frozen=True)
class Schedule:
    """What each of ``num_stages`` ranks does in order; write your own, and let `check` look at it.

    >>> mine = Schedule("mine", num_stages=1, num_micro_batches=1, ranks=[[Op("forward", 0), Op("backward", 0)]])
    >>> print(mine)
    mine: 1 rank, 1 micro-batch
    rank 0 | F0 B0
    """

    name: str
    num_stages: int
    """p, the ranks of the pipeline."""
    num_micro_batches: int
    """m."""
    ranks: Sequence[Sequence[Op]]
    """The ops of each rank, in its order."""
    num_chunks: int = 1
    """v, the chunks of the model that each rank has."""
    kinds: tuple[str, ...] = (FORWARD, BACKWARD)
    """The ops that each micro-batch needs of each chunk: forward alone for evaluation, three if backward is split."""

    def __post_init__(self):
        for name in ("num_stages", "num_micro_batches", "num_chunks"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        object.__setattr__(self, "ranks", tuple(tuple(ops) for ops in self.ranks))

    @property
    def num_model_chunks(self) -> int:
        """p*v: into how many pieces the whole model is cut."""
        return self.num_stages * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are ops of their own."""
        return WEIGHT_GRADIENT in self.kinds

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """Which model chunk this is, counted from the model's input."""
        return chunk * self.num_stages + rank

    def place_of(self, stage: int) -> tuple[int, int] | None:
        """The (rank, chunk) that has this model chunk; None before the first and after the last."""
        chunk, rank = divmod(stage, self.num_stages)
        return (rank, chunk) if 0 <= chunk < self.num_chunks else None

    def needs(self, rank: int, op: Op) -> list[tuple[int, Op]]:
        """The (rank, op) pairs that must have finished before ``rank`` can start ``op``.

        >>> for rank, op in one_f_one_b(4, 8).needs(2, Op("backward", 5)):
        ...     print(f"{op} of rank {rank}")
        B5 of rank 3
        F5 of rank 2
        """
        kind, micro_batch, chunk = op
        if kind == WEIGHT_GRADIENT:
            return [(rank, Op(BACKWARD, micro_batch, chunk))]
        stage = chunk * self.num_stages + rank
        from_stage, own = (stage - 1, []) if kind == FORWARD else (stage + 1, [(rank, Op(FORWARD, micro_batch, chunk))])
        place = self.place_of(from_stage)
        return own if place is None else [(place[0], Op(kind, micro_batch, place[1])), *own]

    def in_order(self) -> Iterator[tuple[int, Op, list[tuple[int, Op]]]]:
        """Every rank, op, and what it needs, in an order in which they can run: each rank in its own, needs first.

        A message waits where it arrives, however long: no rank waits to get rid of one.

        Raises:
            ValueError: a deadlock, with the op at which each rank waits, and for whom.
        """
        done: set[tuple[int, Op]] = set()
        position, before = [0] * len(self.ranks), -1
        while len(done) > before:
            before = len(done)
            for rank, ops in enumerate(self.ranks):
                while position[rank] < len(ops):
                    op = ops[position[rank]]
                    needs = self.needs(rank, op)
                    if not done.issuperset(needs):
                        break
                    yield rank, op, needs
                    done.add((rank, op))
                    position[rank] += 1
        stuck = [(rank, ops[position[rank]]) for rank, ops in enumerate(self.ranks) if position[rank] < len(ops)]
        if stuck:
            waits = []
            for rank, op in stuck:
                missing = next(need for need in self.needs(rank, op) if need not in done)
                waits.append(f"rank {rank} waits at {op} for {missing[1]} of rank {missing[0]}")
            raise ValueError(f"deadlock in {self.name!r}: {'; '.join(waits)}: {_WAY_OUT_OF_DEADLOCK}")

    def peak_in_flight(self, rank: int) -> int:
        """The most micro-batches whose activations ``rank`` holds at once.

        One counts from its forward until its backward is done, or its weight gradient where the backward is split.
        With v chunks each of the v passes counts, and holds 1/v of the rank's activations for a micro-batch.

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
        """The same order without gradients, for evaluation."""
        ranks = [[op for op in ops if op.kind == FORWARD] for ops in self.ranks]
        return replace(self, name=f"{self.name}, forward only", ranks=ranks, kinds=(FORWARD,))

    def __str__(self) -> str:
        """A row a rank, with its ops in order."""
        chunks = [_count(self.num_chunks, "chunk") + " a rank"] if self.num_chunks > 1 else []
        sizes = [_count(self.num_stages, "rank"), _count(self.num_micro_batches, "micro-batch"), *chunks]
        lines = [f"{self.name}: {', '.join(sizes)}"]
        for rank, ops in enumerate(self.ranks):
            head = f"rank {rank:<{len(str(len(self.ranks) - 1))}} | "
            below = "| ".rjust(len(head))
            lines.append(textwrap.fill(" ".join(map(str, ops)), 100, initial_indent=head, subsequent_indent=below))
        return "\n".join(lines)


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards. Simple, and every rank holds the activations of all m micro-batches.

    Bubble, idle over ideal: (p-1)/m. Peak in flight: m. Source: arXiv 1811.06965, section 2.3.

    >>> print(gpipe(2, 3))
    GPipe: 2 ranks, 3 micro-batches
    rank 0 | F0 F1 F2 B0 B1 B2
    rank 1 | F0 F1 F2 B0 B1 B2
    """
    p, m = check_size("num_stages", num_stages), check_size("num_micro_batches", num_micro_batches)
    ops = [Op(kind, i) for kind in (FORWARD, BACKWARD) for i in range(m)]
    return Schedule("GPipe", p, m, [ops] * p)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward in turn, after as many forwards as there are ranks below.

    Bubble, idle over ideal: (p-1)/m as GPipe's. Peak in flight on rank r: only min(p - r, m), because a micro-batch's
    backward starts as soon as it can. Source: arXiv 2104.04473, section 2.2.1 (there "PipeDream-Flush").

    >>> print(one_f_one_b(2, 3))
    1F1B: 2 ranks, 3 micro-batches
    rank 0 | F0 F1 B0 F2 B1 B2
    rank 1 | F0 B0 F1 B1 F2 B2
    """
    p, m = check_size("num_stages", num_stages), check_size("num_micro_batches", num_micro_batches)
    forwards, backwards = ([Op(kind, i) for i in range(m)] for kind in (FORWARD, BACKWARD))
    return Schedule("1F1B", p, m, [_in_turn(forwards, backwards, num_warmup=p - rank - 1) for rank in range(p)])


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """1F1B with v chunks of the model on each rank: a smaller bubble, for v times the messages and more memory.

    Micro-batches go through in rounds of p: each chunk takes the p of a round before the next chunk takes them. Where p
    does not divide m, rounds are a little larger, and there is one of m if m < p.
    Bubble, idle over ideal: (p-1)/(v m) for m >= p; in general (v*max(m, p) + min(m, p) - 1)/(v m) - 1.
    Peak in flight on rank r, in passes through a chunk: min(v m, 2(p-r-1) + (v-1)g + 1) with g the largest round; for
    g = p that is 1F1B's memory on rank 0 times 1 + (p-1)/(p v).

    Source: arXiv 2104.04473, section 2.2.2; the order is that of Megatron-LM where p divides m.

    >>> print(interleaved(2, 2, num_chunks=2))
    interleaved 1F1B: 2 ranks, 2 micro-batches, 2 chunks a rank
    rank 0 | F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1
    rank 1 | F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1
    """
    p, m = check_size("num_stages", num_stages), check_size("num_micro_batches", num_micro_batches)
    v = check_size("num_chunks", num_chunks)
    if v == 1:  # nothing to interleave
        return one_f_one_b(p, m)
    num_rounds = max(1, m // p)
    rounds = [range(m * i // num_rounds, m * (i + 1) // num_rounds) for i in range(num_rounds)]
    forwards = [Op(FORWARD, i, chunk) for members in rounds for chunk in range(v) for i in members]
    backwards = [Op(BACKWARD, i, chunk) for members in rounds for chunk in reversed(range(v)) for i in members]
    before_last_chunk = (v - 1) * max(map(len, rounds))  # forwards that come before a micro-batch's last
    ranks = [_in_turn(forwards, backwards, before_last_chunk + 2 * (p - rank - 1)) for rank in range(p)]
    return Schedule("interleaved 1F1B", p, m, ranks, v)


def zero_bubble(num_stages: int, num_micro_batches: int, extra_in_flight: int = 0) -> Schedule:
    """1F1B with the backward split in two, weight gradients put off until a rank would else stand idle.

    With t_b for the gradient of the input, t_w <= t_f, t_b for that of the weights, and e = ``extra_in_flight``, the
    busiest rank is idle between its first op and its last for (p-1)(t_f + t_b) - (min(m, p+e)-1) t_w, if that is above
    zero; on 1F1B it would be (p-1)(t_f + t_b + t_w). Peak in flight: min(m, p+e).

    - e = 0 is ZB-H1: for m >= p idle for (p-1)(t_f + t_b - t_w), with the memory of 1F1B's rank 0 on every rank.
    - e = p-1 is ZB-H2: for m >= 2p-1 idle for (p-1)(t_f + t_b - 2 t_w), for almost twice the memory.

    No schedule saves the (p-1) t_f that the last rank waits for its first input. With t_f = t_b = t_w ZB-H1 has no
    other idle time in a step. ZB-H2 then moves it: each rank is busy from its first op to its last, and ranks start and
    stop one after the other. That saves time only if steps follow each other with nothing that all ranks wait for.

    Source: arXiv 2401.10241, section 2; the case m < p is ours.

    >>> print(zero_bubble(2, 3))
    zero bubble (ZB-H1): 2 ranks, 3 micro-batches
    rank 0 | F0 F1 B0 W0 F2 B1 W1 B2 W2
    rank 1 | F0 B0 F1 B1 W0 F2 B2 W1 W2
    """
    p, m = check_size("num_stages", num_stages), check_size("num_micro_batches", num_micro_batches)
    if extra_in_flight not in range(p):
        raise ValueError(f"extra_in_flight={extra_in_flight!r} with num_stages={p}: use 0 (ZB-H1) to {p - 1} (ZB-H2)")
    name = {0: "zero bubble (ZB-H1)", p - 1: "zero bubble (ZB-H2)"} if p > 1 else {0: "zero bubble"}
    return Schedule(
        name.get(extra_in_flight, f"zero bubble, {extra_in_flight} more in flight"),
        p,
        m,
        [_with_weights_put_off(p - rank, m, p, extra_in_flight) for rank in range(p)],
        kinds=(FORWARD, BACKWARD, WEIGHT_GRADIENT),
    )


def check(schedule: Schedule) -> None:
    """Say what is wrong with a schedule: an op that is missing, doubled or unknown, or an order that deadlocks.

    Raises:
        ValueError: names the rank and the op; for a deadlock, where each rank waits and for whom.
    """
    check_ops(schedule)
    for _ in schedule.in_order():
        pass


def check_ops(schedule: Schedule) -> None:
    """See that each rank has each op once, and none of its own too early. Whether ranks wait for each other is open."""
    if len(schedule.ranks) != schedule.num_stages:
        raise ValueError(
            f"{schedule.name!r} has lists for {_count(len(schedule.ranks), 'rank')}, and num_stages="
            f"{schedule.num_stages}: give each rank one list"
        )
    m, v = schedule.num_micro_batches, schedule.num_chunks
    wanted = dict.fromkeys(Op(kind, i, chunk) for i in range(m) for chunk in range(v) for kind in schedule.kinds)
    rule = f"each rank runs {', '.join(schedule.kinds)} once for each of {_count(m, 'micro-batch')}" + (
        f" and {_count(v, 'chunk')}" if v > 1 else ""
    )
    for rank, ops in enumerate(schedule.ranks):
        times = Counter(ops)
        for op in times:
            if op not in wanted:
                raise ValueError(f"rank {rank} has {op}, which this schedule has no use for: {rule}")
            if times[op] > 1:
                raise ValueError(f"rank {rank} has {op} {times[op]} times: {rule}")
        if missing := [op for op in wanted if op not in times]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"rank {rank} lacks {missing[0]}{more}: {rule}")
        place = {op: index for index, op in enumerate(ops)}
        for earlier, later in pairwise(schedule.kinds):
            for op in ops:
                if op.kind == later and place[op] < place[before := op._replace(kind=earlier)]:
                    raise ValueError(f"rank {rank} has {op} before {before}, from which it starts: swap them")


_WAY_OUT_OF_DEADLOCK = "move an op that another rank waits for before the op at which its own rank waits"


def _in_turn(forwards: list[Op], backwards: list[Op], num_warmup: int) -> list[Op]:
    """``num_warmup`` forwards; then a forward and a backward in turn; then the backwards that are left."""
    ops = forwards[:num_warmup]
    for index, backward in enumerate(backwards):
        ops += [*forwards[num_warmup + index : num_warmup + index + 1], backward]
    return ops


def _with_weights_put_off(to_the_end: int, m: int, p: int, extra: int) -> list[Op]:
    """The ops of the rank ``to_the_end`` steps from the pipeline's end, itself included."""
    num_forwards = min(m, to_the_end + min(extra, to_the_end - 1))
    ops, num_weights = [Op(FORWARD, i) for i in range(num_forwards)], 0
    for i in range(m):
        ops.append(Op(BACKWARD, i))
        if num_forwards == m or num_forwards - num_weights == p + extra:  # no forward is left, or no room for one
            ops.append(Op(WEIGHT_GRADIENT, num_weights))
            num_weights += 1
        if num_forwards < m:
            ops.append(Op(FORWARD, num_forwards))
            num_forwards += 1
    return ops + [Op(WEIGHT_GRADIENT, i) for i in range(num_weights, m)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
