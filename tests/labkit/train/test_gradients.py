"""Clipping scales all gradients by one factor, as torch does. (The norm is tested in every layout: test_trainer.py.)"""

import math

import torch
from torch import nn

from labkit.train.gradients import clip_gradients


def test_clipping_scales_all_alike():
    def three():
        parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 5)]
        parameters[0].grad, parameters[1].grad = torch.ones(3), torch.full((4,), 2.0)
        return parameters

    norm = math.sqrt(3 + 16)
    for highest in (0.0, norm + 1, 1.5):
        ours, torchs = three(), three()
        clip_gradients(ours, norm, highest)
        nn.utils.clip_grad_norm_(torchs, highest or math.inf)
        for mine, other in zip(ours[:2], torchs):
            torch.testing.assert_close(mine.grad, other.grad)
        assert ours[2].grad is None
