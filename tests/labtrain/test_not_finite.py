"""A number that is not finite stops every rank, and the rank and module in which it was first are named."""

import math
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.launch import RankFailed, launch
from labtrain import train, training
from tests.labtrain.tiny import TINY


def diverge(config, rank, how, where):
    """Train; from step 2 on something is wrong on one rank."""
    with training(config) as trainer:
        trainer.step()
        if dist.get_rank() == rank:
            modules = {name: module for model in trainer.models for name, module in model.named_modules()}
            if how == "parameter":
                modules[where].weight.data.view(-1)[1] = math.nan
            elif how == "forward":
                modules[where].register_forward_hook(lambda _, __, out: (out[0] * math.inf, *out[1:]))
            elif how == "backward":
                chunk = next(each for each in trainer.chunks if where in dict(each.module.named_modules()))
                chunk.whole(modules[where].weight).register_hook(lambda gradient: gradient * math.inf)
        trainer.step()


@pytest.mark.parametrize(
    ("world_size", "options", "how", "rank", "where", "what"),
    [
        (8, {"tp_size": 2, "pp_size": 2}, "parameter", 5, "layers.3.mlp.up",
         "the parameter layers.3.mlp.up.weight, before the step"),
        (4, {"pp_size": 2, "zero_stage": 2}, "forward", 1, "layers.1.mlp.up", "the output of layers.1.mlp.up"),
        (4, {"tp_size": 2, "pp_size": 2}, "backward", 3, "layers.2.attention.qkv",
         "the gradient of layers.2.attention.qkv.weight"),
        (4, {"tp_size": 2, "zero_stage": 3}, "backward", 2, "embedding", "the gradient of embedding.weight"),
    ],
)  # fmt: skip
def test_the_first_rank_and_place_is_found(world_size, options, how, rank, where, what):
    """Every collective spreads a NaN to ranks that had none: in the first case, in three groups of a rank."""
    config = replace(TINY, precision="float32", eval_interval=0, **options)
    with pytest.raises(RankFailed) as caught:
        launch(diverge, config, rank, how, where, world_size=world_size)
    assert isinstance(caught.value.cause, FloatingPointError)
    text = str(caught.value.cause)
    assert text.startswith("step 2: ")
    assert f"First on rank {rank}: {what}." in text
    assert "lost its connection" not in str(caught.value)  # every rank stops by itself


def test_a_learning_rate_that_is_far_too_high_stops_the_run():
    config = replace(TINY, learning_rate=100, weight_decay=1000, clip_norm=0, warmup_steps=1, precision="float32")
    config = replace(config, pp_size=2, schedule="zero-bubble", num_layers=2)
    with pytest.raises(
        RankFailed, match="raised FloatingPointError: step 3: the loss is nan, the gradient norm"
    ) as caught:
        launch(train, config, world_size=2)
    assert "First on rank 0: the output of layers.0" in str(caught.value.cause)
    assert len(launch(train, replace(config, steps=1, learning_rate=0.01), world_size=2)[0]) == 1


def overflow(config):
    """Train on a loss that is so large that float32 has no number for the squares of its gradients."""
    with training(config) as trainer:
        plain = trainer.loss

        def loss(logits, targets):
            total, count = plain(logits, targets)
            return total * 1e25, count

        trainer.loss = loss
        trainer.step()


@pytest.mark.parametrize(("world_size", "where"), [(1, "of losses, of squares"), (2, "of squares, or over ranks")])
def test_numbers_that_are_all_finite_have_a_sum_that_is_not(world_size, where):
    with pytest.raises(RankFailed) as caught:
        launch(overflow, replace(TINY, precision="float32"), world_size=world_size)
    text = str(caught.value.cause)
    assert "the gradient norm inf. Every parameter, output and gradient is finite; a sum is not" in text
    assert text.endswith(where)
