"""Attention over a sequence that c ranks share: how much each rank computes, and what each way sends in one layer.

The ways are those of `labkit.context_parallel`, and the messages those that `communication_log` records on a rank. A
rank has b (s/c) tokens, and of each token h/t numbers of queries and 2 kv/t of keys and values: kv is h, or less with
query groups. Sources: arXiv 2310.01889 (ring), 2309.14509 (Ulysses), 2407.21783 (all-gather).
"""

from typing import NamedTuple, get_args

from course.sizing.ring import bus_factor
from course.sizing.shapes import query_size
from labkit.parallel_config import ParallelConfig
from labkit.partition import tokens_of_rank
from labkit.shape import GPT

CONTEXT_PARALLEL = get_args(ParallelConfig.__annotations__["context_parallel"])


class Message(NamedTuple):
    """What one rank communicates at once, in a group of c; "send" is a message to the next rank of a ring."""

    operation: str
    message_bytes: float
    """The full buffer, as in a `communication_log`: all ranks' shards for all-gather and reduce-scatter."""
    cp_size: int

    @property
    def sent_bytes(self) -> float:
        """What leaves the rank: all of a send, and (c-1)/c of a collective's full buffer."""
        share = 1.0 if self.operation == "send" else bus_factor(self.operation, self.cp_size)
        return share * self.message_bytes


class Messages(NamedTuple):
    """What attention in one layer and micro-batch sends on one rank."""

    forward: list[Message]
    backward: list[Message]


def attention_messages(
    model: GPT,
    context_parallel: str,
    cp_size: int,
    tp_size: int = 1,
    batch_size: float = 1,
    bytes_per_element: int = 2,
) -> Messages:
    """Return a rank's messages for attention over c context ranks; recomputation repeats the forward ones.

    ``batch_size`` is that of a micro-batch. With n = 2 b (s/c) kv/t, the numbers of a rank's keys and values:

    - ring: c - 1 messages of n forward, and (c - 1) + c backward, of which c are gradients: 3c - 2.
    - ulysses: one all-to-all each of q, k, v and the output, forward and backward.
    - all_gather: one of c n forward; backward the same again, and a reduce-scatter of as many gradients.

    Ring and all_gather send gradients in float32 or better.

    >>> llama = GPT(80, 8192, 8192, 128256, 64, num_query_groups=8)
    >>> for way in CONTEXT_PARALLEL:
    ...     sent = attention_messages(llama, way, cp_size=4)
    ...     print(way, len(sent.forward), len(sent.backward), sum(each.sent_bytes for each in sent.forward) / 2**20)
    ring 3 7 24.0
    ulysses 4 4 54.0
    all_gather 1 2 24.0

    Raises:
        ValueError: there is no such way.
    """
    check_way(context_parallel)
    if cp_size == 1:
        return Messages([], [])
    tokens = batch_size * model.seq_length / cp_size
    q, k = (tokens * width / tp_size * bytes_per_element for width in (query_size(model), model.kv_size))
    kv, gradients = 2 * k, 2 * k * max(4, bytes_per_element) / bytes_per_element
    if context_parallel == "ring":
        around = [Message("send", kv, cp_size)] * (cp_size - 1)
        return Messages(around, around + [Message("send", gradients, cp_size)] * cp_size)
    if context_parallel == "ulysses":
        exchanges = [Message("all_to_all", size, cp_size) for size in (q, k, k, q)]
        return Messages(exchanges, exchanges[::-1])
    gather = Message("all_gather", cp_size * kv, cp_size)
    return Messages([gather], [gather, Message("reduce_scatter", cp_size * gradients, cp_size)])


def attention_pairs(seq_length: int, cp_size: int, zigzag: bool = True) -> list[list[int]]:
    """Return how many (query, key) pairs of causal attention rank r computes with rank j's keys, as [r][j].

    At step i of a ring, rank r has the keys of rank (r - i) mod c.

    >>> attention_pairs(8, cp_size=2), attention_pairs(8, cp_size=2, zigzag=False)
    ([[10, 8], [8, 10]], [[10, 0], [16, 10]])
    """
    held = [tokens_of_rank(seq_length, cp_size, rank, zigzag) for rank in range(cp_size)]
    return [[sum(_pairs(q, k) for q in mine for k in theirs) for theirs in held] for mine in held]


def attention_work(seq_length: int, cp_size: int, zigzag: bool = True) -> list[float]:
    """Return each rank's share of the (query, key) pairs of causal attention; all shares together are 1.

    >>> [round(share, 4) for share in attention_work(2**20, cp_size=4, zigzag=False)]  # (2r + 1) / c^2
    [0.0625, 0.1875, 0.3125, 0.4375]
    >>> attention_work(2**20, cp_size=4)
    [0.25, 0.25, 0.25, 0.25]
    """
    done = [sum(row) for row in attention_pairs(seq_length, cp_size, zigzag)]
    return [pairs / sum(done) for pairs in done]


def pace(seq_length: int, cp_size: int, zigzag: bool = True) -> float:
    """Return how near causal attention comes to its ideal speed if all wait for the slowest and messages take no time.

    A ring goes step by step, and at each step the others wait for the rank with the most pairs. In consecutive chunks
    that is c/(2c-1), but for the tokens on the diagonal; zigzag, all ranks have the same at each step.

    >>> [round(pace(2**20, c, zigzag=False), 3) for c in (1, 2, 4, 8)], pace(2**20, 8)
    ([1.0, 0.667, 0.571, 0.533], 1.0)

    On 8 H800, forward and backward, 0.54 and zigzag 0.90 were measured. Source: README of zhuzilin's
    ring-flash-attention.
    """
    pairs, ranks = attention_pairs(seq_length, cp_size, zigzag), range(cp_size)
    steps = sum(max(pairs[rank][(rank - step) % cp_size] for rank in ranks) for step in ranks)
    return sum(map(sum, pairs)) / cp_size / steps


def check_way(context_parallel: str) -> None:
    """Raise ValueError unless this is one of the ways."""
    if context_parallel not in CONTEXT_PARALLEL:
        raise ValueError(f"context_parallel={context_parallel!r} is unknown: use {', '.join(CONTEXT_PARALLEL)}")


def _pairs(queries: range, keys: range) -> int:
    """Count the keys that each query sees, itself included; chunks are the same or do not overlap."""
    if queries == keys:
        return len(queries) * (len(queries) + 1) // 2
    return len(queries) * len(keys) if keys.start < queries.start else 0
