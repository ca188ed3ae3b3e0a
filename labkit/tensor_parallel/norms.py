"""Norms of hidden states, with their weights on every rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.tensor_parallel.operators import copy_to_tp


class _ReplicatedNorm(nn.Module):
    """If each rank sees only some tokens, the gradients of the weights must be added up over the ranks.

    Every backward does that, unless ``sums_later`` leaves it to the trainer: see `labkit.train.gradients`.
    """

    sums_later = False

    def __init__(self, hidden_size: int, group: dist.ProcessGroup, sequence_parallel: bool = False, **place):
        super().__init__(hidden_size, eps=1e-5, **place)
        self.group, self.sequence_parallel = group, sequence_parallel

    def _shared(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.sequence_parallel or self.sums_later:
            return weights
        return copy_to_tp(torch.stack(weights), self.group).unbind()  # one message for all


class ReplicatedLayerNorm(_ReplicatedNorm, nn.LayerNorm):
    """LayerNorm with its weight and bias on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, *self._shared(self.weight, self.bias), eps=self.eps)


class ReplicatedRMSNorm(_ReplicatedNorm, nn.RMSNorm):
    """RMSNorm likewise: x / sqrt(mean of x^2 + eps) times a weight. Source: arXiv 1910.07467."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, *self._shared(self.weight), eps=self.eps)
