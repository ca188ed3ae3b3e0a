"""Training with experts: every layout has the losses, norms, weights and biases of one process; and what is refused.

`make test` runs a selection in which every two sizes and options meet that can. All with all on eight ranks, in hours:
``TRAIN_ALL=1 pytest -s -o faulthandler_timeout=3600 tests/labkit/train/test_experts.py -k product``.
"""

import itertools
import math
import os
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.checkpoint_tensors import SlicedTensor, tensors_of
from labkit.data import EVALUATION_SAMPLES
from labkit.expert_parallel import Router
from labkit.groups import group_of_one
from labkit.model import ParallelGPT
from labkit.tensor_parallel import ParallelMLP
from labkit.train import TrainConfig, train, training
from labkit.train.check import what_a_rank_holds
from labkit.train.config import V_SHAPED
from tests.labkit.train.tiny import TINY, TODAY, numbers

# Step 2 shows what step 1 has left behind, and the third step what biases do after two changes.
MOE = replace(TINY, steps=3, warmup_steps=2, eval_interval=3, num_experts=8, moe_ffn_hidden_size=8)
FORMS = {  # one for each number of experts per token
    1: dict(top_k=1, moe_layer_freq=2),
    2: dict(top_k=2, num_shared_experts=1, **TODAY),
    4: dict(top_k=4, router_scores="sigmoid"),
}
BALANCES = {
    "sequence": dict(aux_loss="sequence", aux_loss_coefficient=0.3, z_loss_coefficient=0.1, bias_update_rate=0.02),
    "micro_batch": dict(aux_loss="micro_batch", aux_loss_coefficient=0.3, bias_update_rate=0.02),
    "global": dict(aux_loss="global", aux_loss_coefficient=0.3, z_loss_coefficient=0.1),
    "bias": dict(bias_update_rate=0.05),
}
FACTORS = {
    "tp_size": (1, 2, 4),
    "cp_size": (1, 2, 4),
    "pp_size": (1, 2, 4),
    "ep_size": (1, 2, 4, 8),
    "expert_tp_size": (1, 2, 4),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe-v"),
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "recompute": (False, True),
    "balance": tuple(BALANCES),
    "top_k": tuple(FORMS),
}


# -- one process, against plain torch ----------------------------------------------------------------------------------


class PlainGPT:
    """The oracle: the whole model on the whole batch, every expert on every token; GPT-2's form, softmax, k > 1."""

    def __init__(self, config):
        self.config, self.text = config, config.make_text()
        start = ParallelGPT(config.shape, group_of_one(), seed=config.seed, dtype=torch.float64)
        self.weights = {name: p.detach().clone().requires_grad_() for name, p in start.named_parameters()}
        self.biases = [torch.zeros(config.num_experts, dtype=torch.float64) for _ in range(config.num_layers)]

    def forward(self, first, rows):
        """The cross-entropy of some rows, the losses of the routers, and how often each expert was chosen."""
        config, w = self.config, self.weights
        samples = [self.text.sample(first + row, config.seq_length + 1) for row in rows]
        tokens = torch.stack([torch.from_numpy(sample) for sample in samples])
        x, extra, loads = w["embedding.weight"][tokens[:, :-1]] + w["positions"], 0.0, []
        for i in range(config.num_layers):

            def of(name, x, i=i):
                return F.linear(x, w[f"layers.{i}.{name}.weight"], w[f"layers.{i}.{name}.bias"])

            def normed(name, x, i=i):
                named = w[f"layers.{i}.{name}.weight"], w[f"layers.{i}.{name}.bias"]
                return F.layer_norm(x, x.shape[-1:], *named)

            qkv = of("attention.qkv", normed("attention_norm", x)).unflatten(-1, (3, config.num_attention_heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + of("attention.out", attended.transpose(1, 2).flatten(2))
            output, losses, load = self.experts(i, normed("mlp_norm", x))
            x, extra, loads = x + output, extra + losses, [*loads, load]
        logits = F.layer_norm(x, x.shape[-1:], w["norm.weight"], w["norm.bias"]) @ w["embedding.weight"].T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), extra, loads

    def experts(self, i, x):
        config, layer = self.config, {n.split("mlp.")[1]: p for n, p in self.weights.items() if f"layers.{i}.mlp." in n}
        logits = x @ layer["router.weight"].T
        scores = logits.softmax(-1)
        chosen = (scores + self.biases[i]).topk(config.top_k, -1).indices
        mask = F.one_hot(chosen, config.num_experts).sum(-2)  # [rows, seq, experts]
        probs = scores * mask / (scores * mask).sum(-1, keepdim=True)
        each = [F.gelu(x @ up.T) @ down.T for up, down in zip(layer["experts.up"], layer["experts.down"])]
        output = sum(probs[..., e, None] * each[e] for e in range(config.num_experts))
        load = mask.sum((0, 1))
        aux = config.num_experts * (load / load.sum() * scores.mean((0, 1))).sum()
        z = logits.logsumexp(-1).square().mean()
        return output, config.aux_loss_coefficient * aux + config.z_loss_coefficient * z, load

    def train(self):
        config, weights = self.config, [*self.weights.values()]
        decay = [dict(params=[p for p in weights if p.dim() > 1]), dict(params=[p for p in weights if p.dim() == 1])]
        decay[1]["weight_decay"] = 0.0
        optimizer = torch.optim.AdamW(decay, lr=1.0, betas=(0.9, 0.95), weight_decay=config.weight_decay)
        result, size = [], config.micro_batch_size
        for step in range(config.steps):
            optimizer.zero_grad()
            total, loads = 0.0, 0
            for start in range(0, config.batch_size, size):
                loss, extra, load = self.forward(step * config.batch_size, range(start, start + size))
                total, loads = total + loss.item() * size / config.batch_size, loads + torch.stack(load)
                ((loss + extra) * size / config.batch_size).backward()
            norm = torch.nn.utils.clip_grad_norm_(weights, config.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate_at(step)
            optimizer.step()
            for bias, load in zip(self.biases, loads):
                bias += config.bias_update_rate * (load.double().mean() - load).sign()
            is_due = (step + 1) % config.eval_interval == 0
            with torch.no_grad():
                evaluation = self.forward(EVALUATION_SAMPLES, range(config.batch_size))[0].item() if is_due else 0.0
            result += [total, norm.item(), evaluation]
        return result


def test_one_process_trains_as_plain_torch_does(on_ranks):
    balance = dict(aux_loss_coefficient=0.3, z_loss_coefficient=0.1, bias_update_rate=0.02)
    config = replace(MOE, steps=5, num_layers=2, **balance)
    oracle = PlainGPT(config)
    expected = oracle.train()
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    assert sum(map(abs, oracle.biases)).max() > 0
    without = PlainGPT(replace(config, aux_loss_coefficient=0.0, z_loss_coefficient=0.0, bias_update_rate=0.0)).train()
    assert abs(without[-3] - expected[-3]) > 1e-5, "balancing changes nothing"


# -- every layout, against one process ---------------------------------------------------------------------------------


def whole(tensor):
    """A whole tensor of one process, from its slices."""
    if not isinstance(tensor, SlicedTensor):
        return tensor.clone()
    result = torch.full(tensor.size(), math.nan, dtype=tensor.dtype)
    for offsets, each in tensor.slices.items():
        result[tuple(slice(at, at + n) for at, n in zip(offsets, each.shape))] = each
    return result


def trained(config, expected=None):
    """The steps of a run and what it has in the end, or how much that differs from what one process has."""
    with training(config) as trainer:
        steps = [*trainer.steps()]
        tensors = dict(tensors_of(trainer._state))
        routers = {name: m for model in trainer.models for name, m in model.named_modules() if isinstance(m, Router)}
        for name, router in routers.items():  # every token once
            num_tokens = config.batch_size * config.seq_length
            assert router.last_load.sum() == num_tokens * config.top_k, f"{name}: {router.last_load}"
        if expected is None:
            return numbers(steps), {name: whole(tensor) for name, tensor in tensors.items()}
        worst = 0.0
        for name, tensor in tensors.items():
            is_sliced = isinstance(tensor, SlicedTensor)
            for offsets, each in tensor.slices.items() if is_sliced else [([0] * tensor.dim(), tensor)]:
                there = expected[name][tuple(slice(at, at + n) for at, n in zip(offsets, each.shape))]
                torch.testing.assert_close(each, there, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name} {text}")
                worst = max(worst, (each - there).abs().max().item() if each.numel() else 0.0)
        return numbers(steps), worst


def run_of(world_size, choice):
    """The config of a choice, and that of one process with the same losses; a ValueError if there is no such run."""
    options = dict(choice)
    balance, top_k, t, c, p = (options.pop(each) for each in ("balance", "top_k", "tp_size", "cp_size", "pp_size"))
    is_pipeline, divides = p > 1 or options["schedule"] == "1f1b", t > 1 or not options["sequence_parallel"]
    if world_size % (t * c * p) or not (is_pipeline and divides):
        raise ValueError("no such run")
    dp_size = world_size // (t * c * p)
    alone = replace(MOE, micro_batch_size=8 if balance == "global" else 2, **FORMS[top_k], **BALANCES[balance])
    sizes = dict(tp_size=t, cp_size=c, pp_size=p)
    sizes["num_chunks"] = 2 if options["schedule"] == "interleaved" else 1
    sizes["micro_batch_size"] = alone.micro_batch_size
    if balance == "global" or (balance != "micro_batch" and dp_size == 8):
        sizes["micro_batch_size"] = 8 // dp_size
    config = replace(alone, **sizes, **options)
    config.make_schedule(world_size)
    if config.zero_stage and world_size == t * p:
        raise ValueError("nothing to divide")
    return alone, config


def some_runs(num_tried=1500, seed=0):
    """A few runs in which all values meet in pairs that meet in any; the next is always one that adds most."""
    draw, covers = random.Random(seed), {}
    while len(covers) < num_tried:
        choice = tuple((name, draw.choice(values)) for name, values in FACTORS.items())
        world_size = draw.choice((2, 4, 8, 8))
        try:
            run_of(world_size, choice)
        except ValueError:
            continue
        covers[world_size, choice] = {*itertools.combinations(choice, 2)}
    uncovered = set().union(*covers.values())
    while uncovered:
        best = max(covers, key=lambda run: (len(covers[run] & uncovered), -run[0]))
        uncovered -= covers.pop(best)
        yield best


def compare(on_ranks, runs):
    alone = {}
    for world_size, choice in runs:
        reference, config = run_of(world_size, choice)
        if reference not in alone:
            [alone[reference]] = on_ranks(trained, reference, world_size=1)
        expected, tensors = alone[reference]
        for rank, (got, _) in enumerate(on_ranks(trained, config, tensors, world_size=world_size)):
            assert got == pytest.approx(expected, rel=1e-10, abs=0), f"rank {rank} of {world_size}: {choice}"


def test_every_two_sizes_and_options(on_ranks):
    runs = [*some_runs()]
    met = set().union(*(itertools.combinations(choice, 2) for _, choice in runs))
    print(len(runs), len(met))
    for pair in itertools.product(("ep_size", "expert_tp_size"), (1, 2, 4)):
        for other in [("zero_stage", 3), ("schedule", "zero-bubble"), ("balance", "global"), ("recompute", True)]:
            assert {(pair, other), (other, pair)} & met
    compare(on_ranks, runs)
