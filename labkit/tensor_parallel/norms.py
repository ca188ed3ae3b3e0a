"""Norms of hidden states, with their weights on every rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.tensor_parallel.operators import copy_to_tp


class ReplicatedLayerNorm(nn.LayerNorm):
    """LayerNorm with its weight on every rank. If each rank sees only some tokens, the ranks add up their gradients.

    They do so in every backward, or where ``sums_later`` is set, not at all: see `labkit.train.gradients`.
    """

    sums_later = False

    def __init__(self, hidden_size: int, group: dist.ProcessGroup, sequence_parallel: bool = False, **place):
        super().__init__(hidden_size, **place)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel or self.sums_later:
            return super().forward(x)
        weight, bias = copy_to_tp(torch.stack([self.weight, self.bias]), self.group)  # one message for both
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class ReplicatedRMSNorm(nn.RMSNorm):
    """The same for RMSNorm: x / sqrt(mean of x^2 + eps) times a weight. Source: arXiv 1910.07467."""

    sums_later = False

    def __init__(self, hidden_size: int, group: dist.ProcessGroup, sequence_parallel: bool = False, **place):
        super().__init__(hidden_size, eps=1e-5, **place)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.sequence_parallel and not self.sums_later
        weight = copy_to_tp(self.weight, self.group) if here else self.weight
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
