"""An optimizer's states are made before they are loaded. (What is stored is tested in test_checkpoint.py.)"""

import math

import pytest
import torch

from labkit.groups import group_of_one
from labkit.partition import chunks_of_rank
from labkit.placement import FlatShard, Placement, set_placement
from labkit.stored import Part, _boxes_of, make_states
from labkit.tensor_parallel.shards import Shard


def test_loading_makes_states_without_a_step():
    """The zero step that makes the optimizer's states changes no weight, whatever the weight decay."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    make_states(optimizer)
    assert torch.equal(parameter, torch.ones(3))
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(6, 6), (12,)], ids=str)
def test_boxes_of_any_cut_fill_the_whole(shape, dim, stride):
    """Cut for 2 tensor ranks, and each shard in runs of 4 numbers for replicas: the boxes are the tensor, each once."""
    whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    dim = min(dim, whole.dim() - 1)
    found = torch.zeros(shape)
    for tp_rank in range(2):
        chunks = chunks_of_rank(shape[dim], 2, tp_rank, stride)
        shard = torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)
        numbers = shard.flatten()
        for first in range(0, len(numbers), 4):
            parameter = torch.nn.Parameter(numbers[first : first + 4].clone())
            parameter.shard = Shard(dim, shape[dim], stride)
            set_placement(parameter, Placement(flat=FlatShard(shard.shape, first, group_of_one())))
            for corner, box in _boxes_of(parameter.detach(), parameter, tp_rank):
                found[tuple(slice(n, n + size) for n, size in zip(corner, box.shape))] += box
    assert torch.equal(found, whole)


def test_padding_of_a_vocabulary_is_not_stored():
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    parameter.shard = Shard(0, 10)  # words, for 3 ranks of 4
    assert [box.shape[0] for rank in range(3) for _, box in _boxes_of(parameter.detach(), parameter, rank)] == [4, 4, 2]


def test_what_is_done_to_a_part_is_done_to_its_boxes():
    boxes = {torch.Size([0, 0]): torch.ones(1, 3), torch.Size([1, 0]): torch.ones(1, 2)}
    part = Part([2, 3], boxes)
    copied = part.to("cpu", copy=True)
    for box in boxes.values():
        box.zero_()
    assert [box.sum() for box in copied.boxes.values()] == [3, 2]
    part.copy_(copied)
    assert boxes[torch.Size([1, 0])].sum() == 2
