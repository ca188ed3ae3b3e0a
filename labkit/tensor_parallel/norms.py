"""Normalises hidden states with weights that every rank has whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.placement import PlacedModule, Placement
from labkit.tensor_parallel.operators import copy_to_tp


class _ReplicatedNorm(PlacedModule):
    """If each rank sees only some tokens, the gradients of the weights must be added up over the ranks.

    Every backward does that, unless ``defer_grad_reduce`` leaves it to the end of the step.
    """

    def __init__(
        self,
        hidden_size: int,
        group: dist.ProcessGroup,
        sequence_parallel: bool = False,
        *,
        eps: float = 1e-5,
        defer_grad_reduce: bool = False,
        **factory,
    ):
        super().__init__(hidden_size, eps=eps, **factory)
        self.group, self.reduces_now = group, sequence_parallel and not defer_grad_reduce
        whole = Placement(copy_groups=(group,), defer_grad_reduce=sequence_parallel and defer_grad_reduce)
        self.place(weight=whole, bias=whole)

    def _shared(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.reduces_now:
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
