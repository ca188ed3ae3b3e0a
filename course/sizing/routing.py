"""Counts what follows from the experts that tokens choose: loads, the order of rows, and messages between ranks.

All ranks are one ep group: rank r has tokens of its own, and experts r E/ep to (r + 1) E/ep - 1. It is what
`labkit.expert_parallel.dispatch` does, in integers.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.partition import check_divides


class Copy(NamedTuple):
    """A token on its way to one of the experts that it chose."""

    rank: int  # that has the token
    token: int
    place: int  # among the choices of the token
    expert: int
    prob: float


@dataclass(frozen=True)
class Routed:
    """The experts that each token of each rank chose, [ranks][tokens][k], and their probabilities.

    Raises:
        ValueError: an expert does not exist, or the ranks cannot have as many experts each.
    """

    experts: Sequence[Sequence[Sequence[int]]]
    probs: Sequence[Sequence[Sequence[float]]]
    num_experts: int

    def __post_init__(self):
        check_divides(len(self.experts), "num_experts", self.num_experts, parts_name="ep_size")
        for expert in (each.expert for each in self.copies):
            if not 0 <= expert < self.num_experts:
                raise ValueError(f"expert {expert} does not exist: use 0 to {self.num_experts - 1}")

    @property
    def ep_size(self) -> int:
        return len(self.experts)

    @property
    def num_own(self) -> int:
        """How many experts a rank has."""
        return self.num_experts // self.ep_size

    @cached_property
    def copies(self) -> list[Copy]:
        """All copies of all tokens, in the order of ranks, tokens and choices."""
        found = []
        for rank, tokens in enumerate(self.experts):
            for token, experts in enumerate(tokens):
                probs = self.probs[rank][token]
                found += [Copy(rank, token, *each) for each in zip(range(len(experts)), experts, probs, strict=True)]
        return found

    def sent(self, rank: int) -> list[Copy]:
        """Return the copies that a rank sends, in the order in which it sends them: by expert."""
        return sorted((each for each in self.copies if each.rank == rank), key=lambda each: each.expert)

    def received(self, rank: int) -> list[Copy]:
        """Return the copies that a rank gets, in the order in which they arrive: by the rank that sent them."""
        senders = map(self.sent, range(self.ep_size))
        return [each for sender in senders for each in sender if each.expert // self.num_own == rank]

    @cached_property
    def loads(self) -> list[int]:
        """How many copies each expert computes."""
        loads = [0] * self.num_experts
        for each in self.copies:
            loads[each.expert] += 1
        return loads

    @property
    def mean_load(self) -> float:
        return len(self.copies) / self.num_experts

    @cached_property
    def rows(self) -> list[list[int]]:
        """How many copies each rank sends to each."""
        rows = [[0] * self.ep_size for _ in range(self.ep_size)]
        for each in self.copies:
            rows[each.rank][each.expert // self.num_own] += 1
        return rows


def route(logits: Sequence[Sequence[Sequence[float]]], top_k: int, skew: float = 0.0) -> Routed:
    """Return who chooses whom by softmax and top-k of logits [ranks][tokens][experts], probabilities normalised.

    ``skew`` takes the more from an expert's logits, the higher its number: skew * log(1 + number).
    """
    num_experts = len(logits[0][0])
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}")
    experts, probs = [], []
    for rank in logits:
        skewed = [[value - skew * math.log(1 + e) for e, value in enumerate(token)] for token in rank]
        chosen = [sorted(range(num_experts), key=lambda e, each=each: -each[e])[:top_k] for each in skewed]
        weights = [[math.exp(each[e] - each[own[0]]) for e in own] for each, own in zip(skewed, chosen)]
        experts.append(chosen)
        probs.append([[weight / sum(each) for weight in each] for each in weights])
    return Routed(experts, probs, num_experts)


def drawn_logits(num_ranks: int, num_tokens: int, num_experts: int) -> list[list[list[float]]]:
    """Return logits of a router that nobody trained; the first tokens and experts of more are the same."""
    draw = lambda *place: random.Random(str(place)).gauss(0, 1)  # noqa: E731
    return [[[draw(r, t, e) for e in range(num_experts)] for t in range(num_tokens)] for r in range(num_ranks)]
