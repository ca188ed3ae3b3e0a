"""The exercise on the vocabulary: the solution agrees with torch, and the rule counts the numbers per token."""

import pytest
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
