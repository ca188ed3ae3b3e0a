"""The exercises of notebook 13: solutions agree with one process, and wrong ways are named."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises import context_parallel, context_parallel_gradients
from course.exercises.values import same
from labkit.context_parallel import positions
from labkit.launch import launch


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_positions_are_those_of_labkit(cp_size):
    for rank in range(cp_size):
        assert same(context_parallel.my_positions(24, cp_size, rank), positions(24, cp_size, rank))


def test_blocks_merged_one_by_one_are_one_softmax():
    q, k, v = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -torch.inf)
    for keys, values in zip(k.chunk(3), v.chunk(3)):
        out, lse = context_parallel.my_merge(out, lse, *context_parallel.attend(q, keys, values, causal=False))
    assert same((out, lse), context_parallel.attend(q, k, v, causal=False))
    assert same(out, F.scaled_dot_product_attention(q, k, v))


def ring():
    inputs = context_parallel.ring_inputs(2)
    return inputs, context_parallel.my_ring(*inputs)


def test_the_ring_agrees_with_attention_in_one_process():
    ranks = launch(ring, world_size=4)
    q, k, v = (torch.cat(parts) for parts in zip(*(inputs for inputs, _ in ranks)))
    assert same(torch.cat([out for _, out in ranks]), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def exchange(rows, columns, split_dim):
    grad, *dims = context_parallel_gradients.exchange_inputs(rows, columns, split_dim)
    return grad, context_parallel_gradients.my_exchange_backward(grad, *dims)


@pytest.mark.parametrize(("rows", "columns", "split_dim"), [(2, 8, 0), (8, 2, 1)])
def test_the_exchange_agrees_with_autograd_in_one_process(rows, columns, split_dim):
    grads, backward = zip(*launch(exchange, rows, columns, split_dim, world_size=4))
    xs = [torch.zeros_like(grad_x, requires_grad=True) for grad_x in backward]
    for rank, grad in enumerate(grads):
        torch.cat([x.chunk(4, split_dim)[rank] for x in xs], 1 - split_dim).backward(grad)
    assert same([x.grad for x in xs], backward)


def gradient(counted_on_ranks):
    """The average of the ranks' gradients, and this rank's tokens, of which only some count."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    is_counted = torch.arange(4) < counted_on_ranks[dist.get_rank()]
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    context_parallel_gradients.my_loss((tokens @ weight).square(), is_counted).backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / dist.get_world_size(), tokens[is_counted]


def test_the_average_of_the_gradients_is_that_of_one_process():
    ranks = launch(gradient, [4, 3, 1, 0], world_size=4)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (torch.cat([counted for _, counted in ranks]) @ weight).square().mean().backward()
    for averaged, _ in ranks:
        assert same(averaged, weight.grad)
