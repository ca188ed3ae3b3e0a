"""The shape of a GPT, and what follows from it alone: its number of parameters, and the FLOPs of a training step."""

from dataclasses import dataclass

from labkit.sizes import check_size, divisors, either

RECOMPUTE = ("none", "selective", "full")
"""What backward computes again instead of keeping: nothing, the core of the attention, or whole layers."""


@dataclass(frozen=True)
class GPT:
    """The shape of a GPT: l layers of width h, sequences of s tokens, a vocabulary of V, and a attention heads.

    >>> round(GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200).num_parameters / 1e9, 1)
    174.6

    Raises:
        ValueError: names the value, the rule and the way out.
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    num_attention_heads: int | None = None  # the number of parameters does not depend on it

    def __post_init__(self):
        for name in ("num_layers", "hidden_size", "seq_length", "vocab_size"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        if (heads := self.num_attention_heads) is not None:
            object.__setattr__(self, "num_attention_heads", check_size("num_attention_heads", heads))
            if self.hidden_size % heads:
                raise ValueError(
                    f"num_attention_heads={heads} does not divide hidden_size={self.hidden_size}: "
                    f"use {either(divisors(self.hidden_size))}"
                )

    @property
    def num_parameters(self) -> int:
        """P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)), an exact integer. Source: arXiv 2104.04473, equation 2."""
        h = self.hidden_size
        return self.num_layers * (12 * h * h + 13 * h) + (self.vocab_size + self.seq_length) * h


def flops_per_step(model: GPT, batch_size: int, recompute: str = "full") -> float:
    """Return the FLOPs of a step on ``batch_size`` sequences: forward, twice that for backward, and what is recomputed.

    With full recomputation F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)). Model FLOPs utilisation counts what the model
    needs (recompute="none"), hardware FLOPs utilisation all that was computed. Source: arXiv 2104.04473, equation 3.
    """
    tokens, h = batch_size * model.seq_length, model.hidden_size  # a product of [m, k] and [k, n] takes 2mkn
    weights = 24 * tokens * h**2 * model.num_layers
    attention = 4 * tokens * model.seq_length * h * model.num_layers  # its core, without weights
    logits = 2 * tokens * h * model.vocab_size
    again = {"none": 0.0, "selective": attention, "full": weights + attention}
    if recompute not in again:
        raise ValueError(f"recompute={recompute!r} is unknown: use {', '.join(RECOMPUTE)}")
    return 3 * (weights + attention + logits) + again[recompute]


def training_days(num_tokens: float, num_parameters: float, num_gpus: int, flops_per_gpu: float) -> float:
    """Return 8 T P / (n X) in days, where X is what a GPU achieves with full recomputation.

    >>> round(training_days(300e9, 175e9, 1024, 140e12), 1), round(training_days(450e9, 1e12, 3072, 163e12), 1)
    (33.9, 83.2)

    Source: arXiv 2104.04473, equation 4.
    """
    return 8 * num_tokens * num_parameters / (num_gpus * flops_per_gpu) / 86400
