"""A plan for a run: the model, the size of the cluster, and how the model is laid over it."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from course.sizing.context import check_way
from course.sizing.flops import RECOMPUTE
from course.sizing.folded import FOLDED, UNITS, folded
from labkit.layout import ParallelLayout
from labkit.partition import split_layers
from labkit.shape import GPT
from labkit.sizes import check_size, divisors, does_not_divide, either

_CHOICES = {"recompute": RECOMPUTE, "zero_stage": (0, 1, 2, 3), "gradient_bytes": (2, 4)}
_CHOICES |= {"precision": ("bf16", "fp8"), "schedule": (None, *FOLDED)}
_OPTIONAL = "expert_tp_size", "pad_vocab_to"
_SIZES = (
    "world_size",
    "batch_size",
    "tp_size",
    "pp_size",
    "micro_batch_size",
    "num_chunks",
    "cp_size",
    "ep_size",
    *_OPTIONAL,
)


class Misfit(ValueError):
    """Sizes that do not fit together: the ``rule`` they break whatever the numbers, the ``fault`` in them, ``advice``.

    >>> print(Misfit("a divides b", "a=3 does not divide b=4", "use 1, 2 or 4"))
    a=3 does not divide b=4: use 1, 2 or 4
    """

    def __init__(self, rule: str, fault: str, advice: str):
        super().__init__(rule, fault, advice)
        self.rule, self.fault, self.advice = rule, fault, advice

    def __str__(self) -> str:
        return f"{self.fault}: {self.advice}"


@dataclass(frozen=True)
class Plan:
    """Everything that must be decided before a run; sizes that do not fit together are refused.

    >>> gpt = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
    >>> plan = Plan(gpt, world_size=1024, batch_size=1536, tp_size=8, pp_size=16)
    >>> plan.dp_size, plan.num_micro_batches
    (8, 192)

    Raises:
        Misfit: sizes that do not fit together, with the rule and the way out.
        ValueError: a value that is wrong on its own.
    """

    model: GPT
    world_size: int
    batch_size: int
    tp_size: int = 1
    pp_size: int = 1
    micro_batch_size: int = 1
    num_chunks: int = 1
    recompute: str = "full"
    sequence_parallel: bool = False
    zero_stage: int = 0
    gradient_bytes: int = 4
    """Bytes per gradient: Megatron-LM accumulates in 4, the ZeRO paper counts 2."""
    fused_attention: bool = False
    """A FlashAttention kernel: scores are never stored, and those that the causal mask hides not computed."""
    cp_size: int = 1
    context_parallel: str = "ring"
    """How context ranks compute attention together, in zigzag chunks: "ring", "ulysses" or "all_gather"."""
    ep_size: int = 1
    expert_tp_size: int | None = None
    """How many ranks divide each expert: tp_size if None."""
    stage_layers: Sequence[int] | None = None
    """Layers of each of the p v stages, as `labkit.partition.split_layers` makes them; equally many if None."""
    schedule: str | None = None
    """One of a V, which needs 2 chunks (`course.sizing.folded`); else 1F1B, interleaved if there are chunks."""
    precision: str = "bf16"
    """Of the products in linear layers; attention, logits and all else stay in 16 bits."""
    pad_vocab_to: int | None = None
    """Megatron-LM pads the vocabulary to a multiple of 128 t: give 128. Not padded if None."""

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, check_value(field.name, getattr(self, field.name)))
        if self.model.num_attention_heads is None:
            raise ValueError(f"{self.model} does not say its num_attention_heads, on which attention's memory depends")
        check_way(self.context_parallel)
        for check in CHECKS.values():
            check(self)

    def check_context(self):
        """Raise Misfit unless tensor and context parallelism divide heads and tokens."""
        context = {"cp_size": self.cp_size} if self.cp_size > 1 else {}
        shares_heads = {"tp_size": self.tp_size} | (context if self.context_parallel == "ulysses" else {})
        _check_divides("num_attention_heads", self.model.num_attention_heads or 1, **shares_heads)
        if self.model.num_query_groups is not None:
            _check_divides("num_query_groups", self.model.num_query_groups, **shares_heads)
        if self.sequence_parallel:
            divided = {"tp_size": self.tp_size} | context
            _check_divides("seq_length", self.model.seq_length, "sequence_parallel=False", **divided)

    def check_grid(self):
        """Raise Misfit unless t, c and p divide the GPUs, and context ranks have chunks to balance."""
        context = {"cp_size": self.cp_size} if self.cp_size > 1 else {}
        _check_divides("world_size", self.world_size, tp_size=self.tp_size, **context, pp_size=self.pp_size)
        if self.cp_size > 1:
            if not self.fused_attention:
                raise Misfit(
                    "context parallelism needs fused attention",
                    f"cp_size={self.cp_size} is modelled with fused attention only",
                    "use fused_attention=True, or cp_size=1",
                )
            _check_divides("seq_length", self.model.seq_length, cp_size=self.cp_size, chunks_per_rank=2)

    def check_experts(self):
        """Raise Misfit unless there are experts to divide, and they divide among the ranks."""
        if self.model.num_experts is None:
            for name, unused in (("ep_size", 1), ("expert_tp_size", None)):
                if (size := getattr(self, name)) != unused:
                    rule = f"{name} needs a model with experts"
                    raise Misfit(rule, f"{name}={size} needs a model with experts", "give it num_experts")
            return
        ranks, etp = self.world_size // self.pp_size, {"expert_tp_size": self.etp_size}
        _check_divides("world_size / pp_size", ranks, **etp, ep_size=self.ep_size)
        _check_divides("num_experts", self.model.num_experts, ep_size=self.ep_size)
        _check_divides("the width of an expert", self.model.expert_width, **etp)

    def check_layers(self):
        """Raise Misfit unless the layers divide into the stages' chunks, or are said to."""
        if (v := self.num_chunks) > 1 and self.pp_size == 1:
            raise Misfit(
                "num_chunks needs a pipeline of several stages",
                f"num_chunks={v} needs a pipeline of several stages",
                "pp_size=1 has one, use num_chunks=1",
            )
        if self.stage_layers is None:
            _check_divides("num_layers", self.model.num_layers, pp_size=self.pp_size, num_chunks=v)
            return
        try:
            split = split_layers(self.model.num_layers, self.pp_size * v, self.stage_layers)
        except ValueError as error:
            fault, _, advice = str(error).partition(": ")
            rule = "stage_layers must be pp_size * num_chunks numbers that add up to num_layers"
            raise Misfit(rule, fault, advice or "give each stage a number of layers") from None
        object.__setattr__(self, "stage_layers", split)

    def check_schedule(self):
        """Raise Misfit if a V has no two chunks to fold."""
        name, p = self.schedule, self.pp_size
        if name and (p == 1 or self.num_chunks != 2):
            raise Misfit(
                "a V needs a pipeline with 2 chunks",
                f"schedule={name!r} needs several stages with 2 chunks, not pp_size={p}, num_chunks={self.num_chunks}",
                "use pp_size=2 or more and num_chunks=2, or schedule=None",
            )

    def check_batch(self):
        """Raise Misfit unless the batch divides into micro-batches, and the schedule has enough of them."""
        d, b, p = self.dp_size, self.micro_batch_size, self.pp_size
        if self.batch_size % (d * b):
            larger_batch = f"a batch_size of {-(-self.batch_size // (d * b)) * d * b}"
            _check_divides("batch_size", self.batch_size, larger_batch, dp_size=d, micro_batch_size=b)
        m = self.num_micro_batches
        if self.schedule == "dualpipe-v" and m < 2 * p:
            raise Misfit(
                "dualpipe-v needs 2 * pp_size micro-batches",
                f"schedule={self.schedule!r} needs 2 * pp_size={2 * p} micro-batches, there are {m}",
                "use a larger batch_size, or zero-bubble-v",
            )
        if not self.schedule and self.num_chunks > 1 and m % p:
            raise Misfit(
                "pp_size must divide the micro-batches of interleaved chunks",
                f"pp_size={p} does not divide the {m} micro-batches",
                "use num_chunks=1, or a different micro_batch_size (Megatron-LM interleaves in rounds of p)",
            )

    def check_recompute(self):
        """Raise Misfit if attention is computed again twice."""
        if self.fused_attention and self.recompute == "selective":
            raise Misfit(
                "selective recomputation needs attention that is not fused",
                "recompute='selective' computes the scores again, which fused_attention=True does anyway",
                "use recompute='none'",
            )

    def check_zero(self):
        """Raise Misfit if gradients would be sent before they are there."""
        if self.schedule and self.zero_stage > 1:
            raise Misfit(
                "ZeRO stages 2 and 3 do not go with a V",
                f"zero_stage={self.zero_stage} sends gradients when backward ends, schedule={self.schedule!r} "
                "has some later",
                "use zero_stage=1, or schedule=None",
            )

    @property
    def dp_size(self) -> int:
        """d, the number of replicas: the GPUs divided by t * c * p."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def dp_cp_size(self) -> int:
        """d * c, the number of ranks with the same weights, which add up their gradients."""
        return self.dp_size * self.cp_size

    @property
    def etp_size(self) -> int:
        """The number of ranks that divide each expert."""
        return self.expert_tp_size or self.tp_size

    @property
    def expert_dp_size(self) -> int:
        """The number of ranks with the same experts, which add up the gradients of these."""
        return self.world_size // (self.etp_size * self.ep_size * self.pp_size)

    @property
    def num_micro_batches(self) -> int:
        """m, the micro-batches that each pipeline runs in a step."""
        return self.batch_size // (self.dp_size * self.micro_batch_size)

    @property
    def layers_per_chunk(self) -> int:
        """How many layers lie between two messages of the pipeline; if chunks differ, the most."""
        return max(self.stage_layers or [self.model.num_layers // (self.pp_size * self.num_chunks)])

    def layers_of_rank(self, pp_rank: int) -> int:
        """Return how many layers a GPU of this pipeline rank has, in all its chunks."""
        if self.stage_layers is None:
            return self.model.num_layers // self.pp_size
        return self.layers_of_ranks[pp_rank].all

    def num_moe_layers(self, pp_rank: int) -> int:
        """Return how many of them have experts."""
        return self.layers_of_ranks[pp_rank].with_experts if self.model.num_experts else 0

    @property
    def layers_of_ranks(self) -> Sequence["Layers"]:
        """The layers of each pipeline rank."""
        return _layers_of_ranks(self.model, self.pp_size, self.num_chunks, self.schedule, self.stage_layers)[0]

    @property
    def ranks_by_layers(self) -> Sequence[Sequence[int]]:
        """The pipeline ranks, those with the same layers together."""
        return _layers_of_ranks(self.model, self.pp_size, self.num_chunks, self.schedule, self.stage_layers)[1]

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that has the last layer, the logits and the loss: the last, but in a V the first."""
        return 0 if self.schedule else self.pp_size - 1

    @property
    def vocab_size(self) -> int:
        """The words of the embedding, those that only fill it up included."""
        multiple = self.tp_size * (self.pad_vocab_to or 0)
        return -(-self.model.vocab_size // multiple) * multiple if multiple else self.model.vocab_size

    @cached_property
    def layout(self) -> ParallelLayout:
        """The ranks on their grids."""
        sizes = self.world_size, self.tp_size, self.pp_size, self.cp_size
        return ParallelLayout(*sizes, ep_size=self.ep_size, expert_tp_size=self.etp_size)

    @property
    def bubble_slots(self) -> float:
        """In how many micro-batches' time a rank is idle in a step: (p-1)/v; in a V, what `folded` counts."""
        if self.schedule:
            return folded(self.schedule, self.pp_size, self.num_micro_batches).idle / UNITS
        return (self.pp_size - 1) / self.num_chunks

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over ideal time: (p-1)/(v m), but in a V."""
        return self.bubble_slots / self.num_micro_batches


CHECKS = {
    "cp_size": Plan.check_context, "pp_size": Plan.check_grid, "expert_tp_size": Plan.check_experts,
    "num_chunks": Plan.check_layers, "schedule": Plan.check_schedule, "micro_batch_size": Plan.check_batch,
    "recompute": Plan.check_recompute, "zero_stage": Plan.check_zero,
}  # fmt: skip
"""What must fit together, in this order: each needs no field after its own of tp_size, cp_size, pp_size, ep_size,
expert_tp_size, num_chunks, schedule, micro_batch_size, recompute, zero_stage."""


class Layers(NamedTuple):
    """How many layers a pipeline rank has, and how many of them have experts."""

    all: int
    with_experts: int


@lru_cache(maxsize=4096)
def _layers_of_ranks(
    model: GPT, pp_size: int, num_chunks: int, schedule: str | None, stage_layers: Sequence[int] | None
) -> tuple[Sequence[Layers], Sequence[Sequence[int]]]:
    """Return the layers of each pipeline rank, and the ranks that have the same."""
    num_layers, num_stages = model.num_layers, pp_size * num_chunks
    split = stage_layers or split_layers(num_layers, num_stages)
    ends = [0, *accumulate(split)]
    found = [sum(map(model.has_experts, range(*pair))) if model.num_experts else 0 for pair in pairwise(ends)]
    of_rank, same = [], defaultdict(list)
    for rank in range(pp_size):
        own = (rank, num_stages - 1 - rank) if schedule else range(rank, num_stages, pp_size)
        of_rank.append(Layers(sum(split[stage] for stage in own), sum(found[stage] for stage in own)))
        same[of_rank[-1]].append(rank)
    return of_rank, list(same.values())


def uneven_stages(num_layers: int, num_stages: int) -> Sequence[int] | None:
    """Return about as many layers for each stage, embedding and loss counted as one each; None if all get as many.

    >>> uneven_stages(126, 8), uneven_stages(96, 8)
    ((15, 16, 16, 16, 16, 16, 16, 15), None)
    """
    if num_layers % num_stages == 0 or num_stages > num_layers:
        return None
    both: dict = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    with suppress(ValueError):  # the ends would have no layer
        return split_layers(num_layers, num_stages, **both)
    return None


def check_value(name: str, value):
    """Return what a field of a `Plan` is given, whole numbers as int, or raise ValueError if it is wrong on its own."""
    if name in _SIZES and not (name in _OPTIONAL and value is None):
        return check_size(name, value)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{name}={value!r} is unknown: use {either(_CHOICES[name])}")
    return value


def _check_divides(name: str, whole: int, other_way_out: str = "", /, **factors: int) -> None:
    """Raise Misfit unless the product of ``factors`` divides ``whole``, which is called ``name``."""
    if whole % math.prod(factors.values()):
        ways_out = [("a product of " if len(factors) > 1 else "") + either(divisors(whole)), other_way_out]
        rule, advice = f"{' * '.join(factors)} must divide {name}", f"use {', or '.join(filter(None, ways_out))}"
        raise Misfit(rule, does_not_divide(name, whole, **factors), advice)
