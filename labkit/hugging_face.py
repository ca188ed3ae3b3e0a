"""Translates Hugging Face's format: config.json to a `GPT` and back, and which rows of which tensors a parameter has.

A `Family` is a table of all that is said about models of one kind; reading and writing follow the same table.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.shape import GPT

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE = {"rope_type": ["default"], "type": ["default"], "partial_rotary_factor": [1.0]}
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # masks and tables that old files have


@dataclass(frozen=True)
class Family:
    """The models of one architecture."""

    architecture: str
    form: dict[str, Any]  # fields of the `GPT` that are the same in all of them
    options: dict[str, tuple]  # what config.json calls the others: the field, and a default unless it must be there
    known: dict[str, list]  # further options, and the values that labkit computes
    layers: str  # how the names of a layer's tensors begin, before its number
    tensors: dict[str, list[str]]  # for each module of labkit's, the tensors that have its rows, one after the other


GPT2 = Family(
    "GPT2LMHeadModel",
    dict(norm="layernorm", positions="learned", bias=True),
    {
        "n_layer": ("num_layers",), "n_embd": ("hidden_size",), "n_positions": ("seq_length",),
        "vocab_size": ("vocab_size",), "n_head": ("num_attention_heads",), "n_inner": ("ffn_hidden_size", None),
        "activation_function": ("mlp", "gelu_new"), "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
    },
    {
        "activation_function": [*ACTIVATIONS], "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
    },
    "transformer.h.",
    {
        "embedding": ["transformer.wte"], "positions": ["transformer.wpe"],
        "attention_norm": ["ln_1"], "attention.qkv": ["attn.c_attn"], "attention.out": ["attn.c_proj"],
        "mlp_norm": ["ln_2"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"],
        "norm": ["transformer.ln_f"], "output": ["lm_head"],
    },
)  # fmt: skip
LLAMA = Family(
    "LlamaForCausalLM",
    dict(norm="rmsnorm", mlp="swiglu", positions="rope"),
    {
        "num_hidden_layers": ("num_layers",), "hidden_size": ("hidden_size",),
        "max_position_embeddings": ("seq_length",), "vocab_size": ("vocab_size",),
        "num_attention_heads": ("num_attention_heads",), "num_key_value_heads": ("num_query_groups", None),
        "intermediate_size": ("ffn_hidden_size",), "rms_norm_eps": ("norm_eps", 1e-6),
        "rope_theta": ("rotary_base", 10_000.0), "tie_word_embeddings": ("tied", False),
        "attention_bias": ("bias", False), "mlp_bias": ("bias", False),
    },
    {"hidden_act": ["silu"]},
    "model.layers.",
    {
        "embedding": ["model.embed_tokens"],
        "attention_norm": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.up": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down": ["mlp.down_proj"],
        "mlp.router": ["block_sparse_moe.gate"],
        "mlp.experts.up": ["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
        "mlp.experts.down": ["block_sparse_moe.experts.{}.w2"],
        "norm": ["model.norm"], "output": ["lm_head"],
    },
)  # fmt: skip
MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    form=LLAMA.form | dict(bias=False),
    options=LLAMA.options | {"num_local_experts": ("num_experts",), "num_experts_per_tok": ("top_k",)},
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": LLAMA, "mixtral": MIXTRAL}


def shape_of(config: Mapping[str, Any], seq_length: int | None = None) -> GPT:
    """Return the shape that a config.json describes, for sequences of ``seq_length`` tokens, by default the longest.

    Raises:
        ValueError: the architecture, or one of its options, is not one that labkit computes.
    """
    if (kind := config.get("model_type")) not in FAMILIES:
        use = ", ".join(FAMILIES)
        raise ValueError(f"model_type={kind!r} is an architecture that labkit does not have: use one of {use}")
    if quantized := config.get("quantization_config"):
        raise ValueError(f"quantization_config={quantized}: use weights in floating point")
    family, fault = FAMILIES[kind], f"a config of model_type={kind!r}"
    try:
        # transformers 5 writes rope_parameters, versions before rope_scaling, with rope_theta outside.
        config = {**config, **(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
        values, known = dict(family.form), ROPE | family.known
        for name, (field, *default) in family.options.items():
            value = default[0] if default and config.get(name) is None else config[name]
            value = ACTIVATIONS.get(value, value) if field == "mlp" else value
            known.setdefault(name, [values.setdefault(field, value)])  # two names of a field must agree
        known["head_dim"] = [values["hidden_size"] // values["num_attention_heads"]]
        for name, right in known.items():
            if (value := config.get(name)) not in (None, *right):
                use = " or ".join(map(repr, right))
                raise ValueError(f"{name}={value!r} is not computed by labkit's model: use weights trained with {use}")
        longest = values["seq_length"]
        values["seq_length"] = seq_length = longest if seq_length is None else seq_length
        if seq_length > longest:
            raise ValueError(f"seq_length={seq_length} is more than the {longest} positions of this model: use fewer")
        if (window := config.get("sliding_window")) is not None and window < seq_length:
            fault = f"sliding_window={window} is less than seq_length={seq_length}"
            way_out = f"use a seq_length up to {window}" if window > 0 else "use weights without a window"
            raise ValueError(f"{fault}: {way_out}")
    except KeyError as error:
        raise ValueError(f"{fault} without {error}: it is damaged") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{fault} has a value of the wrong type ({error})") from None
    if values.get("num_query_groups") == values["num_attention_heads"]:
        values["num_query_groups"] = None
    if (top_k := values.get("top_k", 2)) == 1:
        raise ValueError(f"num_experts_per_tok={top_k} is not computed by labkit's model: use 2 or more")
    return GPT(**values)


@lru_cache
def config_of(shape: GPT) -> dict[str, Any]:
    """Return the config.json of a shape, with which transformers computes the same.

    It is that of the family where it describes the same shape when read back; without one, a ValueError says so.
    """
    values = _resolved(shape)
    for kind, family in FAMILIES.items():
        config = {"architectures": [family.architecture], "model_type": kind}
        config |= {name: right[0] for name, right in family.known.items()}
        config |= {name: values[field] for name, (field, *_) in family.options.items() if field != "mlp"}
        if "activation_function" in config:
            config["activation_function"] = next((k for k, mlp in ACTIVATIONS.items() if mlp == shape.mlp), None)
        with suppress(ValueError):
            if _resolved(shape_of(config)) == values:
                return config
    given = ", ".join(f"{name}={values[name]!r}" for name in ("norm", "mlp", "positions", "bias", "num_experts"))
    forms = (f"{kind}'s {', '.join(f'{k}={v!r}' for k, v in each.form.items())}" for kind, each in FAMILIES.items())
    raise ValueError(f"{given} is not the form of a model that transformers knows: use {'; '.join(forms)}")


def _resolved(shape: GPT) -> dict[str, Any]:
    """Return a shape's fields, where None has become the number it stands for, and what is not used has become None."""
    values = asdict(shape) | {"ffn_hidden_size": shape.expert_width, "moe_ffn_hidden_size": None}
    values["num_query_groups"] = shape.num_query_groups or shape.num_attention_heads
    unused = [] if shape.num_experts else ["top_k", "moe_layer_freq", "router_scores"]
    unused += [] if shape.positions == "rope" else ["rotary_base"]
    return values | dict.fromkeys(unused)


def rows_of(name: str, size: Sequence[int], shape: GPT) -> list[tuple[str, range]]:
    """Return which tensors' rows are those of the parameter ``name`` of a whole model, one after the other.

    The rows of experts, [experts, out, in], are those of each in turn. The heads of Llama's queries are in order; in
    labkit's fused layer come the first of each group, then the second.

    >>> form = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    >>> llama = GPT(1, 8, 4, 10, num_attention_heads=4, num_query_groups=2, **form)
    >>> rows = rows_of("layers.0.attention.qkv.weight", (16, 8), llama)
    >>> [(name.split(".")[-2][0], each.start, each.stop) for name, each in rows]
    [('q', 0, 2), ('q', 4, 6), ('q', 2, 4), ('q', 6, 8), ('k', 0, 4), ('v', 0, 4)]
    """
    matched, family = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", name), family_of(shape)
    assert matched is not None
    layer, module, kind = matched.groups()
    prefix = "" if layer is None else f"{family.layers}{layer}."
    names = [f"{prefix}{each}.{kind or 'weight'}" for each in family.tensors[module]]
    if len(size) == 3:
        matrix = range(size[1] // len(names))
        return [(each.format(expert), matrix) for expert in range(size[0]) for each in names]
    if module == "attention.qkv" and len(names) == 3 and shape.kv_size < shape.hidden_size:
        assert shape.num_attention_heads is not None and shape.num_query_groups is not None
        heads, head_size = shape.num_attention_heads, shape.hidden_size // shape.num_attention_heads
        heads_per_group = heads // shape.num_query_groups
        order = [head for first in range(heads_per_group) for head in range(first, heads, heads_per_group)]
        queries = [(names[0], range(head * head_size, (head + 1) * head_size)) for head in order]
        return [*queries, *((each, range(shape.kv_size)) for each in names[1:])]
    return [(each, range(size[0] // len(names))) for each in names]


def family_of(shape: GPT) -> Family:
    """Return the family that a shape belongs to."""
    return FAMILIES[config_of(shape)["model_type"]]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor's rows, as `rows_of` has them, are its columns: GPT-2's linear layers are [in, out]."""
    return re.search(r"\.c_\w+\.weight$", tensor) is not None


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return a folder's files of weights, each with the tensors that an index says it has."""
    if (folder / INDEX).exists():
        files: dict[Path, set[str]] = {}
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            fault = f"{folder / INDEX} has weight_map={weight_map!r}, not a file for each tensor"
            raise ValueError(f"{fault}: it is damaged")
        for name, file in weight_map.items():
            if Path(str(file)).name != file:
                raise ValueError(f"{folder / INDEX} names {file}: files must lie in the same folder")
            files.setdefault(folder / file, set()).add(name)
        return files
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: set()}
    if pickled := sorted(path for pattern in PICKLED for path in folder.glob(pattern)):
        fault = f"{pickled[0]} is pickled, and loading it would run whatever code it contains"
        raise ValueError(f"{fault}: where you trust it, let transformers write it anew with save_pretrained")
    raise ValueError(f"{folder} has no weights: it needs {WEIGHTS}, or several files and {INDEX}")


def read_json(path: Path) -> Mapping[str, Any]:
    """Return what a JSON file has, which must be an object."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        fault = f"{path} cannot be read ({why})"
        raise ValueError(f"{fault}: name a folder that transformers' save_pretrained wrote") from None
