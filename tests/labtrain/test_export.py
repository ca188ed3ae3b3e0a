"""What is exported is what was trained: transformers computes its logits, or labkit says by name why it cannot."""

import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy
import pytest
import tokenizers
import torch

from tests.support.of_transformers import in_float64, make_model  # isort: skip - before it, transformers goes online
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, MistralConfig, MixtralConfig

from labkit.groups import groups_of_one
from labkit.launch import World
from labkit.shape import GPT
from labtrain import TrainConfig, export, pretrained
from labtrain.hugging_face import CONFIG, config_of, shape_of
from labtrain.model import ParallelGPT
from labtrain.trainer import training

IDS = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(1))
OF_LLAMA = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
SHAPES = {  # and what is changed in each, field by field
    "gpt2": GPT(2, 32, 8, 29, num_attention_heads=4),
    "llama": GPT(2, 32, 8, 29, num_attention_heads=4, num_query_groups=2, **OF_LLAMA),
    "mixtral": GPT(2, 32, 8, 29, num_attention_heads=4, num_experts=4, **OF_LLAMA),
}
CHANGES = dict(num_layers=3, hidden_size=48, seq_length=9, vocab_size=31, num_attention_heads=2, num_query_groups=1)
CHANGES |= dict(ffn_hidden_size=20, norm_eps=0.25, rotary_base=500, num_experts=8, top_k=3, moe_layer_freq=2)
CHANGES |= dict(num_shared_experts=1, moe_ffn_hidden_size=12, router_scores="sigmoid")
OTHER = {True: False, False: True, "layernorm": "rmsnorm", "rmsnorm": "layernorm", "learned": "rope", "rope": "learned"}
OTHER |= {"gelu": "gelu_tanh", "swiglu": "gelu"}
NAMED = {  # what no model of transformers' has
    "gpt2": ["num_query_groups", "norm", "positions", "bias", "num_experts"],
    "llama": ["norm", "mlp", "positions"],
    "mixtral": ["norm", "mlp", "positions", "bias", "moe_layer_freq", "num_shared_experts", "router_scores"],
}


@pytest.fixture(scope="module")
def one_rank():
    with World(1) as world:
        yield world


def logits_of_folder(folder):
    model, about = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about.values())
    assert model.dtype == torch.float64
    with torch.no_grad():
        return in_float64(model)(IDS).logits


def logits_of(model):
    with torch.no_grad():
        return model(IDS)


OF_EXPERTS = ("num_shared_experts", "moe_ffn_hidden_size")  # refused without any
CASES = [
    (kind, field.name) for kind in SHAPES for field in fields(GPT) if kind == "mixtral" or field.name not in OF_EXPERTS
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_field_of_a_shape_goes_out_or_is_named(tmp_path, kind, name):
    """With the weights drawn larger than for training, so that each field shows in the logits."""
    value = CHANGES[name] if name in CHANGES else OTHER[getattr(SHAPES[kind], name)]
    shape = replace(SHAPES[kind], **{name: value})
    model = ParallelGPT(shape, groups_of_one().tp, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    if name in NAMED[kind]:
        with pytest.raises(
            ValueError, match=rf"{name}={value!r}.* is not the form of a model that transformers knows: "
        ):
            pretrained.save(tmp_path / "out", model, groups_of_one())
        assert not (tmp_path / "out").exists()
        return
    pretrained.save(tmp_path / "out", model, groups_of_one())
    torch.testing.assert_close(logits_of_folder(tmp_path / "out"), logits_of(model), rtol=1e-10, atol=1e-10)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["model_type"] == ("mixtral" if kind == "llama" and name == "num_experts" else kind)
    assert config_of(shape_of(config)) == config_of(shape)


def train_in(folder, **options):
    """On a rank: train in a working directory; return the logits of what was trained."""
    before = os.getcwd()
    os.chdir(folder)
    numbers = dict(steps=6, batch_size=4, seq_length=8, warmup_steps=1, learning_rate=0.01, precision="float64")
    try:
        with training(TrainConfig(checkpoint_dir="run", **numbers | options)) as trainer:
            for _ in trainer.steps():
                pass
            (model,) = trainer.models
            return logits_of(model.eval())
    finally:
        os.chdir(before)


SMALL = dict(num_layers=2, hidden_size=32, num_attention_heads=4, tokens="tokens.npy", vocab_size=29)
EXPERTS = OF_LLAMA | dict(num_experts=4)
RUNS = {  # options of a run that are no fields of the shape, and what the export says
    "with dropout": (dict(dropout=0.3), ""),
    "with experts": (  # and a capacity so large that in this run nothing is dropped
        EXPERTS | dict(aux_loss_coefficient=0.1, z_loss_coefficient=0.1, capacity_factor=4.0),
        ". With capacity_factor=4.0 tokens were dropped; transformers drops none",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_has_learned_goes_out(one_rank, tmp_path, name):
    options, said = RUNS[name]
    write_tokens(tmp_path)
    (logits,) = one_rank.run(train_in, str(tmp_path), **SMALL, **options)
    line = export.export(tmp_path / "run", tmp_path / "out")
    assert line.startswith(f"{tmp_path}/out: ")
    assert line.split("of step_00000006")[1] == said
    torch.testing.assert_close(logits_of_folder(tmp_path / "out"), logits, rtol=1e-10, atol=1e-10)


def write_tokens(folder):
    numpy.save(folder / "tokens.npy", numpy.random.default_rng(0).integers(29, size=400).astype(numpy.uint16))


def test_a_bias_that_is_the_same_for_all_experts_goes_out(tmp_path):
    """It changes no choice. Loading makes all of them zero: a folder has none."""
    shape = SHAPES["mixtral"]
    model = ParallelGPT(shape, groups_of_one().tp, dtype=torch.float64)
    for bias in model.buffers():
        bias.fill_(0.25)
    pretrained.save(tmp_path / "out", model, groups_of_one())
    torch.testing.assert_close(logits_of_folder(tmp_path / "out"), logits_of(model), rtol=1e-10, atol=1e-10)
    for bias in model.buffers():
        bias[0] = 0.5
    said = r"layers\.0\.mlp\.router\.expert_bias has values that differ by up to 0\.25.*aux_loss_coefficient in place"
    with pytest.raises(ValueError, match=said):
        pretrained.save(tmp_path / "other", model, groups_of_one())
    pretrained.load(tmp_path / "out", model, groups_of_one())
    assert not any(bias.any() for bias in model.buffers())


# -- a run that started from a folder ----------------------------------------------------------------------------------

OPTIONS = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8, vocab_size=29)
OPTIONS |= dict(max_position_embeddings=64, num_key_value_heads=4, eos_token_id=7, bos_token_id=3)
STARTS = {
    "mistral": MistralConfig(**OPTIONS, sliding_window=10, attention_dropout=0.25),
    "mixtral": MixtralConfig(**OPTIONS, sliding_window=10, num_local_experts=4),
    "gpt2": GPT2Config(n_embd=32, n_head=8, n_layer=2, vocab_size=29, n_positions=64, resid_pdrop=0.0, eos_token_id=7),
}
TEXT = "a b c dd"


def make_start(folder, kind, files="tokenizer.json"):
    make_model(STARTS[kind]).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(["?", "a", "b", "c", "d", "dd", *map(str, range(23))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("d", "d")], unk_token="?"))
    if files == "tokenizer.json":
        tokenizer.save(str(folder / files))
    elif files:
        tokenizer.model.save(str(folder))  # vocab.json and merges.txt, as GPT-2's
    (folder / "tokenizer").mkdir()  # not a file: it is not copied
    write_tokens(folder.parent)


@pytest.mark.parametrize("kind", STARTS)
def test_an_export_is_of_the_family_that_the_run_started_from(one_rank, tmp_path, monkeypatch, kind):
    """Also from another working directory: with its window, its longest sequence, its tokens and its tokenizer."""
    (tmp_path / "here").mkdir()
    make_start(tmp_path / "here" / "model", kind)
    options = dict(init_from="model", tokens="tokens.npy", vocab_size=29, steps=2)
    (logits,) = one_rank.run(train_in, str(tmp_path / "here"), **options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    start = str(tmp_path / "here" / "model")
    line = export.export("../here/run", "out")
    assert line.split("of step_00000002")[1] == (
        f". It has the 8 positions of the run, {start} has 64" if kind == "gpt2" else ""
    )
    torch.testing.assert_close(logits_of_folder("out"), logits, rtol=1e-10, atol=1e-10)
    before, after = (json.loads(Path(folder, CONFIG).read_text()) for folder in (start, "out"))
    same = ["model_type", "architectures", "eos_token_id", "bos_token_id", "tie_word_embeddings"]
    same += ["resid_pdrop"] if kind == "gpt2" else ["sliding_window", "max_position_embeddings", "attention_dropout"]
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert AutoTokenizer.from_pretrained("out")(TEXT) == AutoTokenizer.from_pretrained(start)(TEXT)


def test_an_export_says_what_it_has_not_found(one_rank, tmp_path):
    """The tokenizer's other form is copied too. Where another model has taken the folder's place, nothing is copied."""
    start = tmp_path / "model"
    make_start(start, "mistral", files="vocab.json")
    options = dict(init_from="model", tokens="tokens.npy", vocab_size=29, steps=2)
    (logits,) = one_rank.run(train_in, str(tmp_path), **options)

    def said_of(name):
        return export.export(tmp_path / "run", tmp_path / name).partition("step_00000002")[2]

    assert said_of("0") == ""
    assert (tmp_path / "0" / "vocab.json").read_text() == (start / "vocab.json").read_text()
    for path in (start / "vocab.json", start / "merges.txt"):
        path.unlink()
    assert said_of("1") == f". {start} has no tokenizer to copy"
    missing = f". Nothing is copied from init_from={start}, so there is no tokenizer and no end-of-text token"
    missing += f", and the longest sequence is the run's 8 tokens: {start} is "
    shutil.rmtree(start)
    assert said_of("2").startswith(f"{missing}not a folder here")
    make_start(start, "mixtral")
    assert said_of("3").startswith(f"{missing}of a different model: model_type is mixtral there")
    assert sorted(path.name for path in (tmp_path / "3").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "3" / CONFIG).read_text())
    assert (config["model_type"], config["max_position_embeddings"], config["eos_token_id"]) == ("llama", 8, None)
    torch.testing.assert_close(logits_of_folder(tmp_path / "3"), logits, rtol=1e-10, atol=1e-10)
