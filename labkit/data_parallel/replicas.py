"""Replicas of a model start alike: the same parameters on every rank, by name and shape and then by value."""

import torch
import torch.distributed as dist
from torch import nn


def check_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """See that every rank of the group has the same parameters and buffers.

    Raises:
        ValueError: on every rank, naming the first tensor in which the ranks differ, and those ranks.
    """
    replicas: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(replicas, _describe(module), group=group)
    ranks = dist.get_process_group_ranks(group)
    names = list(dict.fromkeys(name for replica in replicas for name in replica))
    for name in names:
        found = [replica.get(name, "missing") for replica in replicas]
        if len(set(found)) > 1:
            who = {what: [rank for rank, its in zip(ranks, found) if its == what] for what in dict.fromkeys(found)}
            text = ", ".join(
                f"{what} on rank{'s' * (len(having) > 1)} {', '.join(map(str, having))}" for what, having in who.items()
            )
            raise ValueError(f"the replicas differ: {name} is {text}; make the same module on every rank")
    if any(list(replica) != names for replica in replicas):
        raise ValueError("the replicas have the same parameters in another order: make them in one order on every rank")


def copy_from_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's first rank."""
    for tensor in (*module.parameters(), *module.buffers()):
        values = tensor.detach().contiguous()
        dist.broadcast(values, group_src=0, group=group)
        with torch.no_grad():
            tensor.copy_(values)


def _describe(module: nn.Module) -> dict[str, str]:
    trained = {name: "" if parameter.requires_grad else ", frozen" for name, parameter in module.named_parameters()}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: f"{list(x.shape)} {str(x.dtype)[6:]}{trained.get(name, '')}" for name, x in tensors}
