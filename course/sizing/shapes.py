"""Shapes of published models with experts, and their parameters: all of them, and those that process a token.

`labkit.shape.GPT` describes what `labtrain.model` builds. An `AnyGPT` also has what some published models have instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from labkit.shape import GPT
from labkit.sizes import check_size


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of multi-head latent attention (DeepSeek's MLA), by Megatron-LM's names.

    A token's queries come from a latent of ``q_lora_rank`` numbers, its keys and values from one of ``kv_lora_rank``. A
    key has ``qk_head_dim`` numbers of its head, and ``qk_pos_emb_head_dim`` with its position that all heads share.
    Source: arXiv 2412.19437, section 2.1.1.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def __post_init__(self):
        for field in fields(self):
            check_size(field.name, getattr(self, field.name))
        if (self.key_dim + self.v_head_dim) % 2:
            fault = f"a head has {self.key_dim} numbers of a key and {self.v_head_dim} of a value"
            raise ValueError(f"{fault}, whose mean must be a whole number: change v_head_dim")

    @property
    def key_dim(self) -> int:
        """How many numbers a head's query has, and its key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def latent_size(self) -> int:
        """How many numbers both latents have, each of which has a norm."""
        return self.q_lora_rank + self.kv_lora_rank

    def down_weights(self, hidden_size: int) -> int:
        """Return the weights that make the latents, and the part of the keys that heads share."""
        return hidden_size * (self.latent_size + self.qk_pos_emb_head_dim)

    def up_weights(self, num_heads: int) -> int:
        """Return the weights that make the heads' queries, keys and values of the latents."""
        of_keys_and_values = self.kv_lora_rank * (self.qk_head_dim + self.v_head_dim)
        return num_heads * (self.q_lora_rank * self.key_dim + of_keys_and_values)

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights in the matrices of a layer's attention, the output's included."""
        output = num_heads * self.v_head_dim * hidden_size
        return self.down_weights(hidden_size) + self.up_weights(num_heads) + output


@dataclass(frozen=True)
class AnyGPT(GPT):
    """A GPT whose heads have a size of their own, whose attention has norms, or whose first layers have no experts.

    >>> QWEN3_30B_A3B.query_size, QWEN3_30B_A3B.hidden_size
    (4096, 2048)
    """

    head_size: int | None = None  # h/a if None
    attention_norms: int = 0  # numbers in the norms inside the attention of a layer
    latent: LatentAttention | None = None  # where q, k and v come from latents
    num_dense_layers: int = 0  # at the start, before those with experts
    most_nodes: int | None = None  # on which the experts of a token are, at most; any if None
    window: int | None = None  # keys that a query sees, itself included, in layers whose attention has a window
    full_attention_freq: int | None = None  # every n-th layer has none; if None all have

    def __post_init__(self):
        if (heads := self.num_attention_heads) is None:
            raise ValueError("a head_size needs num_attention_heads: give it too")
        if self.latent and (self.head_size is not None or self.attention_norms):
            raise ValueError("latent says the sizes of heads and norms: give no head_size and no attention_norms")
        width = check_size("hidden_size", self.hidden_size)
        if size := self.own_head_size:  # heads need not divide h: what a GPT checks of h holds for their own width
            own = check_size("head_size", size) * check_size("num_attention_heads", heads)
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
    def own_head_size(self) -> int | None:
        """The size of a head where it is not h/a; with latents the mean of a key's and a value's.

        So there are as many numbers in queries and outputs, as many in keys and values, and as many FLOPs.
        """
        return (self.latent.key_dim + self.latent.v_head_dim) // 2 if self.latent else self.head_size

    @property
    def query_size(self) -> int:
        """The width of a token's queries, and of what its heads return."""
        heads = self.num_attention_heads or 1
        return heads * (self.own_head_size or self.hidden_size // heads)

    @property
    def inner_norms(self) -> int:
        """The numbers in the norms inside the attention of a layer."""
        return self.latent.latent_size if self.latent else self.attention_norms

    @property
    def kv_size(self) -> int:
        heads = self.num_attention_heads or 1
        return self.query_size // heads * (self.num_query_groups or heads)

    @property
    def num_matrix_parameters(self) -> int:
        h, q, kv = self.hidden_size, self.query_size, self.kv_size
        attention = self.latent.num_weights(h, self.num_attention_heads or 1) if self.latent else 2 * h * (q + kv)
        return super().num_matrix_parameters - 2 * h * (h + kv) + attention

    @property
    def flops_per_token(self) -> int:
        return super().flops_per_token + 12 * self.num_layers * self.seq_length * (self.query_size - self.hidden_size)

    @property
    def num_parameters(self) -> int:
        biases = self.query_size - self.hidden_size if self.bias else 0
        return super().num_parameters + self.num_layers * (self.inner_norms + biases)

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


def latent_of(model: GPT) -> LatentAttention | None:
    """Return the sizes of a model's latent attention; None if it has none."""
    return model.latent if isinstance(model, AnyGPT) else None


class Widths(NamedTuple):
    """How many numbers a token has in each of these, of all heads together."""

    queries: int
    keys: int
    values: int
    outputs: int


def attention_widths(model: GPT) -> Widths:
    """Return the widths of a layer's attention.

    >>> attention_widths(QWEN3_30B_A3B), attention_widths(DEEPSEEK_V3).values
    (Widths(queries=4096, keys=512, values=512, outputs=4096), 16384)
    """
    if latent := latent_of(model):
        heads = model.num_attention_heads or 1
        return Widths(heads * latent.key_dim, heads * latent.key_dim, *[heads * latent.v_head_dim] * 2)
    return Widths(query_size(model), model.kv_size, model.kv_size, query_size(model))


def mlp_parameters(model: GPT) -> int:
    """Return the weights in the matrices of an MLP."""
    return (3 if model.mlp == "swiglu" else 2) * model.hidden_size * model.mlp_width


def once(modules: Sequence[str]) -> list[str]:
    """Return these modules of a layer without those that are parts of another one of them.

    >>> once(("mla_up_proj", "moe", "moe_act"))
    ['mla_up_proj', 'moe']
    """
    parts = ("moe_act", "shared_experts") if "moe" in modules else ()
    return [name for name in modules if name not in parts]


def module_weights(model: GPT, module: str, has_experts: bool) -> int:
    """Return how many weights of a layer's module, by Megatron-LM's name, multiply each token.

    >>> [module_weights(DEEPSEEK_V3, module, True) for module in ("mla_up_proj", "shared_experts", "mlp")]
    [54525952, 44040192, 0]
    """
    if module == "mla_up_proj":
        latent = latent_of(model)
        return latent.up_weights(model.num_attention_heads or 1) if latent else 0
    if module == "mlp":
        return 0 if has_experts else mlp_parameters(model)
    shared = model.num_shared_experts * model.num_expert_parameters if has_experts else 0
    if module == "moe" and has_experts:
        return shared + model.top_k * model.num_expert_parameters + model.hidden_size * (model.num_experts or 0)
    return shared if module == "shared_experts" else 0


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
    latent=LatentAttention(1536, 512, 128, 64, 128), **TODAY,
)  # fmt: skip
KIMI_K2 = AnyGPT(
    61, 7168, 4096, 163840, 64, ffn_hidden_size=18432, num_experts=384, top_k=8, num_shared_experts=1,
    moe_ffn_hidden_size=2048, router_scores="sigmoid", num_dense_layers=1,
    latent=LatentAttention(1536, 512, 128, 64, 128), **TODAY,
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
    "Kimi K2": "the bias of each router (384 numbers in 60 layers, updated without a gradient)",
}
"""What these counts do not have, by model."""
_INCOMPLETE = {
    "Llama 4 Maverick": LLAMA_4_MAVERICK,
    "GPT-OSS 120B": GPT_OSS_120B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi K2": KIMI_K2,
}


def left_out(model: GPT) -> str | None:
    """Return what a model has beyond its shape, as a sentence; None if nothing is known to be left out.

    >>> left_out(MIXTRAL_8X22B), left_out(LLAMA_4_MAVERICK)[:58]
    (None, 'Llama 4 Maverick has more than a plan says: attention with')
    """
    for name, known in _INCOMPLETE.items():
        if model == replace(known, seq_length=model.seq_length, norm_eps=model.norm_eps):
            return f"{name} has more than a plan says: {LEFT_OUT[name]}."
    return None
