"""Weights in Hugging Face's format, in and out, held against transformers: small random models that it makes itself."""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.of_transformers import in_float64, make_model  # isort: skip - before it, transformers goes online
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig

from labkit.data_parallel import FullyShardedDataParallel
from labkit.data_parallel.replicas import like
from labkit.groups import groups_of_one, init_groups
from labkit.launch import World
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labtrain import TrainConfig, export, pretrained, train
from labtrain.__main__ import main
from labtrain.generation import choose_word, generate
from labtrain.hugging_face import INDEX
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


def save_in_layouts(folders, out):
    """On a rank: load and save in each layout."""
    for name, folder in folders.items():
        shape = pretrained.read_shape(folder)
        layouts = LAYOUTS if name in ("gpt2", "llama", "mixtral") else LAYOUTS[:1]
        for number, (t, c, p, zero_stage) in enumerate(layouts):
            layout = dict(tp_size=t, cp_size=c, pp_size=p) | (OF_EXPERTS if shape.num_experts else {})
            with init_groups(ParallelLayout(4, **layout)) as groups:
                model, _ = stages_of(shape, groups, zero_stage, sequence_parallel=t > 1)
                pretrained.load(folder, model, groups)
                pretrained.save(f"{out}/{name} {number}", model, groups, max_file_bytes=60_000)


def test_every_layout_writes_the_same_bits(theirs, four, tmp_path):
    four.run(save_in_layouts, {name: str(folder) for name, (_, folder) in theirs.items()}, str(tmp_path))
    for name, (model, folder) in theirs.items():
        expected = all_tensors(folder)
        for written in map(all_tensors, tmp_path.glob(f"{name} ?")):
            assert written.keys() == expected.keys()
            assert all(torch.equal(written[key].view(torch.int64), x.view(torch.int64)) for key, x in expected.items())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} 0")
        assert loaded.dtype == torch.float64
        torch.testing.assert_close(logits_of(in_float64(loaded)), logits_of(model), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", dict(tp_size=2, zero_stage=1)),
        ("llama", dict(tp_size=2, pp_size=2, sequence_parallel=True)),
        ("llama", dict(tp_size=2, cp_size=2, zero_stage=3)),
        ("mixtral", dict(tp_size=2, pp_size=2, **OF_EXPERTS)),
    ],
    ids=str,
)
def test_a_run_starts_with_the_loss_of_transformers(theirs, four, name, sizes):
    """With fewer positions than the model has."""
    model, folder = theirs[name]
    run = dict(text="invented", steps=1, batch_size=8, micro_batch_size=2, seq_length=8, precision="float64")
    config = TrainConfig(init_from=str(folder), **run, **sizes)
    tokens = torch.from_numpy(np.stack([config.make_dataset().sample(row, 9) for row in range(8)]))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert four.run(train, config)[0][0].loss == pytest.approx(expected.item(), rel=1e-10)


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
        least = logits.topk(top_k or 7).values[-1]
        expected = rows * (logits.masked_fill(logits < least, -torch.inf) / 1.5).softmax(0)
        counts = choose_word(logits.expand(rows, -1), model, 1.5, top_k, seed=1).bincount(minlength=7)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        assert ((counts - expected) ** 2 / expected)[possible].sum() < 25  # 6 degrees of freedom: once in 3,000 seeds


# -- a run that starts from a folder -----------------------------------------------------------------------------------


def test_a_faulty_folder_is_refused_before_a_run_starts(theirs, tmp_path):
    """What else is wrong with folders: test_folders.py."""
    folder = shutil.copytree(theirs["llama"][1], tmp_path / "model")
    options = dict(init_from=str(folder), seq_length=8, text="invented")
    TrainConfig(**options)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"index\.json names model-0.*, which is not there"):
        TrainConfig(**options)


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
    start, run, out = str(theirs["llama, tied"][1]), str(tmp_path / "run"), str(tmp_path / "out")
    options = "labtrain --seq-length 8 --batch-size 4 --precision float64 --text invented --init-from"

    def train_from(*given):
        monkeypatch.setattr(sys, "argv", [*options.split(), *given])
        return main()

    def export_to(folder):
        return export.main(run, folder)

    damaged = tmp_path / "run" / "step_00000002" / "__0_0.distcp"
    for command, given, code, expected in (
        (train_from, (start, "--checkpoint-dir", run, "--steps", "1"), 0, f"float64, weights from {start}; "),
        (train_from, (start, "--checkpoint-dir", run, "--steps", "2", "--resume"), 0, "from step_00000001"),
        (train_from, (start, "--num-layers", "3"), 2, "--num-layers 3 contradicts --init-from "),
        (export.main, (run,), 2, ""),
        (export_to, (out,), 0, "of step_00000002"),
        (train_from, (out, "--steps", "1"), 0, ""),
        (export_to, (out,), 2, f"{out} exists: name a new folder"),
        (damaged.write_bytes, (b"0",), 1, ""),
        (export_to, (f"{out}2",), 2, "has changed since it was written"),
    ):
        assert command(*given) == code, given
        said = capsys.readouterr()
        assert expected in re.sub(r"\s+", " ", said.out + said.err)
    assert not Path(f"{out}2").exists()


CONTRADICTIONS = {
    "num_layers=3": "num_layers=3 contradicts init_from=.*, which has 2: leave it out",
    "vocab_size=30": "vocab_size=30 contradicts init_from=.*, which has 29",
    "mlp='swiglu'": "mlp='swiglu' contradicts init_from",
    "seq_length=17": "seq_length=17 is more than the 16 positions of this model",
    "text=None": "init_from=.* has nothing to learn: name a text, or a file of tokens",
    "tp_size=3": "tp_size=3 does not divide num_attention_heads=8: use tp_size 1, 2, 4 or 8$",
    "pp_size=4": "= 4 stages for num_layers=2: use fewer stages$",
}


def test_options_that_contradict_the_folder_are_refused(theirs):
    folder = str(theirs["gpt2"][1])
    given = dict(init_from=folder, seq_length=8, text="invented")
    config = TrainConfig(**given, num_layers=4, tp_size=2)  # 4 is the default
    assert config.shape == replace(pretrained.read_shape(folder), seq_length=8)
    assert replace(config, steps=3).shape == config.shape
    for options, text in CONTRADICTIONS.items():
        with pytest.raises(ValueError, match=text):
            TrainConfig(**given | eval(f"dict({options})"))
    assert TrainConfig(**given | dict(text=None, check=8)).shape == config.shape  # it trains nothing


def test_a_text_is_made_into_tokens_by_the_folder_s_tokenizer(theirs, tmp_path):
    """Whose words are numbered from 0; one that it does not know is the last."""
    folder = shutil.copytree(theirs["gpt2"][1], tmp_path / "model")
    words = [f"w{number}" for number in range(28)]
    (tmp_path / "text").write_text(" ".join([*words, "not-known"] * 4))

    def train_with(vocabulary):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        return TrainConfig(init_from=str(folder), text=str(tmp_path / "text"), seq_length=8)

    sample = train_with({word: number for number, word in enumerate([*words, "?"])}).make_dataset().sample(0, 40)
    assert list(sample) == [(sample[0] + i) % 29 for i in range(40)]
    with pytest.raises(ValueError, match=r"token 0 of .*text is 29 by .*tokenizer\.json, and vocab_size=29: use the m"):
        train_with({"?": 29})


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
