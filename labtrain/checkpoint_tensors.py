"""Maps a rank's shards to slices of whole tensors for torch.distributed.checkpoint."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from labkit.data_parallel.replicas import grad_dtype_of
from labkit.groups import ProcessGroups
from labkit.partition import chunks_of_rank
from labkit.placement import Shard, copy_groups_of, placement_of, shape_before_flat, unsharded_size
from labkit.shape import GPT
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class State:
    """What a rank saves and restores: its chunks of the model, their optimizer states, and facts
    about the run.
    """

    models: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    shape: GPT
    data: dict[str, Any]  # what it learns: must be the same to resume
    options: dict[str, Any]  # all of the run's: may differ; loading then says so


class SlicedTensor(torch.Tensor):
    """A whole tensor of which this rank has slices, by the offsets of their first numbers.

    Operations run on each.

    The methods with underscores are how torch.distributed.checkpoint asks what it should write or
    read.
    """

    slices: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, size: Sequence[int], slices: dict[torch.Size, torch.Tensor]) -> "SlicedTensor":
        first = next(iter(slices.values()))
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=first.dtype, device=first.device
        )  # pyright: ignore
        tensor.slices = slices
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensor = next(each for each in args if isinstance(each, SlicedTensor))

        def of(offsets: torch.Size) -> list[Any]:
            return [
                each.slices[offsets] if isinstance(each, SlicedTensor) else each for each in args
            ]

        return SlicedTensor(
            tensor.size(), {key: func(*of(key), **(kwargs or {})) for key in tensor.slices}
        )

    def __create_chunk_list__(self) -> list[Any]:
        return [ChunkStorageMetadata(offsets, each.size()) for offsets, each in self.slices.items()]

    def __create_write_items__(self, fqn: str, tensor: "SlicedTensor") -> list[Any]:
        properties = TensorProperties(self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            for chunk in self.__create_chunk_list__()
            for data in [TensorWriteData(chunk, properties, self.size())]
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.slices[index.offset]


def tensors_of(state: State, to_save: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by name: those in use, so that loading fills them.

    Where several ranks have the same numbers, each has its turn to yield some of them ``to_save``.
    """
    # Routers have biases that are no parameters; all ranks have the same
    for model in state.models:
        yield from ((f"model.{name}", buffer) for name, buffer in model.named_buffers())
    parameters = [pair for model in state.models for pair in model.named_parameters()]
    # So that turns are about equal; same on all
    parameters.sort(key=lambda pair: shape_before_flat(pair[1]).numel())
    for number, (name, parameter) in enumerate(parameters):
        if to_save and not is_my_turn(number, parameter, state.groups):
            continue
        named = {f"model.{name}": parameter.detach()}
        named |= {
            f"optimizer.{name}.{key}": each
            for key, each in state.optimizer.state.get(parameter, {}).items()
        }
        for key, tensor in named.items():
            if tensor.shape != parameter.shape:  # a count of steps, say
                yield key, tensor
            elif slices := dict(slices_of(tensor, parameter)):
                yield key, SlicedTensor(unsharded_size(parameter), slices)


def is_my_turn(number: int, parameter: nn.Parameter, groups: ProcessGroups) -> bool:
    """Whether this one of the ranks with the same numbers saves them: they take turns, parameter by
    parameter.
    """
    for group in copy_groups_of(parameter, groups):
        number, turn = divmod(number, group.size())
        if turn != group.rank():
            return False
    return not placement_of(parameter).is_tied_copy


def slices_of(
    tensor: torch.Tensor, parameter: nn.Parameter
) -> Iterator[tuple[torch.Size, torch.Tensor]]:
    """Yield the slices of a tensor that lies like its parameter, with their offsets in the whole
    tensor.
    """
    placement, shape = placement_of(parameter), shape_before_flat(parameter)
    shard_of_dim = {shard.dim: shard for shard in placement.shards}
    for offsets, block in _blocks(
        tensor.flatten(), shape, placement.flat.start if placement.flat else 0
    ):
        dims = zip(offsets, block.shape, shape, map(shard_of_dim.get, range(len(shape))))
        for runs in product(*(_runs(*dim) for dim in dims)):
            yield (
                torch.Size(offset for offset, _ in runs),
                block[tuple(inside for _, inside in runs)],
            )


def _blocks(
    numbers: torch.Tensor, shape: Sequence[int], start: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield consecutive numbers of a flattened tensor as blocks of it: part of a row, whole rows,
    part of a row.

    ``start`` is the flat index of the first; a row of more than one dim is cut likewise.

    >>> blocks = _blocks(torch.arange(9), [4, 4], start=2)
    >>> [(offsets, list(block.shape)) for offsets, block in blocks]
    [([0, 2], [1, 2]), ([1, 0], [1, 4]), ([2, 0], [1, 3])]
    """
    if not shape and len(numbers):
        yield [], numbers.view(())
        return
    width = math.prod(shape[1:])
    while len(numbers):
        row, column = divmod(start, width)
        whole_rows = 0 if column else len(numbers) // width
        count = whole_rows * width or min(width - column, len(numbers))
        if whole_rows:
            yield [row] + [0] * (len(shape) - 1), numbers[:count].view(whole_rows, *shape[1:])
        else:
            for offsets, block in _blocks(numbers[:count], shape[1:], column):
                yield [row, *offsets], block.unsqueeze(0)
        numbers, start = numbers[count:], start + count


def _runs(start: int, length: int, size: int, shard: Shard | None) -> Iterator[tuple[int, slice]]:
    """Yield where an interval of a rank's dim lies in the whole dim, run by run, each with its
    place in the interval.

    The dim is cut by the stride rule, so that each fused matrix is cut by itself; padding at the
    end has no place.
    """
    if shard is None:
        yield start, slice(0, length)
        return
    tp_size, first = shard.group.size(), 0  # of the chunk in this rank's dim
    for chunk in chunks_of_rank(size * tp_size, tp_size, shard.group.rank(), shard.stride):
        begin, end = (
            max(start, first),
            min(start + length, first + min(len(chunk), shard.unsharded_size - chunk.start)),
        )
        if begin < end:
            yield chunk.start + begin - first, slice(begin - start, end - start)
        first += len(chunk)


def without_states(state: State, saved: Container[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters whose optimizer states are not all among the ``saved`` names, as if
    never trained.
    """
    found = []
    for name, parameter in (pair for model in state.models for pair in model.named_parameters()):
        keys = state.optimizer.state.get(parameter, {})
        if any(f"optimizer.{name}.{key}" not in saved for key in keys):
            found.append((name, parameter))
    return found


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the states of all parameters that are not frozen.

    torch does so in the first step, so take one that changes nothing.
    """
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
        for parameter in (each for each in param_group["params"] if each.requires_grad):
            parameter.grad = torch.zeros_like(parameter, dtype=grad_dtype_of(parameter))
    optimizer.step()
    optimizer.zero_grad()
    for param_group, rate in zip(optimizer.param_groups, rates):
        param_group["lr"] = rate
