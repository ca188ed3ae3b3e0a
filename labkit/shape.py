"""Describes the shape of a GPT, and counts its parameters, which follow from the shape alone."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from labkit.fields import check_fields
from labkit.partition import check_divides


@dataclass(frozen=True)
class GPT:
    """The shape of a GPT: l layers of width h, sequences of s tokens, a vocabulary of V, and a
    attention heads.

    The defaults give GPT-2's form, other choices a current one. What does not fit raises a
    ValueError.

    >>> gpt_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200)
    >>> round(gpt_3.num_parameters / 1e9, 1)
    174.6
    >>> today = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    >>> llama = GPT(80, 8192, 8192, 128256, 64, num_query_groups=8, ffn_hidden_size=28672, **today)
    >>> round(llama.num_parameters / 1e9, 1)
    70.6
    >>> mixtral = GPT(56, 6144, 65536, 32768, 48, 8, ffn_hidden_size=16384, num_experts=8, **today)
    >>> round(mixtral.num_parameters / 1e9, 1), round(mixtral.num_active_parameters / 1e9, 1)
    (140.6, 39.2)
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    vocab_size: int
    # Attention heads per layer. Without query groups, the number of parameters does not depend on
    # it.
    num_attention_heads: int | None = None
    # Heads of keys and values, shared by attention heads; by default as many.
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None  # Width of the MLPs; by default 4 hidden_size.
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # What normalises the hidden states.
    # What an MLP computes inside; swiglu has a third matrix.
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    # A learned vector for each position, or rotary positions.
    positions: Literal["learned", "rope"] = "learned"
    bias: bool = True  # Biases in linear layers.
    tied: bool = True  # The embedding's weight is the output layer's, too.
    norm_eps: float = 1e-5  # What a norm adds to the mean square before its root.
    rotary_base: float = 10_000.0  # Base of the angles of rotary positions; Llama 3 has 500000.
    num_experts: int | None = None  # Experts of a layer, in place of its MLP; by default none.
    top_k: int = 2  # Experts that process a token.
    moe_layer_freq: int = 1  # Every n-th layer has experts, from the first one on.
    num_shared_experts: int = 0  # Experts beside them that compute all tokens.
    moe_ffn_hidden_size: int | None = None  # Width of an expert; by default that of the MLPs.
    # A token's probabilities of experts, from the logits.
    router_scores: Literal["softmax", "sigmoid"] = "softmax"

    def __post_init__(self):
        check_fields(self, GPT, may_be_0=("num_shared_experts",))
        for name in ("norm_eps", "rotary_base"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 < float(value) < math.inf):
                raise ValueError(f"{name}={value!r} must be a number above 0")
        heads = self.num_attention_heads
        groups = self.num_query_groups
        if heads is not None:
            check_divides(heads, "hidden_size", self.hidden_size, parts_name="num_attention_heads")
            head_size = self.hidden_size // heads
            if self.positions == "rope" and head_size % 2:
                fault = f"positions='rope' turns pairs of numbers, but a head has {head_size}"
                way_out = "use a num_attention_heads that leaves an even head size"
                raise ValueError(f"{fault}: {way_out}")
            if groups is not None:
                check_divides(groups, "num_attention_heads", heads, parts_name="num_query_groups")
        elif groups is not None:
            raise ValueError(
                f"num_query_groups={groups} divides attention heads: give num_attention_heads too"
            )
        if self.num_experts is None and (self.num_shared_experts or self.moe_ffn_hidden_size):
            raise ValueError(
                "num_shared_experts and moe_ffn_hidden_size are for experts: give num_experts too"
            )
        if self.num_experts is not None and self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be at most num_experts={self.num_experts}")

    @property
    def mlp_width(self) -> int:
        """The width of the MLPs."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """The width of a token's keys, and of its values: h, or less with query groups."""
        if self.num_attention_heads is None or self.num_query_groups is None:
            return self.hidden_size
        head_size = self.hidden_size // self.num_attention_heads
        return head_size * self.num_query_groups

    @property
    def expert_width(self) -> int:
        """The width of an expert."""
        return self.moe_ffn_hidden_size or self.mlp_width

    @property
    def num_moe_layers(self) -> int:
        """How many layers have experts."""
        return -(-self.num_layers // self.moe_layer_freq) if self.num_experts else 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of an MLP."""
        return self.num_experts is not None and layer % self.moe_layer_freq == 0

    @property
    def num_matrix_parameters(self) -> int:
        """The number of weights in the matrices of a layer without experts, all of which multiply
        each token.

        In GPT-2's form it is 12 h^2.
        """
        h = self.hidden_size
        attention = 2 * h * (h + self.kv_size)
        return attention + self._num_mlp_parameters(self.mlp_width)

    @property
    def num_expert_parameters(self) -> int:
        """The number of weights of one expert."""
        return self._num_mlp_parameters(self.expert_width)

    def _num_mlp_parameters(self, width: int) -> int:
        num_matrices = 3 if self.mlp == "swiglu" else 2
        return num_matrices * self.hidden_size * width

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of a training step per token: forward, and twice that for backward.

        Source: equation 3 there.
        """
        weights = self.num_layers * self.num_matrix_parameters + self.vocab_size * self.hidden_size
        weights += self._instead_of_mlps(self.top_k)
        return 3 * (2 * weights + 4 * self.num_layers * self.seq_length * self.hidden_size)

    @property
    def num_parameters(self) -> int:
        """P, an exact integer; in GPT-2's form P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)).

        It leaves out the norm after the last layer, as its source does: arXiv 2104.04473, equation
        2.
        """
        h = self.hidden_size
        up = 2 if self.mlp == "swiglu" else 1
        norms = 2 * (2 * h if self.norm == "layernorm" else h)
        biases = 2 * (h + self.kv_size) if self.bias else 0
        mlp_biases = up * self.mlp_width + h if self.bias else 0  # experts have none
        words = self.vocab_size * (1 if self.tied else 2)
        positions = self.seq_length if self.positions == "learned" else 0
        layers = self.num_layers * (self.num_matrix_parameters + biases + norms + mlp_biases)
        layers += self._instead_of_mlps(self.num_experts or 0) - self.num_moe_layers * mlp_biases
        return layers + (words + positions) * h

    @property
    def num_active_parameters(self) -> int:
        """How many parameters process a token: all but those of the experts that it did
        not choose.
        """
        not_chosen = (self.num_experts or self.top_k) - self.top_k
        return self.num_parameters - self.num_moe_layers * not_chosen * self.num_expert_parameters

    def _instead_of_mlps(self, num_experts: int) -> int:
        """Return how many more weights the routers and this many experts per layer have than the
        MLPs they replace.
        """
        router = self.hidden_size * (self.num_experts or 0)
        experts = (num_experts + self.num_shared_experts) * self.num_expert_parameters
        mlp = self._num_mlp_parameters(self.mlp_width)
        return self.num_moe_layers * (router + experts - mlp)
