"""What ranks do with all gradients of a step at once: add up small ones in one message, and take the norm of all."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.tensor_parallel import RowParallelLinear, shard_of
from labkit.tensor_parallel.norms import ReplicatedLayerNorm, ReplicatedRMSNorm


def sums_later(model: nn.Module) -> list[nn.Parameter]:
    """Let layers leave sums over the tensor group to `add_up`; return the parameters concerned.

    With sequence parallelism each rank sees some tokens, so what all of them hold whole (norms, biases of row-parallel
    layers) gets a part of its gradient on each. Layer by layer, each micro-batch would send many small messages.
    """
    found = []
    for module in model.modules():
        if isinstance(module, ReplicatedLayerNorm | ReplicatedRMSNorm | RowParallelLinear) and module.sequence_parallel:
            module.sums_later = True
            found += [p for p in module.parameters(recurse=False) if shard_of(p) is None]
    return found


def add_up(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give these parameters the sum of all ranks' gradients, in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and group.size() > 1:
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=group)
        for gradient, total in zip(gradients, together.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(total.view_as(gradient))


def global_grad_norm(
    parameters: Iterable[nn.Parameter], copies: Iterable[nn.Parameter], groups: ProcessGroups, num_replicas: int
) -> float:
    """Return the Euclidean norm of the whole model's gradient, the same on every rank.

    Shards add up over the world, where ``num_replicas`` ranks have each of them. What every rank of a tensor group
    holds whole counts on its first rank alone, and ``copies`` (the last stage's copy of the tied embedding) do not
    count at all. Call it when replicas have averaged their gradients.
    """
    not_counted = set(copies)
    counted = [p for p in parameters if p not in not_counted and (shard_of(p) is not None or groups.coords.tp == 0)]
    gradients = [p.grad for p in counted if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=local_device())
    if gradients:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch._foreach_norm(gradients, 2, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
        squares += torch.stack(norms).double().square().sum()
    dist.all_reduce(squares)
    return (squares / num_replicas).sqrt().item()
