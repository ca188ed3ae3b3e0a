"""Translates Hugging Face's format: config.json to a `GPT` and back, and which rows of which
tensors a parameter has.

A `Family` is a table of all that is said about models of one kind; reading and writing follow the
same table. What a config.json leaves out has the default of transformers' configuration class.
Those defaults are in the table too, as nothing here imports transformers; a test compares them with
the classes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.shape import GPT

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # with a constant rounded to ten digits
}
# What null stands for
FOLLOWS = {"n_inner": "4 n_embd", "num_key_value_heads": "num_attention_heads"}
OF_SIZES = ("num_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_query_groups")
OF_SIZES += ("ffn_hidden_size", "num_experts")  # fields that decide how large tensors are
# Masks and tables that old files have
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
# Mixtral's experts, as transformers 5 computes them
AS_IN_MEMORY = re.compile(r"\.mlp\.(gate\.weight|experts\..*)$")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    """The models of one architecture."""

    architecture: str
    form: dict[str, Any]  # fields of the `GPT` that are the same in all of them
    # What config.json calls the others: the field, and the default
    options: dict[str, tuple[str, Any]]
    # Further options, and the values that labtrain computes, the default first
    known: dict[str, list]
    layers: str  # how the names of a layer's tensors begin, before its number
    # For each module of labtrain's model, the tensors that have its rows, one after the other
    tensors: dict[str, list[str]]
    # Options that a copy takes from the model that it started from; they may be left out
    kept: tuple[str, ...]
    aliases: dict[str, str]  # other names of options, which have the last word
    # The default of sliding_window; () if attention has none, whatever is said
    window: tuple[int | None, ...] = ()


GPT2 = Family(
    "GPT2LMHeadModel",
    dict(norm="layernorm", positions="learned", bias=True),
    {
        "n_layer": ("num_layers", 12), "n_embd": ("hidden_size", 768),
        "n_positions": ("seq_length", 1024),
        "vocab_size": ("vocab_size", 50257), "n_head": ("num_attention_heads", 12),
        "n_inner": ("ffn_hidden_size", None), "activation_function": ("mlp", "gelu_new"),
        "layer_norm_epsilon": ("norm_eps", 1e-5), "tie_word_embeddings": ("tied", True),
    },
    {
        "activation_function": ["gelu_new", *ACTIVATIONS], "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
    },
    "transformer.h.",
    {
        "embedding": ["transformer.wte"], "positions": ["transformer.wpe"],
        "attention_norm": ["ln_1"],
        "attention.qkv": ["attn.c_attn"], "attention.out": ["attn.c_proj"],
        "mlp_norm": ["ln_2"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"],
        "norm": ["transformer.ln_f"], "output": ["lm_head"],
    },
    (*TOKENS, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    {
        "num_hidden_layers": "n_layer", "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    },
)  # fmt: skip
LLAMA = Family(
    "LlamaForCausalLM",
    dict(norm="rmsnorm", mlp="swiglu", positions="rope"),
    {
        "num_hidden_layers": ("num_layers", 32), "hidden_size": ("hidden_size", 4096),
        "max_position_embeddings": ("seq_length", 2048), "vocab_size": ("vocab_size", 32000),
        "num_attention_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_query_groups", None),
        "intermediate_size": ("ffn_hidden_size", 11008), "rms_norm_eps": ("norm_eps", 1e-6),
        "rope_theta": ("rotary_base", 10_000.0), "tie_word_embeddings": ("tied", False),
        "attention_bias": ("bias", False), "mlp_bias": ("bias", False),
    },
    {"hidden_act": ["silu", "swish"]},
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
    (*TOKENS, "max_position_embeddings", "attention_dropout"),
    {},
)  # fmt: skip
MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    form=LLAMA.form | {"bias": False},
    options={name: option for name, option in LLAMA.options.items() if option[0] != "bias"}
    | {
        "max_position_embeddings": ("seq_length", 131_072),
        "num_key_value_heads": ("num_query_groups", 8),
        "intermediate_size": ("ffn_hidden_size", 14_336),
    },
    kept=(*LLAMA.kept, "sliding_window"),
    window=(4096,),
)  # fmt: skip
MIXTRAL = replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    options=MISTRAL.options
    | {
        "rms_norm_eps": ("norm_eps", 1e-5), "rope_theta": ("rotary_base", 1_000_000.0),
        "num_local_experts": ("num_experts", 8), "num_experts_per_tok": ("top_k", 2),
    },
    aliases={"num_experts": "num_local_experts"},
    window=(None,),
)  # fmt: skip
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL}


def shape_of(config: Mapping[str, Any], seq_length: int | None = None) -> GPT:
    """Return the shape that a config.json describes, for sequences of ``seq_length`` tokens, by
    default the longest.

    Raises:
        ValueError: the architecture, or one of its options, is not one that labtrain computes.
    """
    kind, family = _family_of_config(config)
    fault = f"a config of model_type={kind!r}"
    try:
        values = _fields_of(config, family, seq_length)
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{fault} has a value of the wrong type ({error})") from None
    if values.get("top_k") == 1:
        fault = "num_experts_per_tok=1 is not computed by labtrain's model"
        raise ValueError(f"{fault}: use 2 or more")
    try:
        return GPT(**values)
    except ValueError as error:
        reason = str(error).rsplit(": ", 1)[0]  # the rest is for whoever may choose a shape
        for name, (field, _) in family.options.items():
            reason = re.sub(rf"\b{field}=", f"{name}=", reason)
        raise ValueError(f"{fault} describes no model: {reason}{left_out(config)}") from None


def _fields_of(config: Mapping[str, Any], family: Family, seq_length: int | None) -> dict[str, Any]:
    """Return the fields of a config.json's shape, after checking that its options are computed.

    A value of the wrong type is a TypeError.
    """
    given = _given(config, family)
    for name, known in family.known.items():
        _check_known(name, given.get(name, known[0]), known)
    values = dict(family.form)
    for name, (field, default) in family.options.items():
        value = given.get(name, default)
        if value is None and name not in FOLLOWS:
            raise ValueError(f"{name} is null: give a value, or leave it out for {default!r}")
        if field == "mlp":
            value = ACTIVATIONS[str(value)]
        values.setdefault(field, value)
        # Two names of a field must agree
        _check_known(name, value, [values[field]])
    if (head_dim := given.get("head_dim")) is not None:
        _check_head_dim(head_dim, values, left_out(config))
    longest: int = values["seq_length"]
    length = longest if seq_length is None else seq_length
    if length > longest:
        fault = f"seq_length={length} is more than the {longest} positions of this model"
        raise ValueError(f"{fault}: use fewer")
    _check_window(given, family, length)
    values["seq_length"] = length
    if values.get("num_query_groups") == values["num_attention_heads"]:
        values["num_query_groups"] = None
    return values


def _family_of_config(config: Mapping[str, Any]) -> tuple[str, Family]:
    """Return the family that a config.json names, if its weights are those that labtrain reads."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        use = ", ".join(FAMILIES)
        fault = f"model_type={kind!r} is an architecture that labtrain does not have"
        raise ValueError(f"{fault}: use one of {use}")
    if quantized := config.get("quantization_config"):
        raise ValueError(f"quantization_config={quantized}: use weights in floating point")
    if file := config.get("transformers_weights"):
        fault = f"transformers_weights={file!r}"
        raise ValueError(f"{fault}: labtrain reads {WEIGHTS}, or several files and {INDEX}")
    return kind, FAMILIES[kind]


def _given(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return what a config.json says, each option under one name, and rope_theta among them.

    transformers 5 writes rope_parameters, versions before rope_scaling, with rope_theta outside. If
    both are there, the old name counts.
    """
    given = dict(config)
    for alias, name in family.aliases.items():
        if alias in config:
            given[name] = config[alias]
    if family.form["positions"] != "rope":
        return given
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise TypeError(f"{rope!r} says nothing about rotary positions")
    if "rope_theta" in rope:
        given["rope_theta"] = rope["rope_theta"]
    _check_known("rope_type", rope.get("rope_type", rope.get("type", "default")), ["default"])
    if of_layers := [name for name, value in rope.items() if isinstance(value, dict)]:
        fault = f"rope_parameters that {of_layers[0]} has of its own"
        fault += " are not computed by labtrain's model"
        raise ValueError(f"{fault}: use weights trained with the same in all layers")
    return given


def _check_known(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        use = " or ".join(map(repr, dict.fromkeys(known)))
        fault = f"{name}={value!r} is not computed by labtrain's model"
        raise ValueError(f"{fault}: use weights trained with {use}")


def _check_head_dim(head_dim: int, values: Mapping[str, Any], left_out: str) -> None:
    hidden_size = values["hidden_size"]
    heads = values["num_attention_heads"]
    if head_dim != hidden_size // heads:
        computed = f"hidden_size={hidden_size} / num_attention_heads={heads}"
        fault = f"head_dim={head_dim!r} is not {computed}"
        raise ValueError(f"{fault}, the only one that labtrain's model computes{left_out}")


def _check_window(given: Mapping[str, Any], family: Family, seq_length: int) -> None:
    window = given.get("sliding_window", *family.window) if family.window else None
    if window is None or window >= seq_length:  # each token sees all before it
        return
    default = "" if "sliding_window" in given else ", the default that config.json leaves out,"
    fault = f"sliding_window={window}{default} is less than seq_length={seq_length}"
    if window < 1:
        raise ValueError(f"{fault}: no model can be trained with it")
    raise ValueError(f"{fault}: use a seq_length up to {window}")


def left_out(config: Mapping[str, Any]) -> str:
    """Return a clause about the sizes that a config.json leaves out; an empty text if
    it has all.
    """
    family = FAMILIES[config["model_type"]]
    there = {family.aliases.get(name, name) for name in config}
    sizes = OF_SIZES
    if family.form["positions"] == "learned":
        sizes += ("seq_length",)
    said = []
    for name, (field, default) in family.options.items():
        if field in sizes and name not in there:
            said.append(f"{name} ({default or FOLLOWS[name]} by default)")
    return f"; {CONFIG} leaves out {', '.join(said)}" if said else ""


@lru_cache
def config_of(shape: GPT, model_type: str | None = None) -> dict[str, Any]:
    """Return the config.json of a shape, with which transformers computes the same.

    It is that of the first family that has such models, or of the one that is asked for; else a
    ValueError says what the nearest family has instead.
    """
    kinds = list(FAMILIES) if model_type is None else [model_type]
    misfits = {kind: _misfits(shape, FAMILIES[kind]) for kind in kinds}
    for kind in kinds:
        if not misfits[kind]:
            return _config_in(shape, kind)
    values = _resolved(shape)
    nearest = min(misfits, key=lambda kind: len(misfits[kind]))
    given = ", ".join(f"{name}={values[name]!r}" for name in misfits[nearest])
    instead = ", ".join(f"{name}={other}" for name, other in misfits[nearest].items())
    fault = f"{given} is not the form of a model that transformers knows"
    raise ValueError(f"{fault}: the nearest, {FAMILIES[nearest].architecture}, has {instead}")


def _config_in(shape: GPT, kind: str) -> dict[str, Any]:
    """Return the config.json of a shape that fits a family."""
    family = FAMILIES[kind]
    values = _resolved(shape)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": kind}
    for name, known in family.known.items():
        config[name] = known[0]
    for name, (field, _) in family.options.items():
        if field != "mlp":
            config[name] = values[field]
    if "activation_function" in config:
        names = [name for name, mlp in ACTIVATIONS.items() if mlp == shape.mlp]
        config["activation_function"] = names[0]
    if family.window:
        config["sliding_window"] = None
    return config


def _misfits(shape: GPT, family: Family) -> dict[str, str]:
    """Return the fields of a shape that no model of a family has, each with what those have."""
    values = _resolved(shape)
    said = {field for field, _ in family.options.values()}
    same = {field: values[field] for field in said if values[field] is not None}
    try:
        nearest = _resolved(GPT(**family.form | same))
    except ValueError:  # of rotary positions
        return {"num_attention_heads": "a number that leaves an even head size"}
    misfits = {}
    for name, value in values.items():
        if value != nearest[name]:
            misfits[name] = repr(nearest[name])
    if "mlp" in said and shape.mlp not in ACTIVATIONS.values():
        misfits["mlp"] = " or ".join(map(repr, dict.fromkeys(ACTIVATIONS.values())))
    if "num_experts" in said and shape.num_experts is None:
        misfits["num_experts"] = "1 or more"
    if shape.num_experts and shape.top_k == 1 and "top_k" in said:
        misfits["top_k"] = "2 or more"
    if shape.num_attention_heads is None:
        misfits["num_attention_heads"] = "1 or more"
    return misfits


def _resolved(shape: GPT) -> dict[str, Any]:
    """Return a shape's fields, where None has become the number it stands for, and what is not used
    has become None.
    """
    values = asdict(shape)
    values["ffn_hidden_size"] = shape.expert_width
    values["moe_ffn_hidden_size"] = None
    values["num_query_groups"] = shape.num_query_groups or shape.num_attention_heads
    values["norm_eps"] = float(shape.norm_eps)  # transformers refuses an int
    unused = []
    if not shape.num_experts:
        unused += ["top_k", "moe_layer_freq", "router_scores"]
    if shape.positions != "rope":
        unused += ["rotary_base"]
    return values | dict.fromkeys(unused)


def rows_of(name: str, size: Sequence[int], shape: GPT) -> list[tuple[str, range]]:
    """Return which tensors' rows are those of the parameter ``name`` of a whole model, one after
    the other.

    The rows of experts, [experts, out, in], are those of each in turn. The heads of Llama's queries
    are in order; in the fused layer of labtrain's model come the first of each group, then the
    second.

    >>> form = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    >>> llama = GPT(1, 8, 4, 10, num_attention_heads=4, num_query_groups=2, **form)
    >>> rows = rows_of("layers.0.attention.qkv.weight", (16, 8), llama)
    >>> [(name.split(".")[-2][0], those.start, those.stop) for name, those in rows]
    [('q', 0, 2), ('q', 4, 6), ('q', 2, 4), ('q', 6, 8), ('k', 0, 4), ('v', 0, 4)]
    """
    # layers.3.attention.qkv.weight: layer 3, module attention.qkv, kind weight
    matched = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", name)
    assert matched is not None
    layer, module, kind = matched.groups()
    family = family_of(shape)
    prefix = "" if layer is None else f"{family.layers}{layer}."
    names = [f"{prefix}{part}.{kind or 'weight'}" for part in family.tensors[module]]
    if len(size) == 3:
        rows = range(size[1] // len(names))
        return [(part.format(expert), rows) for expert in range(size[0]) for part in names]
    if module == "attention.qkv" and len(names) == 3 and shape.kv_size < shape.hidden_size:
        queries, keys, values = names
        kv_rows = range(shape.kv_size)
        return [*_query_rows(queries, shape), (keys, kv_rows), (values, kv_rows)]
    rows = range(size[0] // len(names))
    return [(part, rows) for part in names]


def _query_rows(queries: str, shape: GPT) -> list[tuple[str, range]]:
    """Return the rows of the heads of queries, in the order of the fused layer."""
    heads = shape.num_attention_heads
    assert heads is not None and shape.num_query_groups is not None
    head_size = shape.hidden_size // heads
    heads_per_group = heads // shape.num_query_groups
    rows = []
    for first in range(heads_per_group):
        for head in range(first, heads, heads_per_group):
            rows.append((queries, range(head * head_size, (head + 1) * head_size)))
    return rows


def family_of(shape: GPT) -> Family:
    """Return the family that a shape belongs to."""
    return FAMILIES[config_of(shape)["model_type"]]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor's rows, as `rows_of` has them, are its columns: GPT-2's linear layers are
    [in, out].
    """
    return re.search(r"\.c_\w+\.weight$", tensor) is not None


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's files of weights in the order of transformers: of a tensor that is in two,
    the last counts.

    One file with all weights comes before an index, which may be left there from what was in the
    folder before.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            fault = f"{folder / INDEX} has weight_map={weight_map!r}, not a file for each tensor"
            raise ValueError(f"{fault}: it is damaged")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{folder / INDEX} names {name}: files must lie in the folder")
        return [folder / name for name in names]
    if pickled := sorted(path for pattern in PICKLED for path in folder.glob(pattern)):
        fault = f"{pickled[0]} is pickled, and loading it would run whatever code it contains"
        way_out = "where you trust it, let transformers write it anew with save_pretrained"
        raise ValueError(f"{fault}: {way_out}")
    raise ValueError(f"{folder} has no weights: it needs {WEIGHTS}, or several files and {INDEX}")


def read_json(path: Path) -> Mapping[str, Any]:
    """Return what a JSON file has, which must be an object."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        fault = f"{path} cannot be read ({why})"
        way_out = "name a folder that transformers' save_pretrained wrote"
        raise ValueError(f"{fault}: {way_out}") from None
