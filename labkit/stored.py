"""What a rank holds of a checkpoint: each tensor as a part of the whole model's, under its name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from labkit.data_parallel.replicas import grad_dtype_of
from labkit.data_parallel.units import piece_of
from labkit.groups import ProcessGroups
from labkit.shape import GPT
from labkit.tensor_parallel import shard_of
from labkit.tensor_parallel.shards import Shard


@dataclass(frozen=True)
class State:
    """What a rank saves and restores: its parts of the model, their optimizer states, and facts about the run."""

    models: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    groups: ProcessGroups
    shape: GPT
    data: dict[str, Any]  # what it learns: must be the same to resume
    rates: dict[str, Any]  # what the learning rate follows from: may differ; loading then says so


class Part(torch.Tensor):
    """A tensor of which this rank has some boxes, keyed by their corners. An operation on it runs on each box.

    The methods with underscores are how torch.distributed.checkpoint asks what it should write or read.
    """

    boxes: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, size: Sequence[int], boxes: dict[torch.Size, torch.Tensor]) -> "Part":
        first = next(iter(boxes.values()))
        part = torch.Tensor._make_wrapper_subclass(cls, size, dtype=first.dtype, device=first.device)  # pyright: ignore
        part.boxes = boxes
        return part

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        part = next(each for each in args if isinstance(each, Part))
        done = {
            corner: func(*(each.boxes[corner] if isinstance(each, Part) else each for each in args), **(kwargs or {}))
            for corner in part.boxes
        }
        return Part(part.size(), done)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(corner, box.size()) for corner, box in self.boxes.items()]

    def __create_write_items__(self, fqn: str, part: "Part") -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
            for chunk in self.__create_chunk_list__()
            for data in [TensorWriteData(chunk, properties, self.size())]
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.boxes[index.offset]


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by name: those in use, so that loading fills them."""
    for model in state.models:
        for name, parameter in model.named_parameters():
            named = {f"model.{name}": parameter.detach()}
            states = state.optimizer.state.get(parameter, {})
            named |= {f"optimizer.{name}.{key}": value for key, value in states.items()}
            for key, tensor in named.items():
                if tensor.shape != parameter.shape:  # a count of steps, say
                    yield key, tensor
                elif boxes := dict(_boxes_of(tensor, parameter, state.groups.tp.rank())):
                    yield key, Part(_whole_size(parameter), boxes)


def _whole_size(parameter: nn.Parameter) -> list[int]:
    shape, shard = list(piece_of(parameter)[0]), shard_of(parameter)
    if shard:
        shape[shard.dim] = shard.whole_size
    return shape


def _boxes_of(tensor: torch.Tensor, parameter: nn.Parameter, tp_rank: int) -> Iterator[tuple[torch.Size, torch.Tensor]]:
    """Yield the boxes of a tensor that is cut like its parameter, with their corners in the whole tensor.

    It is cut by the stride rule, so that each fused matrix is cut by itself; the last part of a vocabulary is padded.
    """
    shape, first = piece_of(parameter)
    shard = shard_of(parameter) or Shard(0, shape[0])
    before = shape[shard.dim] // shard.stride * tp_rank if shard_of(parameter) else 0  # what other ranks have of each
    rows, whole_rows = shape[shard.dim] // shard.stride, shard.whole_size // shard.stride
    for corner, box in _cut_in_boxes(tensor.flatten(), shape, first):
        for index in range(shard.stride):
            start = max(corner[shard.dim], index * rows)
            stop = min(corner[shard.dim] + box.size(shard.dim), index * rows + min(rows, whole_rows - before))
            if start < stop:
                place = list(corner)
                place[shard.dim] = index * (whole_rows - rows) + before + start
                yield torch.Size(place), box.narrow(shard.dim, start - corner[shard.dim], stop - start)


def _cut_in_boxes(numbers: torch.Tensor, shape: torch.Size, first: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Cut numbers that lie side by side in a matrix or vector into boxes: part of a row, whole rows, part of a row.

    >>> [(corner, list(box.shape)) for corner, box in _cut_in_boxes(torch.arange(9), torch.Size([4, 4]), first=2)]
    [([0, 2], [1, 2]), ([1, 0], [1, 4]), ([2, 0], [1, 3])]
    """
    if len(shape) == 1:
        yield [first], numbers
        return
    width, end = shape[1], first + len(numbers)
    whole = range(-(-first // width), end // width)  # rows
    ends = [first, min(whole.start * width, end), max(whole.stop * width, min(whole.start * width, end)), end]
    for start, stop in pairwise(ends):
        if start < stop:
            box = numbers[start - first : stop - first]
            yield list(divmod(start, width)), box.view(-1, min(width, stop - start))


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
