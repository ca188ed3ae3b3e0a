"""Replicas start with the values of the group's first rank; those that differ in more than values are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.data_parallel import DataParallel
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from tests.labkit.data_parallel.conftest import ROWS, WIDTH, linear, loss_of, world


class WithBuffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layer = linear()
        self.register_buffer("count", torch.tensor(rank + 5))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("turned", torch.full((2, 3), float(rank)).T)
        self.register_buffer("hidden", torch.tensor([rank + 0.5]), persistent=False)


def broadcast_at_construction(root):
    """Everybody has what the group's first rank had: the world's first, or that of a smaller group."""
    ranks = list(range(root, world().size()))
    group = dist.new_group(ranks)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = WithBuffers(rank)
    if rank in ranks:
        DataParallel(module, group)
        torch.manual_seed(root)
        expected = WithBuffers(root)
        for (name, got), other in zip(
            [*module.named_parameters(), *module.named_buffers()], [*expected.parameters(), *expected.buffers()]
        ):
            assert torch.equal(got, other), name
        assert module.turned.stride() == expected.turned.stride()
    dist.barrier()


@pytest.mark.parametrize("root", [0, 1])
def test_parameters_and_buffers_start_as_the_first_rank_s(on_ranks, root):
    on_ranks(broadcast_at_construction, root, world_size=3)


def different_shape(rank):
    return nn.Sequential(linear(), linear(WIDTH, 3 if rank == 2 else 4))


def a_parameter_missing(rank):
    return nn.Sequential(linear(), nn.Linear(WIDTH, WIDTH, bias=rank > 0, dtype=torch.float64))


def different_type(rank):
    return nn.Sequential(linear(dtype=torch.float32 if rank in (1, 3) else torch.float64))


def frozen_on_one(rank):
    module = nn.Sequential(linear(), linear())
    module[1].weight.requires_grad_(rank != 3)
    return module


def tied_on_one(rank):
    module = nn.Sequential(linear(), linear())
    if rank == 0:
        module[1].weight = module[0].weight
    return module


def different_order(rank):
    module = nn.Module()
    for name in ("a", "b") if rank else ("b", "a"):
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    return module


def different_buffer(rank):
    module = linear()
    module.register_buffer("scale", torch.zeros(2 + (rank == 1)))
    return module


DIFFERENCES = {
    different_shape: "is 1.weight [4, 6] float64 on ranks [0, 1, 3], 1.weight [3, 6] float64 on ranks [2]",
    a_parameter_missing: "is missing on ranks [0], 1.bias [6] float64 on ranks [1, 2, 3]",
    different_type: "is 0.weight [6, 6] float64 on ranks [0, 2], 0.weight [6, 6] float32 on ranks [1, 3]",
    frozen_on_one: "is 1.weight [6, 6] float64 on ranks [0, 1, 2], 1.weight [6, 6] float64, frozen on ranks [3]",
    tied_on_one: "is 1.bias [6] float64 on ranks [0], 1.weight [6, 6] float64 on ranks [1, 2, 3]",
    different_order: "tensor 1 of this module is b [2] float32 on ranks [0], a [2] float32 on ranks [1, 2, 3]",
    different_buffer: "is scale [2] float32 on ranks [0, 2, 3], scale [3] float32 on ranks [1]",
}


def refusal(different):
    try:
        DataParallel(different(dist.get_rank()), world())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("different", DIFFERENCES, ids=lambda function: function.__name__)
def test_replicas_that_differ_are_refused_on_every_rank(on_ranks, different):
    texts = on_ranks(refusal, different, world_size=4)
    assert len(set(texts)) == 1
    assert DIFFERENCES[different] in texts[0]
    assert "on every rank" in texts[0]


def refusal_in_a_group():
    with init_groups(ParallelLayout(4, tp_size=2)) as groups:
        different = nn.Sequential(linear(WIDTH, 3 if dist.get_rank() == 3 else 4))
        try:
            DataParallel(different, groups.dp)
        except ValueError as error:
            return str(error)


def test_ranks_of_a_smaller_group_are_named_by_their_number_in_the_world(on_ranks):
    texts = on_ranks(refusal_in_a_group, world_size=4)
    assert texts[0] == texts[2] == None  # noqa: E711
    assert texts[1] == texts[3]
    assert "is 0.weight [4, 6] float64 on ranks [1], 0.weight [3, 6] float64 on ranks [3]" in texts[1]


def refusal_without_a_name():
    output = DataParallel(linear(), world())(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    try:
        loss_of(output).backward()
    except ValueError as error:
        return str(error)


def test_a_wrapper_that_nobody_kept_is_refused_in_backward(on_ranks):
    for text in on_ranks(refusal_without_a_name, world_size=2):
        assert "was deleted before backward: give the wrapper a name" in text
