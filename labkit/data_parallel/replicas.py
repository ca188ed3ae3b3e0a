"""Replicas of a model start alike: the same parameters on every rank, first by name and shape, then by value."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from labkit.sizes import ranks_text


def check_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that every rank of the group has the same parameters and buffers.

    Raises:
        ValueError: on every rank, naming the first tensor in which the ranks differ, and those ranks.
    """
    replicas: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(replicas, _describe(module), group=group)
    names = list(dict.fromkeys(name for replica in replicas for name in replica))
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, replica in zip(dist.get_process_group_ranks(group), replicas):
            ranks.setdefault(replica.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            text = ", ".join(f"{found} on ranks {ranks_text(having)}" for found, having in ranks.items())
            raise ValueError(f"the replicas differ: {name} is {text}; make the same module on every rank")
    if any(list(replica) != names for replica in replicas):
        raise ValueError("the replicas' parameters are in different orders: make them in one order on every rank")


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that the group's first rank has in these tensors."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, group_src=0, group=group)
        with torch.no_grad():
            tensor.copy_(values)


def _describe(module: nn.Module) -> dict[str, str]:
    trained = {name: "" if parameter.requires_grad else ", frozen" for name, parameter in module.named_parameters()}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: f"{list(x.shape)} {str(x.dtype)[6:]}{trained.get(name, '')}" for name, x in tensors}
