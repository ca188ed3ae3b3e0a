"""The norm of the whole model's gradient: each parameter counts once, whichever ranks share or copy it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.tensor_parallel import shard_of


def global_grad_norm(
    parameters: Iterable[nn.Parameter], copies: Iterable[nn.Parameter], groups: ProcessGroups
) -> float:
    """Return the Euclidean norm of the whole model's gradient, the same on every rank.

    Shards add up over the tensor group. What every rank of it holds whole counts on the first rank alone, and
    ``copies`` (the last stage's copy of the tied embedding) do not count at all. Call it when replicas have averaged
    their gradients.
    """
    not_counted = set(copies)
    squares = torch.zeros((), dtype=torch.float64, device=local_device())
    for parameter in parameters:
        counts_here = shard_of(parameter) is not None or groups.coords.tp == 0
        if parameter.grad is not None and counts_here and parameter not in not_counted:
            dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
            squares += torch.linalg.vector_norm(parameter.grad, dtype=dtype).double() ** 2
    dist.all_reduce(squares, group=groups.model)
    return (squares / groups.layout.cp_size).sqrt().item()  # context-parallel ranks have the same gradients
