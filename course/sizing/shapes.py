"""Shapes of published models with experts, and their parameters: all of them, and those that process a token.

`labkit.shape.GPT` describes what `labtrain.model` builds. An `AnyGPT` also has what some published models have instead.
"""

from dataclasses import dataclass
from typing import NamedTuple

from labkit.shape import GPT
from labkit.sizes import check_size


@dataclass(frozen=True)
class AnyGPT(GPT):
    """A GPT whose heads have a size of their own, whose attention has norms, or whose first layers have no experts.

    >>> QWEN3_30B_A3B.query_size, QWEN3_30B_A3B.hidden_size
    (4096, 2048)
    """

    head_size: int | None = None  # h/a if None
    attention_norms: int = 0  # numbers in the norms inside the attention of a layer
    latent_attention: int | None = None  # weights in its matrices, where q, k and v come from latents (DeepSeek's MLA)
    num_dense_layers: int = 0  # at the start, before those with experts
    most_nodes: int | None = None  # on which the experts of a token are, at most; any if None
    window: int | None = None  # keys that a query sees, itself included, in layers whose attention has a window
    full_attention_freq: int | None = None  # every n-th layer has none; if None all have

    def __post_init__(self):
        if (heads := self.num_attention_heads) is None:
            raise ValueError("a head_size needs num_attention_heads: give it too")
        width = check_size("hidden_size", self.hidden_size)
        if self.head_size is not None:  # heads need not divide h: what a GPT checks of h holds for their own width
            own = check_size("head_size", self.head_size) * check_size("num_attention_heads", heads)
            object.__setattr__(self, "hidden_size", own)
        super().__post_init__()
        object.__setattr__(self, "hidden_size", width)
        for name in ("attention_norms", "num_dense_layers"):
            check_size(name, getattr(self, name), least=0)
        for name in ("window", "full_attention_freq"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.full_attention_freq and self.window is None:
            raise ValueError(
                f"full_attention_freq={self.full_attention_freq} is for windows of attention: give a window"
            )

    @property
    def query_size(self) -> int:
        """The width of a token's queries, and of what its heads return."""
        heads = self.num_attention_heads or 1
        return heads * (self.head_size or self.hidden_size // heads)

    @property
    def kv_size(self) -> int:
        heads = self.num_attention_heads or 1
        return self.query_size // heads * (self.num_query_groups or heads)

    @property
    def num_matrix_parameters(self) -> int:
        h, q, kv = self.hidden_size, self.query_size, self.kv_size
        attention = 2 * h * (q + kv) if self.latent_attention is None else self.latent_attention
        return super().num_matrix_parameters - 2 * h * (h + kv) + attention

    @property
    def flops_per_token(self) -> int:
        return super().flops_per_token + 12 * self.num_layers * self.seq_length * (self.query_size - self.hidden_size)

    @property
    def num_parameters(self) -> int:
        biases = self.query_size - self.hidden_size if self.bias else 0
        return super().num_parameters + self.num_layers * (self.attention_norms + biases)

    @property
    def num_moe_layers(self) -> int:
        dense = -(-min(self.num_dense_layers, self.num_layers) // self.moe_layer_freq) if self.num_experts else 0
        return super().num_moe_layers - dense

    def has_experts(self, layer: int) -> bool:
        return layer >= self.num_dense_layers and super().has_experts(layer)


class Parameters(NamedTuple):
    """How many parameters a model has, and how many of them process a token."""

    total: int
    active: int


def count_parameters(model: GPT) -> Parameters:
    """Return the parameters of a model, the norm after its last layer included.

    >>> count_parameters(MIXTRAL_8X22B), count_parameters(QWEN3_30B_A3B)
    (Parameters(total=140630071296, active=39161468928), Parameters(total=30532122624, active=3353032704))
    """
    norm = (2 if model.norm == "layernorm" else 1) * model.hidden_size
    return Parameters(model.num_parameters + norm, model.num_active_parameters + norm)


def query_size(model: GPT) -> int:
    """Return the width of a token's queries: h, unless the heads have a size of their own."""
    return model.query_size if isinstance(model, AnyGPT) else model.hidden_size


class AttentionLayers(NamedTuple):
    """Layers whose attention is alike: their share of all, and how many keys a query sees, on average and at most."""

    share: float
    keys: float
    most_keys: float


def attention_layers(model: GPT) -> list[AttentionLayers]:
    """Return the kinds of causal attention in a model's layers; the half that the mask hides is not computed.

    >>> attention_layers(GPT_OSS_120B)  # half of its layers have a window of 128 tokens
    [AttentionLayers(share=0.5, keys=2048.0, most_keys=4096), AttentionLayers(share=0.5, keys=126.0, most_keys=128)]
    """
    s = model.seq_length
    whole = AttentionLayers(1.0, s / 2, s)
    if not isinstance(model, AnyGPT) or model.window is None or model.window >= s:
        return [whole]
    w, every = model.window, model.full_attention_freq
    windowed = AttentionLayers(1.0, w * (1 - w / (2 * s)), w)  # the first w tokens see fewer
    if every is None:
        return [windowed]
    full = model.num_layers // every / model.num_layers
    return [whole._replace(share=full), windowed._replace(share=1 - full)]


def mla_parameters(h: int, a: int, q_rank: int, kv_rank: int, head: int, rope: int, value: int) -> int:
    """Return the weights in the matrices of multi-head latent attention. Source: arXiv 2412.19437, section 2.1.1.

    They go from h to the latents of q and of k and v (with the shared rotary key), from those to a heads, and back.
    """
    down = h * (q_rank + kv_rank + rope)
    return down + q_rank * a * (head + rope) + kv_rank * a * (head + value) + a * value * h


TODAY: dict = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
MIXTRAL_8X22B = GPT(56, 6144, 4096, 32768, 48, 8, 16384, num_experts=8, top_k=2, rotary_base=1e6, **TODAY)
QWEN3_30B_A3B = AnyGPT(
    48, 2048, 4096, 151936, 32, 4, num_experts=128, top_k=8, moe_ffn_hidden_size=768,
    head_size=128, attention_norms=2 * 128, rotary_base=1e6, **TODAY,
)  # fmt: skip
QWEN3_235B_A22B = AnyGPT(
    94, 4096, 4096, 151936, 64, 4, num_experts=128, top_k=8, moe_ffn_hidden_size=1536,
    head_size=128, attention_norms=2 * 128, rotary_base=1e6, **TODAY,
)  # fmt: skip
GPT_OSS_120B = AnyGPT(
    36, 2880, 4096, 201088, 64, 8, num_experts=128, top_k=4, moe_ffn_hidden_size=2880,
    head_size=64, window=128, full_attention_freq=2, rotary_base=150000.0, **TODAY,
)  # fmt: skip
LLAMA_4_MAVERICK = GPT(
    48, 5120, 8192, 202048, 40, 8, 16384, num_experts=128, top_k=1, moe_layer_freq=2, num_shared_experts=1,
    moe_ffn_hidden_size=8192, router_scores="sigmoid", rotary_base=500000.0, **TODAY,
)  # fmt: skip
GROK_1 = GPT(64, 6144, 8192, 131072, 48, 8, 32768, num_experts=8, top_k=2, **TODAY)
DEEPSEEK_V3 = AnyGPT(
    61, 7168, 4096, 129280, 128, ffn_hidden_size=18432, num_experts=256, top_k=8, num_shared_experts=1,
    moe_ffn_hidden_size=2048, router_scores="sigmoid", num_dense_layers=3, most_nodes=4,
    head_size=(128 + 64 + 128) // 2,  # 192 for keys and 128 for values: as many FLOPs as 160 for both
    attention_norms=1536 + 512, latent_attention=mla_parameters(7168, 128, 1536, 512, 128, 64, 128), **TODAY,
)  # fmt: skip
KIMI_K2 = AnyGPT(
    61, 7168, 4096, 163840, 64, ffn_hidden_size=18432, num_experts=384, top_k=8, num_shared_experts=1,
    moe_ffn_hidden_size=2048, router_scores="sigmoid", num_dense_layers=1,
    head_size=(128 + 64 + 128) // 2, attention_norms=1536 + 512,
    latent_attention=mla_parameters(7168, 64, 1536, 512, 128, 64, 128), **TODAY,
)  # fmt: skip
"""Sources: the models' config.json on Hugging Face, for sequences of 4,096 tokens, or 8,192; Mixtral as of v0.3 (v0.1
has 32,000 words); Grok-1 as NVIDIA runs it (github.com/NVIDIA/dgxc-benchmarking at 741c886, grok1_314b.yaml)."""

LEFT_OUT = {
    "Llama 4 Maverick": "attention within chunks of 8,192 tokens in 3 of 4 layers: here it is whole",
    "GPT-OSS 120B": "the biases in attention, experts and routers, and the sinks of attention",
    "DeepSeek-V3": (
        "the bias of each router (256 numbers in 58 layers, updated without a gradient) and the module that predicts "
        "the token after next (about 14 billion parameters)"
    ),
}
"""What these counts do not have, by model."""
