"""Some targets do not count: the loss, its gradients and the weights are still those of one process with the batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.launch import RankFailed, launch
from labtrain import Trainer
from labtrain.build import build
from tests.labtrain.layouts import alone, compare, trained
from tests.labtrain.tiny import SHORT, TODAY
from tests.support.plain import train_plainly


def no_spaces(targets, rows):
    return targets.masked_fill(targets == 0, -100)


def two_rows(targets, rows):
    """Whole micro-batches have none, and whole replicas."""
    counts = torch.tensor([row in (0, 3) for row in rows]).unsqueeze(1)
    return targets.masked_fill(~counts, -100)


class InLoss(Trainer):
    def loss(self, logits, targets):
        return super().loss(logits, no_spaces(targets, None))


class InData(Trainer):
    def micro_batches(self, first_sample):
        inputs, targets = super().micro_batches(first_sample)
        kept = two_rows(torch.cat(targets), self.rows())
        return inputs, kept.split(self.config.micro_batch_size)


THREE_STEPS = replace(SHORT, steps=3)
LAYOUTS = [
    (2, dict()),
    (2, dict(tp_size=2, micro_batch_size=1)),
    (2, dict(pp_size=2, schedule="zero-bubble-v")),
    (4, dict(zero_stage=2, pp_size=2)),
    (4, dict(zero_stage=3, cp_size=2, shard_size=2)),
]


@pytest.mark.parametrize(("kind", "mask"), [(InLoss, no_spaces), (InData, two_rows)])
def test_the_mean_is_over_all_that_count(on_ranks, kind, mask):
    [(steps, _)] = on_ranks(trained, alone(THREE_STEPS), None, build, kind, world_size=1)
    assert steps == pytest.approx(train_plainly(alone(THREE_STEPS), mask)[0], rel=1e-10, abs=0)
    compare(on_ranks, [(world_size, replace(THREE_STEPS, **options)) for world_size, options in LAYOUTS], build, kind)


class Nothing(Trainer):
    def loss(self, logits, targets):
        return super().loss(logits, torch.full_like(targets, -100))


class MeanOnly(Trainer):
    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Nothing, "after step 0: none of the 64 targets of a batch counts: a loss needs at least one that is not -100"),
        (MeanOnly, r"loss\(\) returned a Tensor: return the sum over the targets that count, and how many do"),
    ],
)
def test_a_loss_that_cannot_be_averaged_is_refused(kind, said):
    with pytest.raises(RankFailed, match=said):
        launch(trained, replace(SHORT, pp_size=2, **TODAY), None, build, kind, world_size=2)
