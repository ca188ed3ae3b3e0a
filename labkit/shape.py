"""Describes the shape of a GPT, and counts its parameters, which follow from the shape alone."""

import math
from dataclasses import dataclass
from numbers import Real

from labkit.partition import check_divides
from labkit.sizes import check_size

CHOICES = {  # what these fields of a `GPT` may be
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "gelu_tanh", "swiglu"),
    "positions": ("learned", "rope"),
    "bias": (True, False),
    "tied": (True, False),
}


@dataclass(frozen=True)
class GPT:
    """The shape of a GPT: l layers of width h, sequences of s tokens, a vocabulary of V, and a attention heads.

    The defaults give GPT-2's form, other choices a current one. What does not fit raises a ValueError.

    >>> round(GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200).num_parameters / 1e9, 1)
    174.6
    >>> today = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    >>> llama = GPT(80, 8192, 8192, 128256, 64, num_query_groups=8, ffn_hidden_size=28672, **today)
    >>> round(llama.num_parameters / 1e9, 1)
    70.6
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    num_attention_heads: int | None = None  # without query groups, the number of parameters does not depend on it
    num_query_groups: int | None = None  # heads of keys and values, each for some heads of queries; all of them if None
    ffn_hidden_size: int | None = None  # width of the MLPs; 4 h if None
    norm: str = "layernorm"
    mlp: str = "gelu"
    positions: str = "learned"
    bias: bool = True  # in linear layers
    tied: bool = True  # the output layer's weight is the embedding's
    norm_eps: float = 1e-5  # added to the mean square before its root
    rotary_base: float = 10_000.0  # of the angles of rotary positions; 500,000 in Llama 3

    def __post_init__(self):
        may_be_none = ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
        for name in ("num_layers", "hidden_size", "seq_length", "vocab_size", *may_be_none):
            if name not in may_be_none or getattr(self, name) is not None:
                object.__setattr__(self, name, check_size(name, getattr(self, name)))
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads is not None:
            check_divides(heads, "hidden_size", self.hidden_size, parts_name="num_attention_heads")
            if self.positions == "rope" and self.hidden_size // heads % 2:
                fault = f"positions='rope' turns pairs of numbers, but a head has {self.hidden_size // heads}"
                raise ValueError(f"{fault}: use a num_attention_heads that leaves an even head size")
            if groups is not None:
                check_divides(groups, "num_attention_heads", heads, parts_name="num_query_groups")
        elif groups is not None:
            raise ValueError(f"num_query_groups={groups} divides attention heads: give num_attention_heads too")
        for name in ("norm_eps", "rotary_base"):
            if not (isinstance(value := getattr(self, name), Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name}={value!r} must be a number above 0")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use {' or '.join(map(repr, known))}")

    @property
    def mlp_width(self) -> int:
        """The width of the MLPs."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """The width of a token's keys, and of its values: h, or less with query groups."""
        heads, groups = self.num_attention_heads, self.num_query_groups
        return self.hidden_size if heads is None or groups is None else self.hidden_size // heads * groups

    @property
    def num_matrix_parameters(self) -> int:
        """The number of weights in a layer's matrices, all of which multiply each token: 12 h^2 in GPT-2's form."""
        h, up = self.hidden_size, 2 if self.mlp == "swiglu" else 1
        return 2 * h * (h + self.kv_size) + (up + 1) * h * self.mlp_width

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of a training step per token: forward, and twice that for backward. Source: equation 3 there."""
        weights = self.num_layers * self.num_matrix_parameters + self.vocab_size * self.hidden_size
        return 3 * (2 * weights + 4 * self.num_layers * self.seq_length * self.hidden_size)

    @property
    def num_parameters(self) -> int:
        """P, an exact integer; in GPT-2's form P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)).

        It leaves out the norm after the last layer, as its source does: arXiv 2104.04473, equation 2.
        """
        h, up = self.hidden_size, 2 if self.mlp == "swiglu" else 1
        norms = 2 * (2 * h if self.norm == "layernorm" else h)
        biases = 2 * (h + self.kv_size) + up * self.mlp_width + h if self.bias else 0
        words = self.vocab_size * (1 if self.tied else 2)
        positions = self.seq_length if self.positions == "learned" else 0
        return self.num_layers * (self.num_matrix_parameters + biases + norms) + (words + positions) * h
