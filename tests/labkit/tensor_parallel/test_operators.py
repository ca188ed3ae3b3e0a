"""The conjugate operators: their values, their gradients, and exactly the bytes that each should move."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from course.communication import communication_log
from labkit.tensor_parallel import operators
from labkit.tensor_parallel.operators import (
    Operator,
    copy_to_tp,
    gather_from_sequence,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
    scatter_to_tp,
)


@pytest.fixture
def on_four(on_ranks):
    """Run a function on 4 ranks, where each mistake of 2 ranks shows too, and more."""
    return partial(on_ranks, world_size=4)


def everybodys(shape, seed=0):
    """A tensor for each rank, of whole numbers: their sums are exact in any order."""
    generators = [torch.Generator().manual_seed(100 * seed + rank) for rank in range(dist.get_world_size())]
    return [torch.randint(-9, 10, shape, generator=generator).double() for generator in generators]


def local_values(shape, seed=0):
    """This rank's own."""
    return everybodys(shape, seed)[dist.get_rank()]


def layouts(x):
    """The same values in memory in three ways."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return [x, x.transpose(0, -1).contiguous().transpose(0, -1), wide[..., ::2]]


SHAPE = (3, 4, 8)  # batch, sequence, hidden: 4 ranks divide the last two


def expected(name, tensors, rank):
    """What is on ``rank`` after an operation on the tensors of all; forward and backward are both such operations."""
    size = len(tensors)
    return {
        "identity": lambda: tensors[rank],
        "all-reduce": lambda: sum(tensors),
        "slice of hidden": lambda: tensors[rank].chunk(size, -1)[rank],
        "all-gather of hidden": lambda: torch.cat(tensors, -1),
        "slice of sequence": lambda: tensors[rank].chunk(size, -2)[rank],
        "all-gather of sequence": lambda: torch.cat(tensors, -2),
        "reduce-scatter of sequence": lambda: sum(tensors).chunk(size, -2)[rank],
    }[name]()


OPERATORS = {
    copy_to_tp: ("identity", "all-reduce"),
    reduce_from_tp: ("all-reduce", "identity"),
    scatter_to_tp: ("slice of hidden", "all-gather of hidden"),
    gather_from_tp: ("all-gather of hidden", "slice of hidden"),
    scatter_to_sequence: ("slice of sequence", "all-gather of sequence"),
    gather_from_sequence: ("all-gather of sequence", "reduce-scatter of sequence"),
    reduce_scatter_to_sequence: ("reduce-scatter of sequence", "all-gather of sequence"),
}
BY_NAME = {name: operator for name, operator in vars(operators).items() if isinstance(operator, Operator)}


@pytest.mark.parametrize("name", BY_NAME)
def test_values_and_gradients_on_any_memory_layout(on_four, name):
    def compare():
        operator = BY_NAME[name]
        forward, backward = OPERATORS[operator]
        rank = dist.get_rank()
        for x in layouts(local_values(SHAPE)):
            before = x.clone()
            x = x.detach().requires_grad_()
            y = operator(x, dist.group.WORLD)
            assert torch.equal(y, expected(forward, everybodys(SHAPE), rank))
            for grad in layouts(local_values(y.shape, seed=1)):
                (got,) = torch.autograd.grad(y, x, grad, retain_graph=True)
                assert torch.equal(got, expected(backward, everybodys(y.shape, seed=1), rank))
                assert torch.equal(grad, local_values(y.shape, seed=1)), "the caller's gradient was changed"
            assert torch.equal(x, before), "the caller's tensor was changed"

    on_four(compare)


def shard_of_weights(*shape):
    """Different on every rank: stands for sharded work."""
    return local_values(shape, seed=2)


REGIONS = {
    "copy, reduce": lambda x, g: reduce_from_tp(copy_to_tp(x, g) * shard_of_weights(4), g),
    "scatter, gather": lambda x, g: gather_from_tp(scatter_to_tp(x, g).sin(), g),
    "sequence": lambda x, g: gathered(
        reduce_scatter_to_sequence(
            gather_from_sequence(scatter_to_sequence(x, g).sin(), g) * shard_of_weights(4), g
        ).cos(),
        g,
    ),
}


def gathered(x, group):
    """The whole sequence, for replicated work."""
    return gather_from_tp(x.mT, group).mT


@pytest.mark.parametrize("region", REGIONS)
def test_gradcheck(on_ranks, region):
    """From a replicated tensor through sharded work to a replicated one: the derivative is that of the whole."""

    def check():
        x = everybodys((1, 4, 4))[0].requires_grad_()
        return torch.autograd.gradcheck(lambda x: REGIONS[region](x, dist.group.WORLD), x)

    assert all(on_ranks(check))  # finite differences of each number take long on more


COMMUNICATION = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}


@pytest.mark.parametrize("name", BY_NAME)
def test_bytes(on_four, name):
    """All move the full tensor, in the sense of nccl-tests; slices move nothing."""

    def count():
        x = local_values(SHAPE).requires_grad_()
        with communication_log() as log:
            y = BY_NAME[name](x, dist.group.WORLD)
            y.sum().backward()
        return [(record.operation, record.message_bytes) for record in log.records], 8 * max(x.numel(), y.numel())

    kinds = [what.split()[0] for what in OPERATORS[BY_NAME[name]]]
    for sent, full_bytes in on_four(count):
        assert sent == [(COMMUNICATION[kind], full_bytes) for kind in kinds if kind in COMMUNICATION]


def test_a_group_of_one_is_the_identity_without_communication(on_four):
    def count():
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        x = local_values(SHAPE).requires_grad_()
        with communication_log() as log:
            same = all(operator(x, alone) is x for operator in OPERATORS)
        return same, len(log)

    assert set(on_four(count)) == {(True, 0)}


def test_an_empty_tensor_goes_through_every_operator(on_four):
    def go_through():
        for operator in OPERATORS:
            x = torch.zeros(2, 0, 0, requires_grad=True)
            y = operator(x, dist.group.WORLD)
            y.sum().backward()
            assert y.shape == x.grad.shape == x.shape

    on_four(go_through)
