"""A number that is not finite stops every rank, with the step, the loss, the norm, and the ranks that have it."""

import math
from dataclasses import replace

import pytest
import torch.distributed as dist

from labkit.launch import RankFailed, launch
from labtrain import training
from tests.labtrain.tiny import TINY


def diverge(config, rank, how, where):
    """Train; from step 2 on something is wrong on one rank."""
    with training(config) as trainer:
        trainer.step()
        if dist.get_rank() == rank:
            modules = {name: module for model in trainer.models for name, module in model.named_modules()}
            if how == "forward":
                modules[where].register_forward_hook(lambda _, __, out: (out[0] * math.inf, *out[1:]))
            else:
                modules[where].weight.register_hook(lambda gradient: gradient * math.inf)
        trainer.step()


@pytest.mark.parametrize(
    ("world_size", "options", "how", "rank", "where", "says"),
    [
        (2, {}, "forward", 1, "layers.1.mlp.up", "Not finite: the loss on ranks [1], gradients on ranks [0, 1]."),
        (4, {"tp_size": 2}, "backward", 3, "layers.2.mlp.up", "Not finite: gradients on ranks [1, 3]."),
        (2, {"pp_size": 2}, "backward", 1, "layers.3.mlp.up", "Not finite: gradients on ranks [1]."),
    ],
)  # fmt: skip
def test_the_ranks_are_named(world_size, options, how, rank, where, says):
    """Replicas spread a gradient's NaN by their averages; the loss is that of the rank that computed it."""
    config = replace(TINY, precision="float32", eval_interval=0, **options)
    with pytest.raises(RankFailed) as caught:
        launch(diverge, config, rank, how, where, world_size=world_size)
    assert isinstance(caught.value.cause, FloatingPointError)
    text = str(caught.value.cause)
    assert text.startswith("step 2: the loss is ")
    assert says in text
    assert "lost its connection" not in str(caught.value)  # every rank stops by itself


def overflow(config):
    """Train on a loss that is so large that float32 has no number for the squares of its gradients."""
    with training(config) as trainer:
        plain = trainer.loss

        def loss(logits, targets):
            total, count = plain(logits, targets)
            return total * 1e25, count

        trainer.loss = loss
        trainer.step()


def test_numbers_that_are_all_finite_have_a_sum_that_is_not():
    with pytest.raises(RankFailed) as caught:
        launch(overflow, replace(TINY, precision="float32"), world_size=2)
    assert "the gradient norm inf. Every loss and gradient is finite, but a sum is not." in str(caught.value.cause)
