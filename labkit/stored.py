"""What a rank holds of a checkpoint: each tensor as a part of the whole model's, under its name.

torch.distributed.tensor is imported inside a function: it takes long to import, and most runs save nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labkit.data_parallel.gradients import grad_dtype_of
from labkit.groups import ProcessGroups
from labkit.shape import GPT
from labkit.tensor_parallel import shard_of


@dataclass(frozen=True)
class State:
    """What a rank saves and restores: its parts of the model, with their states in the optimizer; and what to note."""

    models: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    shape: GPT
    data: dict[str, Any]  # what it learns: must be the same to resume
    rates: dict[str, Any]  # what its learning rates follow from: may differ, and is said then


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by name: those in use, so that loading fills them."""
    for model in state.models:
        for name, parameter in model.named_parameters():
            yield from _whole_parts(f"model.{name}", parameter.detach(), parameter, state.groups)
            for key, value in state.optimizer.state.get(parameter, {}).items():
                yield from _whole_parts(f"optimizer.{name}.{key}", value, parameter, state.groups)


def _whole_parts(
    name: str, tensor: torch.Tensor, parameter: nn.Parameter, groups: ProcessGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor as part of the whole if it is cut like its parameter; fused matrices (stride 3) one by one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as DTensorShard

    shard = shard_of(parameter)
    if shard is None or tensor.shape != parameter.shape:
        yield name, tensor
        return
    size, rows = shard.whole_size // shard.stride, parameter.size(shard.dim) // shard.stride
    own = max(0, min(rows, size - groups.tp.rank() * rows))  # without the padding of a vocabulary
    whole = tensor.new_empty([size if dim == shard.dim else n for dim, n in enumerate(tensor.shape)], device="meta")
    how: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    for index, piece in enumerate(tensor.chunk(shard.stride, shard.dim)):
        own_piece, mesh = piece.narrow(shard.dim, 0, own), groups.device_mesh()["tp"]
        yield f"{name}.{index}", DTensor.from_local(own_piece, mesh, [DTensorShard(shard.dim)], **how)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its states. torch does so in the first step, so take one that changes nothing."""
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
        for parameter in param_group["params"]:
            parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype_of(parameter))
    optimizer.step()
    optimizer.zero_grad()
    for param_group, rate in zip(optimizer.param_groups, rates):
        param_group["lr"] = rate
