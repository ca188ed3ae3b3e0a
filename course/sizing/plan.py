"""A plan for a run: the model, the size of the cluster, and how the model is laid over it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from course.sizing.context import check_way
from course.sizing.flops import RECOMPUTE
from course.sizing.folded import FOLDED, UNITS, folded
from labkit.layout import ParallelLayout
from labkit.partition import split_layers
from labkit.shape import GPT
from labkit.sizes import check_size, divisors, does_not_divide, either

_CHOICES = {"recompute": RECOMPUTE, "zero_stage": (0, 1, 2, 3), "gradient_bytes": (2, 4)}
_CHOICES |= {"precision": ("bf16", "fp8"), "schedule": (None, *FOLDED)}


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
    """How context ranks compute attention together, in balanced chunks: "ring", "ulysses" or "gathered"."""
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
        sizes = "world_size", "batch_size", "tp_size", "pp_size", "micro_batch_size", "num_chunks", "cp_size", "ep_size"
        optional = [name for name in ("expert_tp_size", "pad_vocab_to") if getattr(self, name) is not None]
        for name in (*sizes, *optional):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is unknown: use {either(choices)}")
        if (heads := self.model.num_attention_heads) is None:
            raise ValueError(f"{self.model} does not say its num_attention_heads, on which attention's memory depends")
        check_way(self.context_parallel)
        context = {"cp_size": self.cp_size} if self.cp_size > 1 else {}
        shares_heads = {"tp_size": self.tp_size} | (context if self.context_parallel == "ulysses" else {})
        _check_divides("num_attention_heads", heads, **shares_heads)
        if self.model.num_query_groups is not None:
            _check_divides("num_query_groups", self.model.num_query_groups, **shares_heads)
        if self.sequence_parallel:
            divided = {"tp_size": self.tp_size} | context
            _check_divides("seq_length", self.model.seq_length, "sequence_parallel=False", **divided)
        _check_divides("world_size", self.world_size, tp_size=self.tp_size, **context, pp_size=self.pp_size)
        if self.stage_layers is None:
            _check_divides("num_layers", self.model.num_layers, pp_size=self.pp_size, num_chunks=self.num_chunks)
        else:
            self._check_split()
        self._check_batch()
        self._check_attention()
        self._check_experts()

    def _check_split(self):
        try:
            split = split_layers(self.model.num_layers, self.pp_size * self.num_chunks, self.stage_layers)
        except ValueError as error:
            fault, _, advice = str(error).partition(": ")
            rule = "stage_layers must be pp_size * num_chunks numbers that add up to num_layers"
            raise Misfit(rule, fault, advice or "give each stage a number of layers") from None
        object.__setattr__(self, "stage_layers", split)

    def _check_batch(self):
        d, b, p, v = self.dp_size, self.micro_batch_size, self.pp_size, self.num_chunks
        larger_batch = f"a batch_size of {-(-self.batch_size // (d * b)) * d * b}"
        _check_divides("batch_size", self.batch_size, larger_batch, dp_size=d, micro_batch_size=b)
        if v > 1 and p == 1:
            raise Misfit(
                "num_chunks needs a pipeline of several stages",
                f"num_chunks={v} needs a pipeline of several stages",
                "pp_size=1 has one, use num_chunks=1",
            )
        if self.schedule:
            self._check_folded()
        elif v > 1 and self.num_micro_batches % p:
            raise Misfit(
                "pp_size must divide the micro-batches of interleaved chunks",
                f"pp_size={p} does not divide the {self.num_micro_batches} micro-batches",
                "use num_chunks=1, or a different micro_batch_size (Megatron-LM interleaves in rounds of p)",
            )

    def _check_folded(self):
        name, p, m = self.schedule, self.pp_size, self.num_micro_batches
        if p == 1 or self.num_chunks != 2:
            raise Misfit(
                "a V needs a pipeline with 2 chunks",
                f"schedule={name!r} needs several stages with 2 chunks, not pp_size={p}, num_chunks={self.num_chunks}",
                "use pp_size=2 or more and num_chunks=2, or schedule=None",
            )
        if name == "dualpipe-v" and m < 2 * p:
            raise Misfit(
                "dualpipe-v needs 2 * pp_size micro-batches",
                f"schedule={name!r} needs 2 * pp_size={2 * p} micro-batches, there are {m}",
                "use a larger batch_size, or zero-bubble-v",
            )
        if self.zero_stage > 1:
            raise Misfit(
                "ZeRO stages 2 and 3 do not go with a V",
                f"zero_stage={self.zero_stage} sends gradients when backward ends, schedule={name!r} has some later",
                "use zero_stage=1, or schedule=None",
            )

    def _check_attention(self):
        if self.cp_size > 1:
            if not self.fused_attention:
                raise Misfit(
                    "context parallelism needs fused attention",
                    f"cp_size={self.cp_size} is modelled with fused attention only",
                    "use fused_attention=True, or cp_size=1",
                )
            _check_divides("seq_length", self.model.seq_length, cp_size=self.cp_size, chunks_per_rank=2)
        if self.fused_attention and self.recompute == "selective":
            raise Misfit(
                "selective recomputation needs attention that is not fused",
                "recompute='selective' computes the scores again, which fused_attention=True does anyway",
                "use recompute='none'",
            )

    def _check_experts(self):
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
            return self.num_chunks * self.layers_per_chunk
        return sum(self.stage_layers[stage] for stage in self.stages_of_rank(pp_rank))

    def stages_of_rank(self, pp_rank: int) -> Sequence[int]:
        """Return which of the p v stages a rank has, chunk by chunk: every p-th, or in a V one from each end."""
        num_stages = self.pp_size * self.num_chunks
        if self.schedule:
            return pp_rank, num_stages - 1 - pp_rank
        return range(pp_rank, num_stages, self.pp_size)

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that has the last layer, the logits and the loss: the last, but in a V the first."""
        return 0 if self.schedule else self.pp_size - 1

    @property
    def vocab_size(self) -> int:
        """The words of the embedding, those that only fill it up included."""
        multiple = self.tp_size * (self.pad_vocab_to or 0)
        return -(-self.model.vocab_size // multiple) * multiple if multiple else self.model.vocab_size

    def num_moe_layers(self, stage: int) -> int:
        """Return how many layers of a stage, in all of its chunks, have experts."""
        return self._moe_layers[stage] if self.model.num_experts else 0

    @cached_property
    def _moe_layers(self) -> list[int]:
        num_layers, num_stages = self.model.num_layers, self.pp_size * self.num_chunks
        split = self.stage_layers or split_layers(num_layers, num_stages)
        first = [sum(split[:stage]) for stage in range(num_stages)]
        found = [sum(map(self.model.has_experts, range(at, at + size))) for at, size in zip(first, split)]
        return [sum(found[stage] for stage in self.stages_of_rank(rank)) for rank in range(self.pp_size)]

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


def _check_divides(name: str, whole: int, other_way_out: str = "", /, **factors: int) -> None:
    """Raise Misfit unless the product of ``factors`` divides ``whole``, which is called ``name``."""
    if whole % math.prod(factors.values()):
        ways_out = [("a product of " if len(factors) > 1 else "") + either(divisors(whole)), other_way_out]
        rule, advice = f"{' * '.join(factors)} must divide {name}", f"use {', or '.join(filter(None, ways_out))}"
        raise Misfit(rule, does_not_divide(name, whole, **factors), advice)
