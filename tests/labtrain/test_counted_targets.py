"""Some targets do not count: the loss, its gradients and the weights are still those of one process with the batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.launch import RankFailed, launch
from labkit.placement import placements
from labtrain import Trainer, training
from labtrain.checkpoint_tensors import slices_of
from tests.labtrain.tiny import TINY, TODAY, in_few_launches, numbers
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


SHORT = replace(TINY, steps=3, warmup_steps=2, eval_interval=3)
MASKS = {InLoss: no_spaces, InData: two_rows}


def trained(config, kind, expected=None):
    """Losses and norms of a run, and its weights and gradients; those of one process must be ``expected``, if given."""
    with training(config) as trainer:
        trainer.__class__ = kind
        steps = numbers(trainer.steps())
        parameters = {name: p for model in trainer.models for name, p in model.named_parameters()}
        if expected is None:
            return steps, {name: (p.detach().clone(), p.grad.clone()) for name, p in parameters.items()}
        placed = placements(*trainer.models)
        for name, p in parameters.items():
            for whole, held in zip(expected[name], (p.detach(), p.grad)):
                for offsets, block in slices_of(held, placed[name]) if held is not None else ():
                    there = whole[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape))]
                    torch.testing.assert_close(block, there, rtol=1e-9, atol=1e-10, msg=name)
        return steps


LAYOUTS = [
    (1, dict(micro_batch_size=1)),
    (2, dict()),
    (2, dict(tp_size=2)),
    (2, dict(cp_size=2, micro_batch_size=1)),
    (2, dict(pp_size=2, micro_batch_size=1, schedule="zero-bubble-v")),
    (4, dict(zero_stage=1, tp_size=2, sequence_parallel=True)),
    (4, dict(zero_stage=2, pp_size=2)),
    (4, dict(zero_stage=3, shard_size=2, micro_batch_size=1)),
    (4, dict(zero_stage=3, cp_size=2, tp_size=2)),
    (8, dict(tp_size=2, cp_size=2, pp_size=2, schedule="interleaved", num_chunks=2)),
]


@pytest.mark.parametrize("kind", MASKS, ids=lambda kind: kind.__name__)
def test_the_mean_is_over_all_that_count(on_ranks, kind):
    whole_batch = replace(SHORT, micro_batch_size=8)
    [(alone, tensors)] = on_ranks(trained, whole_batch, kind, world_size=1)
    assert alone == pytest.approx(train_plainly(whole_batch, MASKS[kind])[0], rel=1e-10, abs=0)
    runs = [(world_size, (replace(SHORT, **options), kind, tensors), None) for world_size, options in LAYOUTS]
    for (world_size, (config, *_), _), ranks in in_few_launches(on_ranks, trained, runs):
        for got in ranks:
            assert got == pytest.approx(alone, rel=1e-10, abs=0), f"{world_size}: {config}"


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
        launch(trained, replace(SHORT, pp_size=2, **TODAY), kind, world_size=2)
