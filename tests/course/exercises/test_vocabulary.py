"""The exercise on the vocabulary: the solution agrees with torch, and the rule counts the numbers per token."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises import vocabulary
from course.exercises.on_ranks import gathered
from course.exercises.values import same
from labkit.launch import launch


def loss_by_torch(scale):
    logits, target = vocabulary.logit_inputs(4, scale)
    return vocabulary.my_cross_entropy(logits, target), F.cross_entropy(gathered(logits, 1), target, reduction="none")


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_loss_agrees_with_torch(scale):
    for ours, torchs in launch(loss_by_torch, scale, world_size=4):
        assert same(ours, torchs)


def test_gathering_the_logits_is_right_but_not_the_way():
    def gathers(logits, target):
        return F.cross_entropy(gathered(logits, 1), target, reduction="none")

    assert "It calls all_gather" in vocabulary.vocab_cross_entropy.verdict(gathers).text


def test_an_all_reduce_of_all_logits_is_told_how_many_bytes_it_sent():
    def reduces_all_logits(logits, target):
        rank, shard_size = dist.get_rank(), logits.size(1)
        padded = torch.zeros(len(logits), shard_size * dist.get_world_size())
        padded[:, rank * shard_size : (rank + 1) * shard_size] = logits
        dist.all_reduce(padded)
        return F.cross_entropy(padded, target, reduction="none")

    text = " ".join(vocabulary.vocab_cross_entropy.verdict(reduces_all_logits).text.split())
    assert "It sends 160 bytes into all-reduces. Three numbers per token are enough, 48 bytes" in text
