"""Folders in Hugging Face's format, as they are found: labkit's logits are transformers', or it says why not.

Each case changes a folder of a small model, and asks both. Where transformers makes up weights that it does not find,
labkit must refuse; where it loads the folder, labkit may refuse only for the reason that the case names.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.of_transformers import in_float64, make_model  # isort: skip - before it, transformers goes online
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from labkit.groups import groups_of_one
from labtrain import pretrained
from labtrain.hugging_face import CONFIG, FAMILIES, FOLLOWS, INDEX, WEIGHTS, shape_of
from labtrain.model import ParallelGPT

IDS = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(1))
ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=16, vocab_size=29)
LLAMA |= dict(max_position_embeddings=16, rope_parameters=ROPE, num_key_value_heads=8, rms_norm_eps=1e-3)
BASES = {
    "gpt2": dict(n_embd=32, n_head=8, n_layer=2, vocab_size=29, n_positions=16, layer_norm_epsilon=1e-3),
    "gpt2 not tied": dict(n_embd=32, n_head=8, n_layer=2, vocab_size=29, n_positions=16, tie_word_embeddings=False),
    "llama": LLAMA,
    "llama tied": LLAMA | dict(tie_word_embeddings=True),
    "llama of many kv heads": LLAMA | dict(num_key_value_heads=16),
    "mistral": LLAMA | dict(sliding_window=None),
    "mixtral": LLAMA | dict(num_experts_per_tok=3, num_local_experts=8),
}


def config_class(kind):
    return type(AutoConfig.for_model(kind))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model of transformers for each base, and its folder, in one file."""
    made = {}
    for name, options in BASES.items():
        model, folder = make_model(config_class(name.split()[0])(**options)), tmp_path_factory.mktemp("base") / "model"
        model.save_pretrained(folder)
        made[name] = model, folder
    return made


@pytest.fixture
def copied(bases, tmp_path):
    """Copies the folder of a base."""

    def copy(name):
        return shutil.copytree(bases[name][1], tmp_path / "model")

    return copy


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def of_transformers(folder):
    """The model of transformers; None if it refuses the folder, or makes up weights that it does not find."""
    try:
        model, about = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    except Exception:  # of many kinds
        return None
    return None if about["missing_keys"] or about["mismatched_keys"] else in_float64(model)


def of_labkit(folder):
    shape = pretrained.read_shape(folder, IDS.size(1))
    pretrained.check(folder, shape)  # before a model of whatever size is made
    model = ParallelGPT(shape, groups_of_one().tp, dtype=torch.float64)
    pretrained.load(folder, model, groups_of_one())
    with torch.no_grad():
        return model(IDS)


def compare(folder, refusal=None):
    """Hold labkit against transformers; ``refusal`` is what labkit must say, if it refuses a folder."""
    if refusal is None:
        model = of_transformers(folder)
        assert model is not None, "transformers does not load this"
        torch.testing.assert_close(of_labkit(folder), logits_of(model), rtol=1e-9, atol=1e-9)
        return
    with pytest.raises(ValueError, match=refusal) as raised:
        of_labkit(folder)
    assert str(raised.value).count(str(folder)) == 1, "the path is said once"


def edit(folder, **changes):
    """Change options in config.json; ... takes one away."""
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_left_out_has_the_default_of_transformers_class(kind):
    theirs, family = config_class(kind)(), FAMILIES[kind]
    expected = {name: getattr(theirs, name, None) for name in (*family.options, *family.known)}
    if family.form["positions"] == "rope":
        expected["rope_theta"] = theirs.rope_parameters["rope_theta"]
    if kind == "llama":
        expected["num_key_value_heads"] = None  # which has become the number of heads
    assert {name: default for name, (_, default) in family.options.items()} | {
        name: right[0] for name, right in family.known.items()
    } == expected
    assert family.aliases.items() <= theirs.attribute_map.items()
    assert (theirs.attribute_map.keys() - family.aliases.keys()) <= {"num_attention_heads"}
    if family.window:
        assert family.window == (theirs.sliding_window,)


@pytest.mark.parametrize("kind", FAMILIES)
def test_null_is_refused_where_transformers_refuses_it(kind):
    theirs, config = config_class(kind), config_class(kind)().to_dict()
    for name in (*FAMILIES[kind].options, *FAMILIES[kind].known):
        try:
            theirs(**{name: None})
            is_refused = name == "rope_theta"  # later, when it is computed with
        except StrictDataclassFieldValidationError:
            is_refused = name not in FOLLOWS  # which earlier versions read
        outside = {"rope_parameters": None} if name == "rope_theta" else {}
        if is_refused:
            with pytest.raises(ValueError, match=rf"{name} is null|{name}=None is not computed"):
                shape_of(config | outside | {name: None}, 12)
        else:
            shape_of(config | {name: None}, 12)


READ = [  # a base, and what its config.json has instead: as transformers reads it
    "llama: hidden_act='swish'",
    "llama: sliding_window=4, use_sliding_window=False",  # Llama's attention has no window
    "llama: pretraining_tp=2, attention_dropout=0.5, use_cache=False, torch_dtype='float16'",
    "llama: head_dim=2",
    "llama: head_dim=None",
    "llama: architectures=['LlamaForSequenceClassification']",
    "llama: architectures=...",
    "llama: rope_scaling={}",
    "llama: rope_scaling={'type': 'default'}",  # with the default base: it replaces rope_parameters
    "llama: rope_scaling={'rope_type': 'default'}, rope_theta=70.0",
    "llama: rope_scaling={'rope_theta': 90}, rope_theta=70.0",
    "llama: rope_parameters={'rope_type': 'default', 'type': 'linear', 'rope_theta': 80.0}",
    "llama: rope_parameters=None, rope_theta=70",
    "llama: rope_parameters=ROPE | {'factor': 8.0}",
    "llama: partial_rotary_factor=0.5",  # which Llama does not look at
    "llama of many kv heads: num_key_value_heads=...",
    "llama of many kv heads: num_key_value_heads=None",
    "llama: rms_norm_eps=..., hidden_act=..., rope_parameters=...",  # then transformers' default counts
    "gpt2: layer_norm_epsilon=..., activation_function=..., tie_word_embeddings=...",
    "mixtral: num_local_experts=..., num_experts_per_tok=...",
    "mistral: sliding_window=...",
    "mistral: sliding_window=12",
    "mistral: attention_bias=True, mlp_bias=True",  # Mistral does not look at them
    "mixtral: num_local_experts=..., num_experts=8",
    "mixtral: output_router_logits=True, router_jitter_noise=0.5, router_aux_loss_coef=0.1",
    "gpt2: n_layer=..., num_hidden_layers=2, n_embd=5, hidden_size=32",  # the other name counts
    "gpt2: n_ctx=5, resid_pdrop=0.5, summary_type='first'",
    "gpt2: n_inner=128",
    "gpt2: reorder_and_upcast_attn=True",
    *(f"gpt2: activation_function={name!r}" for name in FAMILIES["gpt2"].known["activation_function"]),
]
REFUSED = {
    "llama: hidden_size=...": r"leaves out hidden_size \(.* by default\)",  # the weights are not of that size
    "gpt2: n_layer=...": r"leaves out n_layer \(.* by default\)",
    "llama: hidden_act='gelu'": "hidden_act='gelu' is not computed by labtrain's model",
    "llama: head_dim=4": "head_dim=4 is not hidden_size=32 / num_attention_heads=16, the only one that",
    "llama: attention_bias=True": "mlp_bias=False is not computed by labtrain's model",
    "llama: num_key_value_heads=5": "num_key_value_heads=5 does not divide num_attention_heads=16$",
    "llama: num_attention_heads=32, head_dim=...": "describes no model: .* a head has 1$",
    "llama: hidden_size=33, head_dim=2": "num_attention_heads=16 does not divide hidden_size=33$",
    "llama: num_hidden_layers=0": "num_hidden_layers=0 must be at least 1",
    "llama: num_hidden_layers=1": "has model.layers.1.*, which such a model has no use for",
    "llama: num_hidden_layers=3": "has no model.layers.2",
    "llama: hidden_size='wide'": "has a value of the wrong type",
    "llama: model_type=...": "model_type='None' is an architecture that labtrain does not have",
    "llama: model_type='qwen2'": "model_type='qwen2' is an architecture that labtrain does not have",
    "llama: quantization_config={'bits': 4}": "quantization_config={'bits': 4}",
    "llama: transformers_weights='x.safetensors'": "transformers_weights='x.safetensors'",
    "llama: rope_parameters={'rope_theta': None}": "rope_theta is null",
    "llama: rope_parameters={'full_attention': ROPE}": "rope_parameters that full_attention has of its own",
    "llama: rope_scaling='linear'": "has a value of the wrong type",
    "llama: rope_scaling={'type': 'linear', 'factor': 2.0}": "rope_type='linear' is not computed",
    "llama: rope_scaling={'type': 'dynamic', 'factor': 2.0}": "rope_type='dynamic' is not computed",
    "llama: rope_scaling={'rope_type': 'yarn', 'factor': 2.0}": "rope_type='yarn' is not computed",
    "llama: rope_scaling={'rope_type': 'llama3', 'factor': 8.0}": "rope_type='llama3' is not computed",
    "mistral: sliding_window=11": "sliding_window=11 is less than seq_length=12: use a seq_length up to 11$",
    "mistral: sliding_window=0": "sliding_window=0 is less than seq_length=12: no model can be trained",
    "mistral: sliding_window='4'": "has a value of the wrong type",
    "mixtral: sliding_window=4": "sliding_window=4 is less than seq_length=12: use a seq_length up to 4$",
    "mixtral: num_experts=4": "has model.layers.0.block_sparse_moe.experts.4",
    "mixtral: num_experts_per_tok=1": "num_experts_per_tok=1 is not computed by labtrain's model",
    "mixtral: num_experts_per_tok=9": "num_experts_per_tok=9 must be at most num_local_experts=8$",
    "gpt2: n_inner=64": r"c_fc\.bias is \[128\] in .*, but by config.json it must be \[64\]$",
    "gpt2: scale_attn_weights=False": "scale_attn_weights=False is not computed",
    "gpt2: scale_attn_by_inverse_layer_idx=True": "scale_attn_by_inverse_layer_idx=True is not computed",
    "gpt2: add_cross_attention=True": "add_cross_attention=True is not computed",
    "gpt2: activation_function='relu'": "activation_function='relu' is not computed by labtrain's model",
    "gpt2: activation_function='quick_gelu'": "activation_function='quick_gelu' is not computed",
}


@pytest.mark.parametrize("found", [*READ, *REFUSED])
def test_options_as_they_are_found(copied, found):
    base, _, changes = found.partition(": ")
    folder = copied(base)
    edit(folder, **eval(f"dict({changes})", {"ROPE": ROPE}))
    compare(folder, REFUSED.get(found))


# -- files of weights --------------------------------------------------------------------------------------------------


def sharded(folder):
    """Write a whole model's weights anew, as several files."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).save_pretrained(folder, max_shard_size="20KB")
    (folder / WEIGHTS).unlink()
    assert len(list(folder.glob("*.safetensors"))) > 2


def of_another(folder, **how):
    """Save a different model over what is there."""
    make_model(AutoConfig.from_pretrained(folder), seed=1).save_pretrained(folder, **how)


def change(folder, how, file=WEIGHTS):
    """Change a file's tensors."""
    tensors = load_file(folder / file)
    how(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def change_index(folder, how):
    index = json.loads((folder / INDEX).read_text())
    how(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def first_file(folder):
    return sorted(folder.glob("model-*.safetensors"))[0]


def sharded_then_whole(folder):
    sharded(folder)
    of_another(folder)
    assert (folder / INDEX).exists()


def whole_then_sharded(folder):
    of_another(folder, max_shard_size="20KB")
    assert (folder / WEIGHTS).exists() and (folder / INDEX).exists()


def in_a_folder_below(folder):
    sharded(folder)
    (folder / "parts").mkdir()
    for path in folder.glob("model-*.safetensors"):
        path.rename(folder / "parts" / path.name)
    change_index(folder, lambda weight_map: weight_map.update({k: f"parts/{v}" for k, v in weight_map.items()}))


def in_two_files(folder, name):
    """The first file has the norm too, with other values; by ``name`` the index says in which file it is."""
    sharded(folder)
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.full([32], 7.0)}), first_file(folder))
    change_index(folder, lambda weight_map: weight_map.update({name: first_file(folder).name}))
    change_index(folder, reverse)


def reverse(weight_map):
    """Name the last file first."""
    items = sorted(weight_map.items(), key=lambda item: item[1], reverse=True)
    weight_map.clear()
    weight_map.update(items)


def indexed_wrongly(folder):
    sharded(folder)
    change_index(folder, lambda weight_map: weight_map.update(head=weight_map.pop("lm_head.weight")))


def not_indexed(folder):
    sharded(folder)
    shutil.copy(first_file(folder), folder / "model-00009-of-00009.safetensors")
    change(folder, lambda tensors: [x.mul_(2) for x in tensors.values()], "model-00009-of-00009.safetensors")


def outside(folder, name):
    sharded(folder)
    change_index(folder, lambda weight_map: weight_map.update({"lm_head.weight": name}))


def without_index(folder):
    sharded(folder)
    (folder / INDEX).unlink()


def without_a_file(folder):
    sharded(folder)
    first_file(folder).unlink()


def without_output_layer(folder):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).base_model.save_pretrained(folder)


def as_in_memory(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.save_pretrained(folder, save_original_format=False)


def in_half_precision(folder):
    change(folder, lambda tensors: tensors.update({name: x.half() for name, x in tensors.items()}))


def head(folder, factor, embedding="model.embed_tokens.weight", file=WEIGHTS):
    """The output layer's weight beside the embedding's that it is said to be."""
    weight = load_file(folder / WEIGHTS)[embedding].clone()
    weight[-1] *= factor
    if file == WEIGHTS:
        change(folder, lambda tensors: tensors.update({"lm_head.weight": weight}))
        return
    save_file({"lm_head.weight": weight}, folder / file, {"format": "pt"})
    (folder / WEIGHTS).rename(folder / "z.safetensors")
    weight_map = {"lm_head.weight": file, **dict.fromkeys(load_file(folder / "z.safetensors"), "z.safetensors")}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def only_head(folder, embedding="model.embed_tokens.weight"):
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(embedding)}))


def removed(folder, name):
    change(folder, lambda tensors: tensors.pop(name))


def added(folder, name, values):
    change(folder, lambda tensors: tensors.update({name: values}))


def truncated(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replaced_by_a_folder(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
OF_GPT2 = "transformer.wte.weight"
FILES = {  # what was done to the folder of a base, and what labkit says, if it refuses
    "llama: sharded(folder)": None,
    "mixtral: sharded(folder)": None,
    "llama: sharded_then_whole(folder)": None,
    "llama tied: sharded_then_whole(folder)": None,
    "llama: whole_then_sharded(folder)": None,  # transformers loads the old file that it left there
    "llama: in_a_folder_below(folder)": None,
    "llama: in_two_files(folder, NORM)": None,
    "llama: in_two_files(folder, 'something')": None,
    "llama: indexed_wrongly(folder)": None,
    "llama: not_indexed(folder)": None,
    "llama: outside(folder, '../x.safetensors')": r"names \.\./x\.safetensors: files must lie in the",
    "llama: outside(folder, '/x.safetensors')": r"names /x\.safetensors: files must lie in the folder",
    "llama: outside(folder, 3)": "names 3, which is not there: download it",
    "llama: without_index(folder)": "has no weights: it needs model.safetensors",
    "llama: without_a_file(folder)": "names model-00001-of-.*, which is not there: download it",
    "llama: (sharded(folder), (folder / INDEX).write_text('{\"weight_map\": 3}'))": "weight_map",
    "llama: truncated(folder)": "is damaged or incomplete",
    "llama: replaced_by_a_folder(folder)": r"safetensors cannot be read \(.+\): name a folder of files",
    "llama: shutil.rmtree(folder)": "is not a folder here, and labtrain downloads nothing: name a folder that transf",
    "llama: (folder / CONFIG).unlink()": r"config\.json cannot be read \(No such file",
    "llama: (folder / CONFIG).write_text('{')": r"config\.json cannot be read \(Expecting",
    "llama: (folder / CONFIG).write_text('[1]')": r"config\.json cannot be read",
    "llama: pickled(folder)": "is pickled, and loading it would run whatever code",
    # Which transformers adds where peft is
    "llama: (folder / 'adapter_config.json').write_text('{}')": "adapter_config.json belongs to an adapter",
    "gpt2: without_output_layer(folder)": None,
    "llama tied: without_output_layer(folder)": None,
    "llama: without_output_layer(folder)": r"has no lm_head\.weight \(1 tensors are missing\): it is incomplete$",
    "mixtral: as_in_memory(folder)": r"experts are those of transformers' memory.*save_original_format=True",
    "llama: in_half_precision(folder)": None,
    "llama: added(folder, HEAD, torch.ones(29, 32).bfloat16())": None,
    "llama: added(folder, NORM, torch.ones(32, dtype=torch.int8))": "norm.weight is I8 in .*: use weights in",
    "llama: added(folder, 'model.layers.0.self_attn.rotary_emb.inv_freq', torch.ones(1))": None,
    "gpt2: added(folder, 'transformer.h.0.attn.bias', torch.ones(1, 1, 16, 16))": None,
    "gpt2: added(folder, 'transformer.h.0.attn.masked_bias', torch.tensor(-1e4))": None,
    "llama: added(folder, 'model.layers.0.self_attn.q_proj.bias', torch.ones(32))": "q_proj.bias, which such a model",
    "llama: added(folder, NORM, torch.ones(31))": r"norm\.weight is \[31\] in .*, but by config.* \[32\]$",
    "llama: removed(folder, NORM)": r"has no model.norm.weight \(1 tensors are missing\): it is incomplete$",
    "llama tied: head(folder, 1)": None,
    "llama tied: head(folder, 2)": None,
    "llama tied: head(folder, 2, file='a.safetensors')": None,
    "llama tied: head(folder, 1, file='a.safetensors')": None,
    "llama tied: only_head(folder)": None,
    "llama tied: added(folder, HEAD, torch.ones(30, 32))": r"lm_head\.weight is \[30, 32\] in .*must be \[29, 32\]$",
    "llama tied: removed(folder, EMBEDDING)": r"has no model\.embed_tokens\.weight",
    "gpt2: head(folder, 1, OF_GPT2)": None,
    "gpt2: head(folder, 2, OF_GPT2)": None,
    "gpt2: only_head(folder, OF_GPT2)": None,
    "gpt2 not tied: None": None,
    "gpt2 not tied: removed(folder, HEAD)": r"has no lm_head\.weight",
    "gpt2 not tied: without_output_layer(folder)": r"has no lm_head\.weight",
}


@pytest.mark.parametrize("found", FILES)
def test_files_as_they_are_found(copied, found):
    base, _, done = found.partition(": ")
    folder = copied(base)
    eval(done, globals() | {"folder": folder})
    compare(folder, FILES[found])
