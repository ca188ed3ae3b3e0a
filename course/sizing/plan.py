"""A plan for a run: the model, the cluster's size, and how the one is laid over the other."""

from dataclasses import dataclass
from functools import cached_property

from labkit.layout import ParallelLayout
from labkit.shape import GPT, RECOMPUTE
from labkit.sizes import check_size, divisors, either


@dataclass(frozen=True)
class Plan:
    """What has to be decided before a run; sizes that do not fit together are refused.

    >>> gpt = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
    >>> plan = Plan(gpt, world_size=1024, batch_size=1536, tp_size=8, pp_size=16)
    >>> plan.dp_size, plan.num_micro_batches
    (8, 192)

    Raises:
        ValueError: names the value, the rule and the way out.
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
    """Of each gradient: Megatron-LM adds up in 4 bytes, ZeRO's count has 2."""

    def __post_init__(self):
        for name in ("world_size", "batch_size", "tp_size", "pp_size", "micro_batch_size", "num_chunks"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r} is unknown: use {', '.join(RECOMPUTE)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage} is unknown: use 0, 1, 2 or 3")
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradient_bytes={self.gradient_bytes} is unknown: use 2 or 4")
        self._check_tensor_parallel()
        t, p, v = self.tp_size, self.pp_size, self.num_chunks
        if self.world_size % (t * p):
            raise ValueError(
                f"tp_size={t} * pp_size={p} = {t * p} does not divide world_size={self.world_size}: "
                f"use a product of {either(divisors(self.world_size))}"
            )
        if self.model.num_layers % (p * v):
            raise ValueError(
                f"pp_size={p} * num_chunks={v} = {p * v} does not divide num_layers={self.model.num_layers}: "
                f"use a product of {either(divisors(self.model.num_layers))}"
            )
        multiple = self.dp_size * self.micro_batch_size
        if self.batch_size % multiple:
            raise ValueError(
                f"dp_size={self.dp_size} * micro_batch_size={self.micro_batch_size} = {multiple} does not divide "
                f"batch_size={self.batch_size}: use a batch_size of {-(-self.batch_size // multiple) * multiple}, "
                f"or a product of {either(divisors(self.batch_size))}"
            )
        if v > 1 and p == 1:
            raise ValueError(f"num_chunks={v} needs a pipeline of several stages: pp_size=1 has one, use num_chunks=1")
        if v > 1 and self.num_micro_batches % p:
            raise ValueError(
                f"pp_size={p} does not divide the {self.num_micro_batches} micro-batches: use num_chunks=1, or "
                f"another micro-batch size (to interleave in rounds of p is Megatron-LM's rule)"
            )

    def _check_tensor_parallel(self):
        t, heads, seq_length = self.tp_size, self.model.num_attention_heads, self.model.seq_length
        if heads is None:
            raise ValueError(f"{self.model} does not say its num_attention_heads: attention's memory depends on it")
        if heads % t:
            raise ValueError(f"tp_size={t} does not divide num_attention_heads={heads}: use {either(divisors(heads))}")
        if self.sequence_parallel and seq_length % t:
            raise ValueError(
                f"tp_size={t} does not divide seq_length={seq_length}: use {either(divisors(seq_length))}, "
                "or sequence_parallel=False"
            )

    @property
    def dp_size(self) -> int:
        """d, the copies of the model: what t and p leave of the GPUs."""
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def num_micro_batches(self) -> int:
        """m, of each pipeline in a step."""
        return self.batch_size // (self.dp_size * self.micro_batch_size)

    @property
    def layers_per_chunk(self) -> int:
        """Of the model's layers, how many stand between two messages of the pipeline."""
        return self.model.num_layers // (self.pp_size * self.num_chunks)

    @cached_property
    def layout(self) -> ParallelLayout:
        """The ranks on their grid."""
        return ParallelLayout(self.world_size, self.tp_size, self.pp_size)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over ideal: (p-1)/(v m)."""
        return (self.pp_size - 1) / (self.num_chunks * self.num_micro_batches)
