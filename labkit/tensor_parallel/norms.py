"""Normalises hidden states with weights that every rank has whole."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.placement import PlacedModule, Placement
from labkit.tensor_parallel.operators import copy_to_tp


class _ReplicatedNorm(PlacedModule):
    """With ``sequence_parallel``, each rank sees only some tokens, and has only its part of the weights' gradients.

    Every backward adds these up, unless ``defer_grad_reduce`` leaves that to the end of the step.
    """

    normalise: Callable[..., torch.Tensor]

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = tuple(self.parameters())
        if self.reduces_now:
            weights = copy_to_tp(torch.stack(weights), self.group).unbind()  # one message for all
        return self.normalise(x, self.normalized_shape, *weights, eps=self.eps)


class ReplicatedLayerNorm(_ReplicatedNorm, nn.LayerNorm):
    """LayerNorm with its weight and bias on every rank."""

    normalise = staticmethod(F.layer_norm)


class ReplicatedRMSNorm(_ReplicatedNorm, nn.RMSNorm):
    """RMSNorm likewise: x / sqrt(mean of x^2 + eps) times a weight. Source: arXiv 1910.07467."""

    normalise = staticmethod(F.rms_norm)
