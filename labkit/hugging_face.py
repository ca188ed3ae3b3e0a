"""Translates Hugging Face's format: config.json to a `GPT` and back, and which file and rows have which parameter.

It knows three forms: GPT-2's, that of Llama, to which Mistral's models belong too, and Mixtral's with experts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from labkit.shape import GPT

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
FORMS = {
    "gpt2": dict(norm=("layernorm",), mlp=("gelu", "gelu_tanh"), positions=("learned",), bias=(True,)),
    "llama": dict(norm=("rmsnorm",), mlp=("swiglu",), positions=("rope",), bias=(True, False)),
    "mixtral": dict(norm=("rmsnorm",), mlp=("swiglu",), positions=("rope",), bias=(False,)),
}
NAMES = {  # labkit's modules, without "layers.N.", and what has their rows in the files
    "gpt2": {
        "embedding": ["wte"],
        "positions": ["wpe"],
        "attention_norm": ["ln_1"],
        "attention.qkv": ["attn.c_attn"],
        "attention.out": ["attn.c_proj"],
        "mlp_norm": ["ln_2"],
        "mlp.up": ["mlp.c_fc"],
        "mlp.down": ["mlp.c_proj"],
        "norm": ["ln_f"],
        "output": ["lm_head"],
    },
    "llama": {
        "embedding": ["embed_tokens"],
        "attention_norm": ["input_layernorm"],
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
        "norm": ["norm"],
        "output": ["lm_head"],
    },
}
NAMES["mixtral"] = NAMES["llama"] | {
    "mlp.router": ["block_sparse_moe.gate"],
    "mlp.experts.up": ["w1", "w3"],  # of each expert
    "mlp.experts.down": ["w2"],
}
PREFIXES = {
    "gpt2": ("transformer.", "transformer.h."),
    **dict.fromkeys(("llama", "mixtral"), ("model.", "model.layers.")),
}
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # masks and tables that old files have


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one of the model's whole tensors, and the tensor in the files that has them."""

    name: str  # in the files
    start: int  # the first of them in the model's tensor
    length: int
    file_start: int  # the first of them in the file's tensor
    is_transposed: bool = False  # there they are columns: GPT-2's linear layers are [in, out]
    expert: int | None = None  # they are rows of this expert's matrix, in a tensor [experts, out, in]


def rows_of(name: str, size: Sequence[int], shape: GPT) -> Iterator[Rows]:
    """Yield where the files have the rows of the parameter ``name`` of a whole model, of this size, in their order.

    The heads of Llama's queries are in order; in labkit's fused layer come the first of each group, then the second.

    >>> form = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    >>> llama = GPT(1, 8, 4, 10, num_attention_heads=4, num_query_groups=2, **form)
    >>> rows = rows_of("layers.0.attention.qkv.weight", (16, 8), llama)
    >>> [(each.name.split(".")[-2], each.file_start, each.length) for each in rows]
    [('q_proj', 0, 2), ('q_proj', 4, 2), ('q_proj', 2, 2), ('q_proj', 6, 2), ('k_proj', 0, 4), ('v_proj', 0, 4)]
    """
    form, (layer, module, kind) = form_of(shape), _parts(name)
    files = [_file_name(form, each, layer, kind) for each in NAMES[form][module]]
    if module.startswith("mlp.experts."):
        for expert, (number, file) in product(range(size[0]), enumerate(NAMES[form][module])):
            file = _file_name(form, f"block_sparse_moe.experts.{expert}.{file}", layer, kind)
            yield Rows(file, number * (size[1] // len(files)), size[1] // len(files), 0, expert=expert)
        return
    is_transposed = form == "gpt2" and kind == "weight" and ".c_" in files[0]
    lengths, start = [size[0] // len(files)] * len(files), 0
    if module == "attention.qkv" and form != "gpt2":
        assert shape.num_attention_heads is not None
        h, groups = shape.hidden_size, shape.num_query_groups or shape.num_attention_heads
        head_size, heads_per_group = h // shape.num_attention_heads, shape.num_attention_heads // groups
        lengths = [h, shape.kv_size, shape.kv_size]
        for head in (group * heads_per_group + j for j in range(heads_per_group) for group in range(groups)):
            yield Rows(files[0], start, head_size, head * head_size)
            start += head_size
        files, lengths = files[1:], lengths[1:]
    for file, length in zip(files, lengths):
        yield Rows(file, start, length, 0, is_transposed)
        start += length


def _parts(name: str) -> tuple[str | None, str, str]:
    """Return the layer's number, the module and "weight" or "bias"; learned positions are a weight."""
    matched = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", name)
    assert matched is not None
    return matched[1], matched[2], matched[3] or "weight"


def _file_name(form: str, module: str, layer: str | None, kind: str) -> str:
    outer, inner = PREFIXES[form]
    return f"{'' if module == 'lm_head' else outer if layer is None else f'{inner}{layer}.'}{module}.{kind}"


def full_name(name: str, shape: GPT) -> str:
    """Return the name that a model with an output layer gives a tensor; a plain GPT2Model's is shorter."""
    outer = PREFIXES["gpt2"][0]
    return outer + name if form_of(shape) == "gpt2" and not name.startswith((outer, "lm_head.")) else name


def form_of(shape: GPT) -> str:
    """Return which of Hugging Face's architectures has this shape; raise a ValueError if none has."""
    fits = {name: all(getattr(shape, key) in known for key, known in form.items()) for name, form in FORMS.items()}
    fits["gpt2"] &= shape.num_query_groups in (None, shape.num_attention_heads)
    of_experts = shape.num_shared_experts, shape.moe_layer_freq, shape.router_scores
    fits["mixtral"] &= of_experts == (0, 1, "softmax") and shape.top_k > 1
    fits = {name: it_fits and (name == "mixtral") == (shape.num_experts is not None) for name, it_fits in fits.items()}
    if form := next((name for name, it_fits in fits.items() if it_fits), None):
        return form
    given = ", ".join(
        f"{name}={getattr(shape, name)!r}" for name in ("norm", "mlp", "positions", "bias", "num_experts")
    )
    forms = "; ".join(", ".join(f"{k}={' or '.join(map(repr, v))}" for k, v in form.items()) for form in FORMS.values())
    raise ValueError(f"{given} is not the form of a model that transformers knows: use {forms}, the last with experts")


def shape_of(config: Mapping[str, Any], seq_length: int | None = None) -> GPT:
    """Return the shape that a config.json describes, for sequences of ``seq_length`` tokens, by default the longest.

    Raises:
        ValueError: the architecture, or one of its options, is not one that labkit computes.
    """
    kind = config.get("model_type")
    if kind not in (*FORMS, "mistral"):
        raise ValueError(
            f"model_type={kind!r} is an architecture that labkit does not have: use gpt2, llama, mistral or mixtral"
        )
    if quantized := config.get("quantization_config"):
        raise ValueError(f"quantization_config={quantized}: use weights in floating point")
    try:
        longest = config["n_positions" if kind == "gpt2" else "max_position_embeddings"]
        if seq_length is not None and seq_length > longest:
            raise ValueError(f"seq_length={seq_length} is more than the {longest} positions of this model: use fewer")
        return (_gpt2 if kind == "gpt2" else _llama)(config, seq_length or longest)
    except KeyError as error:
        raise ValueError(f"a config of model_type={kind!r} without {error}: it is damaged") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"a config of model_type={kind!r} has a value of the wrong type ({error})") from None


def _gpt2(config: Mapping[str, Any], seq_length: int) -> GPT:
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _only(config, **{name: (value, None) for name, value in fixed.items()})
    activation = config.get("activation_function", "gelu_new")
    _only({"activation_function": activation}, activation_function=tuple(ACTIVATIONS))
    sizes = [config[name] for name in ("n_layer", "n_embd")] + [seq_length] + [config["vocab_size"], config["n_head"]]
    options = dict(mlp=ACTIVATIONS[activation], norm_eps=config.get("layer_norm_epsilon", 1e-5))
    return GPT(*sizes, ffn_hidden_size=config.get("n_inner"), tied=config.get("tie_word_embeddings", True), **options)


def _llama(config: Mapping[str, Any], seq_length: int) -> GPT:
    h, heads = config["hidden_size"], config["num_attention_heads"]
    # transformers 5 writes rope_parameters, versions before rope_theta, and rope_scaling unless the type is default.
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope = {"rope_type": "default", **rope, **(config.get("rope_scaling") or {})}
    _only(rope, rope_type=("default",), type=(None, "default"), partial_rotary_factor=(None, 1.0))
    _only(config, hidden_act=("silu",), head_dim=(None, h // heads))
    bias = bool(config.get("attention_bias"))
    _only({"mlp_bias": bool(config.get("mlp_bias"))}, mlp_bias=(bias,))
    if (window := config.get("sliding_window")) is not None and window < seq_length:
        raise ValueError(
            f"sliding_window={window} is less than seq_length={seq_length}: use a seq_length up to {window}"
        )
    sizes = [config["num_hidden_layers"], h, seq_length, config["vocab_size"], heads]
    groups = config.get("num_key_value_heads") or heads
    form: dict[str, Any] = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=bias)
    form |= dict(norm_eps=config.get("rms_norm_eps", 1e-6), rotary_base=rope["rope_theta"])
    form |= dict(tied=config.get("tie_word_embeddings", False), ffn_hidden_size=config["intermediate_size"])
    if config["model_type"] == "mixtral":
        form |= dict(num_experts=config["num_local_experts"], top_k=config["num_experts_per_tok"])
        if form["top_k"] < 2:
            raise ValueError(f"num_experts_per_tok={form['top_k']} is not computed by labkit's model: use 2 or more")
    return GPT(*sizes, num_query_groups=None if groups == heads else groups, **form)


def _only(config: Mapping[str, Any], **known: tuple) -> None:
    """Raise a ValueError if an option has a value that labkit does not compute."""
    for name, values in known.items():
        if (value := config.get(name)) not in values:
            use = " or ".join(repr(each) for each in values if each is not None)
            raise ValueError(f"{name}={value!r} is not computed by labkit's model: use weights trained with {use}")


def config_of(shape: GPT, dtype: str) -> dict[str, Any]:
    """Return the config.json of a shape, with which transformers computes the same."""
    form, heads = form_of(shape), shape.num_attention_heads
    same: dict[str, Any] = {"model_type": form, "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied}
    same |= {"torch_dtype": dtype, "bos_token_id": None, "eos_token_id": None}  # else it takes tokens 1 and 2
    if form == "gpt2":
        activation = next(name for name, mlp in ACTIVATIONS.items() if mlp == shape.mlp)
        sizes = {"n_layer": shape.num_layers, "n_embd": shape.hidden_size, "n_positions": shape.seq_length}
        sizes |= {"n_head": heads, "n_inner": shape.mlp_width}
        how = {"activation_function": activation, "layer_norm_epsilon": shape.norm_eps}
        return {"architectures": ["GPT2LMHeadModel"], **same, **sizes, **how}
    sizes = {"num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden_size, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": shape.num_query_groups or heads, "intermediate_size": shape.expert_width}
    sizes |= {"max_position_embeddings": shape.seq_length}
    how = {"hidden_act": "silu", "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rotary_base}
    if form == "mixtral":
        how |= {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.top_k, "sliding_window": None}
    else:
        how |= {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    return {"architectures": [f"{form.capitalize()}ForCausalLM"], **same, **sizes, **how}


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return a folder's files of weights, each with the tensors that an index says it has."""
    if (folder / INDEX).exists():
        files: dict[Path, set[str]] = {}
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(
                f"{folder / INDEX} has weight_map={weight_map!r}, not a file for each tensor: it is damaged"
            )
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
        raise ValueError(
            f"{path} cannot be read ({why}): name a folder that transformers' save_pretrained wrote"
        ) from None
