"""Maps a rank's shards to slices of unsharded tensors for torch.distributed.checkpoint.

From the unsharded tensor to what a rank has of it there are two cuts. Tensor-parallel ranks divide
dims (`labkit.placement.Shard`); then replicas that share states divide the numbers of the shard, in
the order of memory (`labkit.placement.FlatShard`). Here the second tensor rank has columns, and one
of its replicas the last three of their numbers:

    1 2 3 4   -- Shard -->   3 4   -- flattened -->   3 4 7 8   -- FlatShard -->   4 7 8
    5 6 7 8                  7 8

`slices_of` undoes both, the latest first. What a rank has is not one box of the unsharded tensor,
but several:

    4 7 8   -- _blocks -->   . 4   -- _runs -->   . . . 4     slice [[4]] at [0, 3]
                             7 8                  . . 7 8     slice [[7, 8]] at [1, 2]

Checkpoints name slices of unsharded tensors, so any layout can read what any other wrote.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from labkit.data_parallel.replicas import grad_dtype_of
from labkit.groups import ProcessGroups
from labkit.partition import chunks_of_rank
from labkit.placement import (
    Placement,
    Shard,
    copy_groups_of,
    placements,
    shape_before_flat,
    unsharded_size,
)
from labkit.shape import GPT


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
    """An unsharded tensor of which this rank has slices, by the offsets of their first numbers.

    Operations run on each slice.

    >>> slices = {torch.Size([0, 3]): torch.tensor([[4]])}
    >>> slices[torch.Size([1, 2])] = torch.tensor([[7, 8]])
    >>> doubled = 2 * SlicedTensor([2, 4], slices)
    >>> [(list(offsets), values.tolist()) for offsets, values in doubled.slices.items()]
    [([0, 3], [[8]]), ([1, 2], [[14, 16]])]

    The methods with underscores are how torch.distributed.checkpoint asks what it should write or
    read.
    """

    slices: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(cls, size: Sequence[int], slices: dict[torch.Size, torch.Tensor]) -> "SlicedTensor":
        first = next(iter(slices.values()))
        like: dict[str, Any] = dict(dtype=first.dtype, device=first.device)
        tensor = torch.Tensor._make_wrapper_subclass(cls, size, **like)  # pyright: ignore
        tensor.slices = slices
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run an operation on each slice, such as ``copy_`` from another tensor cut likewise."""
        first = next(arg for arg in args if isinstance(arg, SlicedTensor))
        results = {}
        for offsets in first.slices:
            of_slices = [
                arg.slices[offsets] if isinstance(arg, SlicedTensor) else arg for arg in args
            ]
            results[offsets] = func(*of_slices, **(kwargs or {}))
        return SlicedTensor(first.size(), results)

    def __create_chunk_list__(self) -> list[Any]:
        slices = self.slices.items()
        return [ChunkStorageMetadata(offsets, values.size()) for offsets, values in slices]

    def __create_write_items__(self, fqn: str, tensor: "SlicedTensor") -> list[Any]:
        properties = TensorProperties(self.dtype)
        items = []
        for chunk in self.__create_chunk_list__():
            index = MetadataIndex(fqn, chunk.offsets)
            data = TensorWriteData(chunk, properties, self.size())
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.slices[index.offset]


def tensors_of(state: State, to_save: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors by name: those in use, so that loading fills them.

    Where several ranks have the same numbers, each has its turn to yield some of them ``to_save``.
    For a parameter "layers.0.mlp.up.weight" of the second of two tensor ranks, [8, 4] of [16, 4],
    and its AdamW:

        model.layers.0.mlp.up.weight                  [16, 4], with one slice, at [8, 0]
        optimizer.layers.0.mlp.up.weight.exp_avg      the same, as is exp_avg_sq
        optimizer.layers.0.mlp.up.weight.step         one number, as it is
    """
    for model in state.models:
        # Routers have biases that are not parameters; all ranks have the same
        for name, buffer in model.named_buffers():
            yield f"model.{name}", buffer
    # From the smallest to the largest, so that turns are about equal; the same order on all ranks
    parameters = named_parameters(state.models)
    parameters.sort(key=lambda named: shape_before_flat(*named[1:]).numel())
    for number, (name, parameter, placement) in enumerate(parameters):
        if to_save and not is_my_turn(number, placement, state.groups):
            continue
        named = {f"model.{name}": parameter.detach()}
        for key, value in state.optimizer.state.get(parameter, {}).items():
            named[f"optimizer.{name}.{key}"] = value
        for key, tensor in named.items():
            if tensor.shape != parameter.shape:  # a count of steps, say
                yield key, tensor
            elif slices := dict(slices_of(tensor, placement)):
                yield key, SlicedTensor(unsharded_size(tensor, placement), slices)


def named_parameters(models: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter, Placement]]:
    """Return the parameters of a rank's chunks of the model: name, tensor and placement of each."""
    placed = placements(*models)
    return [(name, p, placed[name]) for model in models for name, p in model.named_parameters()]


def is_my_turn(number: int, placement: Placement, groups: ProcessGroups) -> bool:
    """Whether this one of the ranks with the same numbers saves them: they take turns, parameter by
    parameter.

    With two groups of copies, of 2 and 3 ranks, parameter 5 = 1 + 2 * (2 + 3 * 0) is saved by the
    rank that is number 1 in the first group and number 2 in the second; and so is every sixth after
    it.

    >>> from labkit.groups import groups_of_one
    >>> of_two = torch.distributed.ProcessGroup(1, 2)
    >>> of_three = torch.distributed.ProcessGroup(2, 3)
    >>> placement = Placement(copy_groups=(of_two,), replica_group=of_three)
    >>> [number for number in range(18) if is_my_turn(number, placement, groups_of_one())]
    [5, 11, 17]
    """
    for group in copy_groups_of(placement, groups):
        number, turn = divmod(number, group.size())
        if turn != group.rank():
            return False
    return not placement.is_tied_copy


def slices_of(
    tensor: torch.Tensor, placement: Placement
) -> Iterator[tuple[torch.Size, torch.Tensor]]:
    """Yield the slices of a parameter with this placement, or of its optimizer state, with their
    offsets in the unsharded tensor.

    The example of this file's first lines: rank 1 of 2 has the columns 2 and 3 of a [2, 4] matrix,
    and of those four numbers, in memory one after the other, the last three.

    >>> from labkit.placement import FlatShard
    >>> columns = Shard(1, 4, torch.distributed.ProcessGroup(1, 2))  # dim 1, 4 columns in all
    >>> flat = FlatShard(torch.Size([2, 2]), start=1)
    >>> placement = Placement((columns,), flat=flat)
    >>> for offsets, values in slices_of(torch.tensor([4.0, 7.0, 8.0]), placement):
    ...     print(list(offsets), values.tolist())
    [0, 3] [[4.0]]
    [1, 2] [[7.0, 8.0]]
    """
    shape = shape_before_flat(tensor, placement)
    shard_of_dim = {shard.dim: shard for shard in placement.shards}
    start = placement.flat.start if placement.flat else 0
    for offsets, block in _blocks(tensor.flatten(), shape, start):
        runs_of_dims = []
        for dim, (offset, length) in enumerate(zip(offsets, block.shape)):
            runs_of_dims.append(list(_runs(offset, length, shape[dim], shard_of_dim.get(dim))))
        # A run in each dim makes a box
        for runs in product(*runs_of_dims):
            in_unsharded = torch.Size(offset for offset, _ in runs)
            in_block = tuple(inside for _, inside in runs)
            yield in_unsharded, block[in_block]


def _blocks(
    numbers: torch.Tensor, shape: Sequence[int], start: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield consecutive numbers of a flattened tensor as blocks of it: part of a row, all of some
    rows, part of a row.

    ``start`` is the flat index of the first; a row of more than one dim is cut likewise.

    >>> blocks = _blocks(torch.arange(9), [4, 4], start=2)
    >>> [(offsets, list(block.shape)) for offsets, block in blocks]
    [([0, 2], [1, 2]), ([1, 0], [1, 4]), ([2, 0], [1, 3])]
    """
    if not shape:
        if len(numbers):
            yield [], numbers.view(())
        return
    width = math.prod(shape[1:])
    while len(numbers):
        row, column = divmod(start, width)
        num_rows = len(numbers) // width
        if column == 0 and num_rows:
            count = num_rows * width
            zeros = [0] * (len(shape) - 1)
            yield [row, *zeros], numbers[:count].view(num_rows, *shape[1:])
        else:
            count = min(width - column, len(numbers))
            for offsets, block in _blocks(numbers[:count], shape[1:], column):
                yield [row, *offsets], block.unsqueeze(0)
        numbers = numbers[count:]
        start += count


def _runs(start: int, length: int, size: int, shard: Shard | None) -> Iterator[tuple[int, slice]]:
    """Yield where an interval of a rank's dim, ``size`` long, lies in the unsharded dim: run by
    run, the offset there and the slice of the interval.

    The dim is cut by the stride rule, so that each fused matrix is cut by itself; padding at the
    end is in no run.

    An unsharded dim of 10 is padded to 12 for 2 ranks. With stride 3 it is three matrices of 4
    rows: rank 1 has the rows 2, 3, 6, 7, 10 and 11, of which the last two are padding. All of its
    rows but the first lie there in two runs, row 3, and rows 6 and 7:

    >>> shard = Shard(0, 10, torch.distributed.ProcessGroup(1, 2), stride=3)
    >>> list(_runs(1, 5, 6, shard))
    [(3, slice(0, 1, None)), (6, slice(1, 3, None))]
    """
    if shard is None:
        yield start, slice(0, length)
        return
    num_ranks = shard.group.size()
    chunk_start = 0  # in this rank's dim
    for chunk in chunks_of_rank(size * num_ranks, num_ranks, shard.group.rank(), shard.stride):
        without_padding = min(len(chunk), shard.unsharded_size - chunk.start)
        begin = max(start, chunk_start)
        end = min(start + length, chunk_start + without_padding)
        if begin < end:
            yield chunk.start + begin - chunk_start, slice(begin - start, end - start)
        chunk_start += len(chunk)


def without_states(state: State, saved: Container[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters whose optimizer states are not all among the ``saved`` names, as if
    never trained.
    """
    found = []
    for name, parameter, _ in named_parameters(state.models):
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
        for param in param_group["params"]:
            if param.requires_grad:
                param.grad = torch.zeros_like(param, dtype=grad_dtype_of(param))
    optimizer.step()
    optimizer.zero_grad()
    for param_group, rate in zip(optimizer.param_groups, rates):
        param_group["lr"] = rate
