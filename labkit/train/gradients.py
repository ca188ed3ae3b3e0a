"""The norm of the whole model's gradient: each parameter counts once, whichever ranks share or copy it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.tensor_parallel import shard_of


def global_grad_norm(
    parameters: Iterable[nn.Parameter], copies: Iterable[nn.Parameter], groups: ProcessGroups, num_replicas: int
) -> float:
    """Return the Euclidean norm of the whole model's gradient, the same on every rank.

    Shards add up over the world, where ``num_replicas`` ranks have each of them. What every rank of a tensor group
    holds whole counts on its first rank alone, and ``copies`` (the last stage's copy of the tied embedding) do not
    count at all. Call it when replicas have averaged their gradients.
    """
    not_counted = set(copies)
    gradients = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and parameter not in not_counted
        if shard_of(parameter) is not None or groups.coords.tp == 0
    ]
    squares = torch.zeros((), dtype=torch.float64, device=local_device())
    if gradients:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        squares += torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()
    dist.all_reduce(squares)
    return (squares / num_replicas).sqrt().item()
