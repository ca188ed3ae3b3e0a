"""All-reduces sequence-parallel gradients in one message, and computes the norm of the whole
model's gradient.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from labkit.groups import ProcessGroups, local_device
from labkit.placement import PlacedParameters, copy_groups_of


def all_reduce_grads(parameters: PlacedParameters, group: dist.ProcessGroup) -> None:
    """Sum over the tensor group the gradients whose placement says ``defer_grad_reduce``, in one
    message. Megatron-LM does this in ``finalize_model_grads``.

    With sequence parallelism each rank sees some tokens, so what every rank has unsharded (norms,
    biases of row-parallel layers) gets a part of its gradient on each. Layer by layer, each
    micro-batch would send many small messages. Here a rank sends 2 (t - 1)/t of their bytes, once a
    step.
    """
    deferred = [param for param, placement in parameters.items() if placement.defer_grad_reduce]
    gradients = [param.grad for param in deferred if param.grad is not None]
    if gradients and group.size() > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        totals = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals):
            gradient.copy_(total.view_as(gradient))


def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a number; a rank may have none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]


class Sums(NamedTuple):
    """Sums over all ranks."""

    loss: float
    grad_norm: float
    num_counted: int  # targets
    is_ending: bool  # any rank wants to


def loss_and_grad_norm(
    loss_share: torch.Tensor,
    parameters: PlacedParameters,
    groups: ProcessGroups,
    num_counted: torch.Tensor | int = 0,
    wants_to_end: bool = False,
) -> Sums:
    """Return the sum of the ranks' shares of the loss, and the norm of the whole model's gradient.

    Each tensor rank has a loss of its own, all equal if all is right. A gradient that k ranks have
    alike counts 1/k on each (in Megatron-LM one of them counts it). Call it when replicas have
    averaged their gradients.
    All ranks of the world all-reduce t + 2 numbers in float64. Here the host waits for a GPU in
    every step; elsewhere only if a gradient is missing, or experts choose.
    """
    # Gradients by the number of ranks that have the same
    gradients: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter, placement in parameters.items():
        if parameter.grad is not None and not placement.is_tied_copy:
            num_copies = math.prod(group.size() for group in copy_groups_of(placement, groups))
            gradients[num_copies].append(parameter.grad)
    squares = torch.zeros((), dtype=torch.float64, device=local_device())
    for num_copies, same in gradients.items():
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms = torch._foreach_norm(same, 2, dtype=dtype)  # pyright: ignore - private
        squares += torch.stack(norms).double().square().sum() / num_copies
    # All sums go in one message: a loss for each tensor rank, the squared norm, and the number of
    # targets. That is a whole number, so any fraction added to it means that a rank wants to end.
    tp_rank = groups.tp.rank()
    sums = squares.new_zeros(groups.tp.size() + 2)
    sums[tp_rank] = loss_share
    sums[-2] = squares
    if tp_rank == 0:  # the others have the same targets
        sums[-1] = num_counted
    sums[-1] += wants_to_end / (2 * dist.get_world_size())
    dist.all_reduce(sums)
    *losses, squared_norm, counted_and_ending = sums.tolist()
    total_counted = math.floor(counted_and_ending)
    is_ending = counted_and_ending > total_counted
    return Sums(losses[tp_rank], math.sqrt(squared_norm), total_counted, is_ending)
