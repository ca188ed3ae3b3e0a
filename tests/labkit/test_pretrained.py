"""Weights in Hugging Face's format, in and out, held against transformers: small random models that it makes itself."""

import json
import os
import re
import shutil
from dataclasses import asdict, fields, replace
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, whatever is asked for
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model, LlamaConfig, MistralConfig

from labkit import export, pretrained
from labkit.context_parallel import positions
from labkit.data_parallel import FullyShardedDataParallel
from labkit.generation import generate
from labkit.groups import groups_of_one, init_groups
from labkit.hugging_face import config_of, shape_of
from labkit.launch import World, launch
from labkit.layout import ParallelLayout
from labkit.model import ParallelGPT, normal
from labkit.shape import GPT
from labkit.tensor_parallel import gather_whole
from labkit.train import TrainConfig, train

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=8, vocab_size=29)
LLAMA |= dict(max_position_embeddings=16, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
GPT2 = dict(n_embd=32, n_head=8, n_layer=4, vocab_size=29, n_positions=16)
CONFIGS = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, not tied": GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=40, layer_norm_epsilon=1e-3
    ),
    "llama": LlamaConfig(**LLAMA, num_key_value_heads=4, rms_norm_eps=1e-3),
    "llama, tied": LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**LLAMA, num_key_value_heads=4, sliding_window=16),
}
IDS = torch.randint(29, (2, 16), generator=torch.Generator().manual_seed(1))
LAYOUTS = [  # of four ranks: t, c, p, and the ZeRO stage over what is left
    (2, 1, 2, 0),
    (4, 1, 1, 3),
    (2, 2, 1, 3),
    (1, 2, 2, 3),
]


def rotary_in_float64(self, x, position_ids):
    half = torch.arange(0, self.config.hidden_size // self.config.num_attention_heads, 2, dtype=torch.float64)
    speeds = self.config.rope_parameters["rope_theta"] ** -(half / (2 * len(half)))
    angles = position_ids[..., None].double() * speeds
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def rms_norm_in_float64(self, x):
    return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def in_float64(model):
    """The model without the places where transformers computes in float32, whatever the dtype."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(rms_norm_in_float64, module)
    if hasattr(model.base_model, "rotary_emb"):
        rotary = model.base_model.rotary_emb
        rotary.forward = MethodType(rotary_in_float64, rotary)
    return model.double().eval()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Each model of transformers, saved by it in several files, and its folder."""
    made = {}
    for name, config in CONFIGS.items():
        model, folder = in_float64(AutoModelForCausalLM.from_config(config)), tmp_path_factory.mktemp("theirs") / "model"
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                normal(key, seed=0, std=0.3)(parameter)
        model.save_pretrained(folder, max_shard_size="60KB")
        assert (folder / pretrained.INDEX).exists()
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
    device = "meta" if zero_stage else "cpu"
    model = ParallelGPT(shape, groups.tp, **place, dtype=torch.float64, device=device, seed=7, **options)
    return model, FullyShardedDataParallel(model, groups.shard, units=model.units) if zero_stage else model


def logits_on_ranks(folders, out):
    """Load, compute and save in each layout; return the logits of the whole sequence, on the ranks that have them."""
    results = {}
    for name, folder in folders.items():
        shape = pretrained.read_shape(folder)
        for number, (t, c, p, zero_stage) in enumerate(LAYOUTS if name in ("gpt2", "llama") else LAYOUTS[:1]):
            with init_groups(ParallelLayout(4, tp_size=t, cp_size=c, pp_size=p)) as groups:
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
            torch.testing.assert_close(
                logits, expected, rtol=1e-10, atol=1e-10, msg=lambda m, t=text: t + m
            )
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
    text = config.make_text()
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
    numbers = dict(steps=3, batch_size=8, micro_batch_size=2, seq_length=8, warmup_steps=1, precision="float64")
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
