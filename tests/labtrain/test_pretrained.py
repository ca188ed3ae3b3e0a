"""Weights in Hugging Face's format, in and out, held against transformers: small random models that it makes itself."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.support.of_transformers import in_float64, make_model  # isort: skip - before it, transformers goes online
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig

from labkit.context_parallel import positions
from labkit.data_parallel import FullyShardedDataParallel
from labkit.data_parallel.replicas import like
from labkit.groups import groups_of_one, init_groups
from labkit.launch import World
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import TrainConfig, export, pretrained, train
from labtrain.__main__ import main
from labtrain.generation import choose_word, generate
from labtrain.hugging_face import INDEX, config_of, shape_of
from labtrain.model import ParallelGPT

LLAMA = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8, vocab_size=29)
LLAMA |= dict(max_position_embeddings=16, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
GPT2 = dict(n_embd=32, n_head=8, n_layer=2, vocab_size=29, n_positions=16)
CONFIGS = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, not tied": GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=40, layer_norm_epsilon=1e-3
    ),
    "llama": LlamaConfig(**LLAMA, num_key_value_heads=4, rms_norm_eps=1e-3),
    "llama, tied": LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**LLAMA, num_key_value_heads=4, sliding_window=16),
    "mixtral": MixtralConfig(**LLAMA, num_key_value_heads=4, num_local_experts=4, sliding_window=None),
}
IDS = torch.randint(29, (2, 16), generator=torch.Generator().manual_seed(1))
LAYOUTS = [  # of four ranks: t, c, p, and the ZeRO stage over what is left
    (2, 1, 2, 0),
    (4, 1, 1, 3),
    (2, 2, 1, 3),
    (1, 2, 2, 3),
]
OF_EXPERTS = {"ep_size": 2, "expert_tp_size": 1}  # beside pp_size=2


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Each model of transformers, saved by it in several files, and its folder."""
    made = {}
    for name, config in CONFIGS.items():
        model, folder = make_model(config), tmp_path_factory.mktemp("theirs") / "model"
        model.save_pretrained(folder, max_shard_size="60KB")
        assert (folder / INDEX).exists()
        made[name] = model, folder
    return made


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def four():
    with World(4) as world:
        yield world


def all_tensors(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def stages_of(shape, groups, zero_stage, **options):
    """This rank's stage, from weights that are drawn, and what computes with it."""
    place = {"stage": groups.coords.pp, "num_stages": groups.layout.pp_size, "cp_group": groups.cp}
    place |= {"experts": {"groups": groups}}
    device = "meta" if zero_stage else "cpu"
    model = ParallelGPT(shape, groups.tp, **place, dtype=torch.float64, device=device, seed=7, **options)
    return model, FullyShardedDataParallel(model, groups.shard, units=model.units) if zero_stage else model


def logits_on_ranks(folders, out):
    """Load, compute and save in each layout; return the logits of the whole sequence, on the ranks that have them."""
    results = {}
    for name, folder in folders.items():
        shape = pretrained.read_shape(folder)
        for number, (t, c, p, zero_stage) in enumerate(
            LAYOUTS if name in ("gpt2", "llama", "mixtral") else LAYOUTS[:1]
        ):
            layout = dict(tp_size=t, cp_size=c, pp_size=p) | (OF_EXPERTS if shape.num_experts else {})
            with init_groups(ParallelLayout(4, **layout)) as groups:
                model, wrapped = stages_of(shape, groups, zero_stage, sequence_parallel=t > 1)
                pretrained.load(folder, model, groups)
                held = positions(16, c, groups.cp.rank(), True)
                hidden = [len(IDS), len(held) // t, shape.hidden_size]
                x = IDS[:, held] if model.is_first else torch.empty(hidden, dtype=torch.float64)
                if not model.is_first:
                    dist.recv(x, group=groups.pp, group_src=groups.coords.pp - 1)
                with torch.no_grad():
                    x = wrapped(x)
                if not model.is_last:
                    dist.send(x, group=groups.pp, group_dst=groups.coords.pp + 1)
                else:
                    parts = [torch.empty_like(x) for _ in range(t)]
                    dist.all_gather(parts, x.contiguous(), group=groups.tp)
                    results[name, number] = held, torch.cat(parts, -1)[..., : shape.vocab_size]
                pretrained.save(f"{out}/{name} {number}", model, groups, max_file_bytes=60_000)
    return results


def test_every_layout_has_the_logits_of_transformers_and_writes_the_same_bits(theirs, four, tmp_path):
    folders = {name: str(folder) for name, (_, folder) in theirs.items()}
    for results in four.run(logits_on_ranks, folders, str(tmp_path)):
        for (name, number), (held, logits) in results.items():
            expected = logits_of(theirs[name][0])[:, held]
            text = f"{name}, {LAYOUTS[number]}: "
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10, msg=lambda m, t=text: t + m)
    for name, (_, folder) in theirs.items():
        expected = all_tensors(folder)
        for folder in tmp_path.glob(f"{name} ?"):
            written = all_tensors(folder)
            assert written.keys() == expected.keys()
            assert all(torch.equal(written[key].view(torch.int64), x.view(torch.int64)) for key, x in expected.items())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} 0")
        assert model.dtype == torch.float64
        torch.testing.assert_close(logits_of(in_float64(model)), logits_of(theirs[name][0]), rtol=0, atol=0)


def trained(folder, config, steps):
    """The losses of transformers' own model on the same data, with the same optimizer, and its weights."""
    model = in_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    text = config.make_dataset()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
    for step in range(steps):
        first = step * config.batch_size
        rows = [torch.from_numpy(text.sample(first + row, config.seq_length + 1)) for row in range(config.batch_size)]
        tokens = torch.stack(rows)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt2", dict(tp_size=2, zero_stage=1)), ("llama", dict(tp_size=2, pp_size=2, sequence_parallel=True))],
)
def test_three_steps_from_loaded_weights_are_those_of_transformers(theirs, four, tmp_path, name, sizes):
    """With fewer positions than the model has; what is trained is exported, and is what transformers has then."""
    folder = theirs[name][1]
    numbers = dict(
        text="invented", steps=3, batch_size=8, micro_batch_size=2, seq_length=8, warmup_steps=1, precision="float64"
    )
    config = TrainConfig(init_from=str(folder), checkpoint_dir=str(tmp_path / "run"), **numbers, **sizes)
    losses, weights = trained(folder, config, 3)
    assert [step.loss for step in four.run(train, config)[0]] == pytest.approx(losses, rel=1e-10, abs=0)
    (folder / "tokenizer.json").write_text("{}")
    assert export.main(str(tmp_path / "run"), str(tmp_path / "out")) == 0
    (folder / "tokenizer.json").unlink()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert written.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(written[key], weight[: len(written[key])], rtol=1e-10, atol=1e-10)


def texts_on_ranks(folder, start, cases):
    """What each case writes in layouts of four ranks, the same on all."""
    texts, shape = {}, pretrained.read_shape(folder)
    for t, c, p, zero_stage in [(4, 1, 1, 0), (2, 1, 2, 0), (2, 1, 1, 3), (1, 1, 1, 0)]:
        layout = dict(tp_size=t, cp_size=c, pp_size=p) | (OF_EXPERTS if shape.num_experts else {})
        with init_groups(ParallelLayout(4, **layout)) as groups:  # without sequence_parallel one of t routes the token
            model, wrapped = stages_of(shape, groups, zero_stage, sequence_parallel=t > p)
            pretrained.load(folder, model, groups)
            for number, options in enumerate(cases):
                texts[t, p, number] = generate(wrapped, start, groups, 11, **options)
            assert wrapped.training
    return texts


def test_a_token_is_computed_once():
    """And the model is what it was: logits of whole sequences afterwards, with gradients."""
    model = ParallelGPT(GPT(2, 8, 16, 29, num_attention_heads=2), groups_of_one().tp, dtype=torch.float64)
    before, computed = model(IDS), []
    hook = model.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0]))
    text = generate(model, IDS[:, :3], groups_of_one(), 5, temperature=0, seed=0)
    hook.remove()
    assert torch.equal(torch.cat(computed, 1), text[:, :-1])
    assert torch.equal(model(IDS), before) and model(IDS).requires_grad


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_every_layout_writes_the_same_text(theirs, four, name):
    """Up to the longest. Without temperature, the one that transformers writes."""
    model, folder = theirs[name]
    cases = [dict(temperature=0, seed=0), dict(temperature=1.3, seed=3), dict(temperature=2.0, top_k=3, seed=3)]
    start = IDS[:, :5]
    by_rank = four.run(texts_on_ranks, str(folder), start, cases)
    first = by_rank[0]
    for texts in by_rank:
        for (t, p, number), text in texts.items():
            assert torch.equal(text, first[1, 1, number]), (t, p, cases[number])
    greedy, free, of_three = (first[1, 1, number] for number in range(3))
    options = dict(max_new_tokens=11, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(greedy, model.generate(start, **options))
    assert not torch.equal(free, greedy) and not torch.equal(free[0], free[1])
    with torch.no_grad():
        logits = model(of_three).logits[:, 4:-1]
    ranks = (logits > logits.gather(-1, of_three[:, 5:, None])).sum(-1)
    assert ranks.max() == 2, "none of the words was the third best of three"


def test_words_are_drawn_as_often_as_they_are_probable():
    """A hundred thousand rows of the same logits: chi-square of the counts, and of the best three only."""
    shape = GPT(1, 8, 4, 7, num_attention_heads=2)
    model, rows = ParallelGPT(shape, groups_of_one().tp), 100_000
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0, 0.0, -0.5, 1.5], dtype=torch.float64)
    for top_k in (None, 3):
        kept = logits if top_k is None else logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
        expected = rows * (kept / 1.5).softmax(0)
        words = choose_word(logits.expand(rows, -1), model, 1.5, top_k, seed=1)
        counts = words.bincount(minlength=7)
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        assert ((counts - expected) ** 2 / expected)[possible].sum() < 25  # 6 degrees of freedom: once in 3,000 seeds


def test_what_cannot_be_generated_is_refused():
    model, groups, start = ParallelGPT(GPT(1, 8, 4, 7, num_attention_heads=2), groups_of_one().tp), groups_of_one(), IDS
    for options, text in [
        (dict(num_tokens=1), r"16 tokens and num_tokens=1 more are above seq_length=4"),
        (dict(num_tokens=0), "num_tokens=0 must be at least 1"),
        (dict(num_tokens=1, temperature=-1), "temperature=-1 must be a number from 0 to 1000"),
        (dict(num_tokens=1, top_k=8), "top_k=8 is more than vocab_size=7"),
    ]:
        with pytest.raises(ValueError, match=text):
            generate(model, start, groups, **{"temperature": 1.0, "seed": 0} | options)


# -- what is wrong with a folder ---------------------------------------------------------------------------------------


def edited(folder, **changes):
    """Changes options in a config.json; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewritten(folder, change):
    """Writes all weights anew, in one file, after a change of them."""
    tensors = all_tensors(folder)
    for path in folder.glob("model*"):
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def halved(folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replaced_by_a_folder(folder):
    path = next(folder.glob("*.safetensors"))
    path.unlink()
    path.mkdir()


NORM = "model.layers.1.input_layernorm.weight"
FAULTS = {
    "architecture": (
        lambda f: edited(f, model_type="bert"),
        "model_type='bert' is an architecture that labtrain does not",
    ),
    "option": (lambda f: edited(f, hidden_act="relu"), "hidden_act='relu' is not computed by labtrain's model"),
    "no folder": (shutil.rmtree, r"is not a folder here, and labtrain downloads nothing: name a folder that transf"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read \(No such file"),
    "no json": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read \(Expecting"),
    "a list": (lambda f: (f / "config.json").write_text("[1]"), r"config\.json cannot be read"),
    "missing": (lambda f: rewritten(f, lambda x: x.pop(NORM)), rf"has no {NORM} \(1 tensors are missing\)"),
    "truncated": (halved, "is damaged or incomplete"),
    "a folder": (replaced_by_a_folder, r"safetensors cannot be read \(.+\): name a folder of files"),
    "no file": (lambda f: next(f.glob("*.safetensors")).unlink(), r"index\.json names model-0.*, which is not there"),
    "index of nothing": (lambda f: (f / INDEX).write_text('{"weight_map": 3}'), "weight_map"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_folder_is_refused_before_a_run_starts(theirs, tmp_path, name):
    spoil, text = FAULTS[name]
    folder = tmp_path / "model"
    shutil.copytree(theirs["llama"][1], folder)
    TrainConfig(init_from=str(folder), seq_length=8, text="invented")
    spoil(folder)
    with pytest.raises(ValueError, match=text):
        TrainConfig(init_from=str(folder), seq_length=8, text="invented")


def load_faulty(folder, shape):
    """On ranks: what each says when the folder has become faulty, and whether its weights are as they were."""
    with init_groups(ParallelLayout(4, tp_size=2)) as groups:
        model = ParallelGPT(shape, groups.tp, dtype=torch.float64)
        before = [parameter.clone() for parameter in model.parameters()]
        try:
            pretrained.load(folder, model, groups)
        except ValueError as error:
            return str(error), all(map(torch.equal, before, model.parameters()))


def test_nothing_is_half_loaded(theirs, four, tmp_path):
    shutil.copytree(theirs["llama"][1], tmp_path / "model")
    shape = pretrained.read_shape(tmp_path / "model")
    sorted((tmp_path / "model").glob("*.safetensors"))[-1].unlink()
    results = four.run(load_faulty, str(tmp_path / "model"), shape)
    assert len(set(results)) == 1
    assert "which is not there" in results[0][0] and results[0][1]
    results = four.run(load_faulty, str(theirs["llama"][1]), replace(shape, norm_eps=1e-5))
    assert "is of a different model: rms_norm_eps is 0.001 there and 1e-05 here" in results[0][0] and results[0][1]


def test_the_commands_of_readme(theirs, tmp_path, monkeypatch, capsys):
    """In this process: with what it exports the next run starts; a checkpoint that is resumed has the last word."""
    start, run = str(theirs["llama, tied"][1]), str(tmp_path / "run")
    options = ["--seq-length", "8", "--batch-size", "4", "--precision", "float64", "--text", "invented"]
    options += ["--checkpoint-dir", run]

    def command(*more):
        monkeypatch.setattr(sys, "argv", ["labtrain", *options, *more])
        code = main()
        return code, *capsys.readouterr()

    code, out, error = command("--init-from", start, "--steps", "1")
    assert code == 0, error
    assert f"parameters in float64, weights from {start}; " in out
    code, out, error = command("--init-from", start, "--steps", "2", "--resume")
    assert code == 0 and "Resuming after step 1, from step_00000001" in out, error
    assert export.main(run, str(tmp_path / "out")) == 0
    assert "of step_00000002" in capsys.readouterr().out
    options[-1] = str(tmp_path / "again")
    code, out, error = command("--init-from", str(tmp_path / "out"), "--steps", "1")
    assert code == 0, error
    code, _, error = command("--init-from", start, "--steps", "1", "--num-layers", "3")
    assert code == 2 and "--num-layers 3 contradicts --init-from " in re.sub(r"\s+", " ", error)
    assert export.main(run) == 2
    assert export.main(run, str(tmp_path / "out")) == 2
    assert f"{tmp_path}/out exists: name a new folder" in capsys.readouterr().err
    damaged = next((tmp_path / "run" / "step_00000002").glob("*.distcp"))
    damaged.write_bytes(b"0" + damaged.read_bytes()[1:])
    assert export.main(run, str(tmp_path / "other")) == 2
    assert "has changed since it was written" in capsys.readouterr().err
    assert export.main(str(tmp_path), str(tmp_path / "other")) == 2
    assert not (tmp_path / "other").exists()


def test_options_that_contradict_the_folder_are_refused(theirs):
    folder = str(theirs["gpt2"][1])
    given = dict(init_from=folder, seq_length=8, text="invented")
    config = TrainConfig(**given, num_layers=4, tp_size=2)  # 4 is the default
    assert config.shape == replace(pretrained.read_shape(folder), seq_length=8)
    assert replace(config, steps=3).shape == config.shape
    for options, text in [
        (dict(num_layers=3), "num_layers=3 contradicts init_from=.*, which has 2: leave it out"),
        (dict(vocab_size=30), "vocab_size=30 contradicts init_from=.*, which has 29"),
        (dict(mlp="swiglu"), "mlp='swiglu' contradicts init_from"),
        (dict(seq_length=17), "seq_length=17 is more than the 16 positions of this model"),
        (dict(text=None), "init_from=.* has nothing to learn: name a text, or a file of tokens"),
        (dict(tp_size=3), "tp_size=3 does not divide num_attention_heads=8: use tp_size 1, 2, 4 or 8$"),
        (dict(pp_size=4), "= 4 stages for num_layers=2: use fewer stages$"),
    ]:
        with pytest.raises(ValueError, match=text):
            TrainConfig(**given | options)
    assert TrainConfig(**given | dict(text=None, check=8)).shape == config.shape  # it trains nothing


def test_a_text_is_made_into_tokens_by_the_folder_s_tokenizer(theirs, tmp_path):
    """Whose words are numbered from 0; one that it does not know is the last."""
    shutil.copytree(theirs["gpt2"][1], tmp_path / "model")
    words = [f"w{number}" for number in range(28)]
    (tmp_path / "text").write_text(" ".join([*words, "not-known"] * 4))
    config = dict(init_from=str(tmp_path / "model"), text=str(tmp_path / "text"), seq_length=8)
    vocabulary = {word: number for number, word in enumerate([*words, "?"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    sample = TrainConfig(**config).make_dataset().sample(0, 40)
    assert list(sample) == [(sample[0] + i) % 29 for i in range(40)]
    missing = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 29}, unk_token="?"))
    missing.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"token 0 of .*text is 29 by .*tokenizer\.json, and vocab_size=29: use the m"):
        TrainConfig(**config)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        TrainConfig(**config)


def test_what_older_versions_and_plain_models_wrote_loads(theirs, tmp_path):
    """A GPT2Model without an output layer, with masks as old files have; rope_theta outside rope_parameters."""
    model, folder = theirs["gpt2"]
    model.transformer.save_pretrained(tmp_path / "plain")
    rewritten(tmp_path / "plain", lambda x: x.update({"h.0.attn.bias": torch.ones(1, 1, 16, 16)}))
    mine = ParallelGPT(pretrained.read_shape(folder), groups_of_one().tp, dtype=torch.float64)
    pretrained.load(tmp_path / "plain", mine, groups_of_one())
    torch.testing.assert_close(mine(IDS), logits_of(model), rtol=1e-10, atol=1e-10)
    shutil.copytree(theirs["llama"][1], tmp_path / "old")
    edited(tmp_path / "old", rope_parameters=None, rope_theta=500.0)
    assert pretrained.read_shape(tmp_path / "old") == pretrained.read_shape(theirs["llama"][1])
    edited(tmp_path / "old", rope_theta=None)
    assert pretrained.read_shape(tmp_path / "old").rotary_base == 10_000


def test_a_shape_is_the_same_after_its_config_was_read_back():
    """Also where a None stands for a number, and where an option has no effect."""
    today = dict(norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)
    of_experts = today | dict(num_experts=4, moe_ffn_hidden_size=12, top_k=3)
    cases = [
        ("gpt2", dict(mlp="gelu_tanh", norm_eps=1e-4, num_query_groups=4, top_k=1, rotary_base=5.0)),
        ("gpt2", dict(ffn_hidden_size=20, tied=False)),
        ("llama", today | dict(num_query_groups=2, rotary_base=5e5)),
        ("mixtral", of_experts),
        (None, of_experts | dict(num_shared_experts=1)),
        (None, of_experts | dict(top_k=1)),
        (None, of_experts | dict(bias=True)),
        (None, dict(num_query_groups=2)),
        (None, today | dict(mlp="gelu")),
    ]
    for family, options in cases:
        shape = GPT(2, 16, 8, 29, 4, **options)
        if family is None:
            with pytest.raises(ValueError, match="is not the form of a model that transformers knows"):
                config_of(shape)
        else:
            config = config_of(shape)
            assert config["model_type"] == family
            assert config_of(shape_of(config)) == config
            assert shape_of(config).num_parameters == shape.num_parameters


def test_a_shape_that_transformers_does_not_have_is_not_written(tmp_path):
    model = ParallelGPT(GPT(1, 8, 4, 7, num_attention_heads=2, norm="rmsnorm"), groups_of_one().tp)
    with pytest.raises(ValueError, match=r"norm='rmsnorm' is not the form of .*GPT2LMHeadModel, has norm='layernorm'"):
        pretrained.save(tmp_path / "out", model, groups_of_one())
    with pytest.raises(ValueError, match="exists: name a new folder"):
        pretrained.save(
            tmp_path, ParallelGPT(GPT(1, 8, 4, 7, num_attention_heads=2), groups_of_one().tp), groups_of_one()
        )
    assert list(tmp_path.iterdir()) == []


# -- memory ------------------------------------------------------------------------------------------------------------


def peak_of_load(folder):
    """On ranks: how far memory rises while the shards are filled, and their size, in bytes."""
    with init_groups(ParallelLayout(4, tp_size=4)) as groups:
        model = ParallelGPT(pretrained.read_shape(folder), groups.tp, device="meta", dtype=torch.float64)
        pretrained.check(folder, model.shape)  # imports and so on
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = like(parameter, torch.empty_like(parameter, device="cpu"))
        resident = re.compile(r"VmRSS:\s+(\d+)").search
        peak = re.compile(r"VmHWM:\s+(\d+)").search
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = 1024 * int(resident(Path("/proc/self/status").read_text())[1])
        pretrained.load(folder, model, groups)
        after = 1024 * int(peak(Path("/proc/self/status").read_text())[1])
        return after - before, sum(p.nbytes for p in model.parameters())


def test_a_rank_holds_its_shard_and_one_tensor_at_most(four, tmp_path):
    """Of a model of 94 MB in one file, mapped pages included; the largest tensor has 4 MB."""
    shape = GPT(14, 256, 64, 2000, num_attention_heads=4)  # the width of its MLPs left out
    model = ParallelGPT(shape, groups_of_one().tp, dtype=torch.float64)
    pretrained.save(tmp_path / "model", model, groups_of_one())
    whole, largest = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    for rise, shard in four.run(peak_of_load, str(tmp_path / "model")):
        assert shard < whole / 3.5
        assert rise < shard + largest + 4e6, f"{rise:,} for a shard of {shard:,} and a tensor of {largest:,}"
