"""An optimizer's states are made before they are loaded. (What is stored is tested in test_checkpoint.py.)"""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

from labkit.placement import FlatShard, Placement, Shard
from labkit.tensor_parallel import local_shard
from labtrain.checkpoint_tensors import SlicedTensor, make_states, slices_of


def test_loading_makes_states_without_a_step():
    """The zero step that makes the optimizer's states changes no weight, whatever the weight decay."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    make_states(optimizer)
    assert torch.equal(parameter, torch.ones(3))
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["lr"] == 0.1


def a_group(rank, size):
    return dist.ProcessGroup(rank, size)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (12,), (6, 4, 6), (12, 3, 12)], ids=str)
@pytest.mark.parametrize("run", [None, 4, 7, 50])
def test_slices_of_any_shard_fill_the_whole(shape, dims, stride, run):
    """Each dim cut for 2 ranks, and each shard in runs of numbers for replicas: the slices make the tensor."""
    dims = [dim for dim in dims if dim < len(shape) and shape[dim] % (2 * stride) == 0]
    whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    found = torch.zeros(shape)
    for ranks in product(range(2), repeat=len(dims)):
        tensor, shards = whole, []
        for dim, rank in zip(dims, ranks):
            tensor = local_shard(tensor, a_group(rank, 2), dim, stride)
            shards.append(Shard(dim, shape[dim], a_group(rank, 2), stride))
        for start in range(0, tensor.numel(), run or tensor.numel()):
            numbers = tensor.flatten()[start : start + run] if run else tensor
            flat = FlatShard(tensor.shape, start) if run else None
            for offsets, each in slices_of(numbers.clone(), Placement(tuple(shards), flat=flat)):
                found[tuple(slice(n, n + size) for n, size in zip(offsets, each.shape))] += each
    assert torch.equal(found, whole)


def test_padding_of_a_vocabulary_is_not_stored():
    def rows(rank):
        placement = Placement((Shard(0, 10, a_group(rank, 3)),))  # words, for 3 ranks of 4
        return [each.shape[0] for _, each in slices_of(torch.ones(4, 3), placement)]

    assert [rows(rank) for rank in range(3)] == [[4], [4], [2]]


def test_what_is_done_to_a_tensor_is_done_to_its_slices():
    slices = {torch.Size([0, 0]): torch.ones(1, 3), torch.Size([1, 0]): torch.ones(1, 2)}
    tensor = SlicedTensor([2, 3], slices)
    copied = tensor.to("cpu", copy=True)
    for each in slices.values():
        each.zero_()
    assert [each.sum() for each in copied.slices.values()] == [3, 2]
    tensor.copy_(copied)
    assert slices[torch.Size([1, 0])].sum() == 2
