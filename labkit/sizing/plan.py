"""A plan for a run: the model, the cluster's size, and how the one is laid over the other."""

from dataclasses import dataclass
from functools import cached_property

from labkit.layout import ParallelLayout
from labkit.sizing.shape import GPT, RECOMPUTE


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
        t, p, model = self.tp_size, self.pp_size, self.model
        for name in ("world_size", "batch_size", "tp_size", "pp_size", "micro_batch_size", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use 1 or more")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r} is unknown: use {', '.join(RECOMPUTE)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage} is unknown: use 0, 1, 2 or 3")
        if model.num_attention_heads is None:
            raise ValueError(f"{model} does not say its num_attention_heads: attention's memory depends on it")
        if model.num_attention_heads % t:
            raise ValueError(f"tp_size={t} does not divide num_attention_heads={model.num_attention_heads}")
        if self.world_size % (t * p):
            raise ValueError(f"tp_size * pp_size = {t * p} does not divide world_size={self.world_size}")
        if model.num_layers % (p * self.num_chunks):
            raise ValueError(
                f"pp_size * num_chunks = {p * self.num_chunks} does not divide num_layers={model.num_layers}"
            )
        if self.batch_size % (self.dp_size * self.micro_batch_size):
            raise ValueError(
                f"dp_size * micro_batch_size = {self.dp_size * self.micro_batch_size} does not divide "
                f"batch_size={self.batch_size}"
            )
        if self.num_chunks > 1 and (p == 1 or self.num_micro_batches % p):
            raise ValueError(
                f"interleaving (num_chunks={self.num_chunks}) needs a pipeline, and pp_size={p} to divide "
                f"the {self.num_micro_batches} micro-batches"
            )

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def num_micro_batches(self) -> int:
        return self.batch_size // (self.dp_size * self.micro_batch_size)

    @property
    def layers_per_chunk(self) -> int:
        return self.model.num_layers // (self.pp_size * self.num_chunks)

    @cached_property
    def layout(self) -> ParallelLayout:
        """The ranks on their grid."""
        return ParallelLayout(self.world_size, self.tp_size, self.pp_size)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle over ideal: (p-1)/(v m)."""
        return (self.pp_size - 1) / (self.num_chunks * self.num_micro_batches)
