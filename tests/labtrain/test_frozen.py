"""Frozen parameters: the steps of one process in every layout, saved, resumed, and trained from some step on."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from labkit.launch import RankFailed, launch
from labtrain import training
from labtrain.build import build, wrap
from labtrain.checkpoint_tensors import make_states
from labtrain.master_weights import MasterWeights
from tests.labtrain.tiny import TINY, numbers
from tests.support.plain import train_plainly

BELOW = ("embedding", "positions", "layers.0.", "layers.1.")
FROZEN = {
    "nothing": (),
    "all below": BELOW,  # of two pipeline ranks, the first has nothing to train
    "in each unit": ("layers.0.mlp", "layers.1.mlp_norm", "layers.2.attention", "layers.3.mlp_norm.w", "norm.bias"),
    "the head": ("layers.2.", "layers.3.", "norm"),
}


def frozen(which):
    """Build a job in which some parameters are frozen."""

    def wrap_frozen(config, model, groups):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN[which]))
        return wrap(config, model, groups)

    return partial(build, wrap=wrap_frozen)


def trained(config, which, num_steps=None):
    """The numbers of the steps that are left to do, or of so many; and how many numbers the optimizer keeps here."""
    with training(config, frozen(which)) as trainer:
        done = numbers(trainer.steps() if num_steps is None else [trainer.step() for _ in range(num_steps)])
        return done, sum(each.numel() for state in trainer.optimizer.state.values() for each in state.values())


LAYOUTS = [  # each with every choice of what is frozen, over the table
    (4, dict(pp_size=2, zero_stage=2), "all below"),
    (4, dict(pp_size=2, zero_stage=1, schedule="interleaved", num_chunks=2), "in each unit"),
    (4, dict(zero_stage=3, shard_size=2, recompute="full"), "in each unit"),
    (4, dict(cp_size=2, zero_stage=3), "the head"),
    (4, dict(tp_size=2, zero_stage=1, sequence_parallel=True), "the head"),
]


@pytest.mark.parametrize(("world_size", "options", "which"), LAYOUTS, ids=str)
def test_frozen_in_every_layout(on_ranks, world_size, options, which):
    config = replace(TINY, steps=3, warmup_steps=2, eval_interval=3)
    expected, _ = train_plainly(config, is_frozen=lambda name, _: name.startswith(FROZEN[which]))
    for got, _ in on_ranks(trained, replace(config, **options), which, world_size=world_size):
        assert got == pytest.approx(expected, rel=1e-10, abs=0)


RELAY = [  # a step each
    ("all below", 4, dict(pp_size=2, zero_stage=1)),
    ("all below", 4, dict(zero_stage=3, shard_size=2)),
    ("nothing", 2, dict(pp_size=2)),
    ("nothing", 2, dict(tp_size=2)),
    ("all below", 2, dict(pp_size=2)),
]


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_saved_resumed_and_trained_later(on_ranks, tmp_path, capsys, precision):
    config = replace(TINY, steps=6, warmup_steps=2, eval_interval=1, precision=precision)
    expected, _ = train_plainly(config, is_frozen=lambda name, step: name.startswith(FROZEN[RELAY[min(step, 4)][0]]))
    resumed = replace(config, checkpoint_dir=str(tmp_path), resume=True, save_interval=1)
    for step, (which, world_size, options) in enumerate(RELAY):
        ranks = on_ranks(trained, replace(resumed, **options), which, 1, world_size=world_size)
        got, wanted = ranks[0][0], expected[3 * step : 3 * step + 3]
        if precision == "float64":
            assert got == pytest.approx(wanted, rel=1e-10, abs=0), step
        else:
            assert got[::2] == pytest.approx(wanted[::2], rel=0.01), step  # losses; a norm is rounded more
        said = "It has no optimizer states of embedding.weight and 25 more, so these start anew"
        assert (said in capsys.readouterr().out) == (step == 2)
    assert ranks[0][1] == 0  # rank 0 of the last pipeline trains nothing


def test_a_nan_beside_frozen_parameters_is_found():
    config = replace(TINY, pp_size=2, learning_rate=1000, weight_decay=1000, clip_norm=0, warmup_steps=1)
    config = replace(config, precision="float32", eval_interval=0)
    with pytest.raises(RankFailed, match=r"the loss is nan.* Not finite: the loss on ranks \[1\]"):
        launch(trained, config, "all below", world_size=2)


def wrap_one_end_frozen(config, model, groups):
    model.requires_grad_(not model.is_first)
    return wrap(config, model, groups)


def test_a_tied_weight_frozen_on_one_end_is_refused():
    with pytest.raises(RankFailed, match=r"the tied embedding is frozen on ranks \[0\], trained"):
        launch(frozen_on_one_end, replace(TINY, pp_size=2), world_size=2)


def frozen_on_one_end(config):
    with training(config, partial(build, wrap=wrap_one_end_frozen)) as trainer:
        trainer.step()


def test_master_weights_of_what_is_not_frozen_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    frozen_weight, *_ = model[0].requires_grad_(False).parameters()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    make_states(optimizer)
    assert {*optimizer.masters} == {*model[1].parameters()} == {p for p, state in optimizer.state.items() if state}
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    optimizer.step()
    assert [torch.equal(p, was) for p, was in zip(model.parameters(), before)] == [True, True, False, False]
    frozen_weight.grad = torch.ones_like(frozen_weight)
    with pytest.raises(ValueError, match=r"of shape \[3, 3\] has a gradient, but was frozen when MasterWeights"):
        optimizer.step()
    MasterWeights(nn.Linear(2, 2).requires_grad_(False).parameters(), torch.optim.AdamW, lr=0.1).step()  # trains none
