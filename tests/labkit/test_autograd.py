"""Every sharded layer refuses autocast and the gradient of a gradient; neither is ever wrong without a word."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.communication import communication_log
from labkit import context_parallel, expert_parallel, tensor_parallel
from labkit.collectives import all_to_all
from labkit.context_parallel import all_gather_attention, ring_attention, ulysses_attention
from labkit.expert_parallel import Experts, MoELayer, Router, attach_loss
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from labkit.tensor_parallel import (
    ColumnParallelLinear,
    ParallelMLP,
    ParallelSelfAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    vocab_parallel_cross_entropy,
)

WIDTH, WORDS = 8, 16


def ep_groups():
    return init_groups(ParallelLayout(dist.get_world_size(), ep_size=dist.get_world_size()))


def experts(x, g):
    layer = Experts((2, WIDTH, WIDTH), ep_groups(), False, "none", (nn.init.xavier_normal_,) * 2)
    rows = x.flatten(0, 1)
    return layer(rows, torch.full((len(layer.up),), len(rows), dtype=torch.int32))


def attention(of):
    return lambda x, g: of(*[x.unflatten(-1, (2, -1)).transpose(1, 2)] * 3, g)


# Each makes a layer, and calls it with x [2, 4, width] that needs a gradient.
CALLS = {
    ColumnParallelLinear: lambda x, g: ColumnParallelLinear(WIDTH, WIDTH, g)(x)[0],
    RowParallelLinear: lambda x, g: RowParallelLinear(WIDTH, WIDTH, g)(x)[0],
    column_linear: lambda x, g: column_linear(x, torch.ones(WIDTH, WIDTH), None, g),
    VocabParallelEmbedding: lambda x, g: VocabParallelEmbedding(WORDS, WIDTH, g)(torch.ones(2, 4, dtype=torch.long)),
    vocab_parallel_cross_entropy: lambda x, g: vocab_parallel_cross_entropy(x, torch.ones(2, 4, dtype=torch.long), g),
    ParallelMLP: lambda x, g: ParallelMLP(WIDTH, WIDTH, g)(x),
    ParallelSelfAttention: lambda x, g: ParallelSelfAttention(WIDTH, 2, g)(x),
    ring_attention: attention(ring_attention),
    all_gather_attention: attention(all_gather_attention),
    ulysses_attention: attention(ulysses_attention),
    Experts: experts,
    Router: lambda x, g: Router(WIDTH, 2, 1, ep_groups())(x, 4)[0].probs,
    MoELayer: lambda x, g: MoELayer(WIDTH, WIDTH, 2, 1, ep_groups())(x)[0],
}
ELEMENTWISE = {tensor_parallel.ShardedDropout}  # it neither rounds nor sends


def is_layer(public) -> bool:
    is_module = isinstance(public, type) and issubclass(public, nn.Module)
    return is_module or public in (column_linear, vocab_parallel_cross_entropy) or "attention" in repr(public)


def test_every_layer_is_tested():
    packages = [tensor_parallel, context_parallel, expert_parallel]
    public = [getattr(package, name) for package in packages for name in package.__all__]
    assert {cls for cls in public if is_layer(cls)} - ELEMENTWISE == set(CALLS)


def refuse_autocast():
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    for call in CALLS.values():
        with communication_log() as log, torch.autocast("cpu"):
            with pytest.raises(ValueError, match=r"does not work under torch\.autocast: call it outside"):
                call(x, dist.group.WORLD)
            assert all(record.message_bytes <= 16 for record in log.records)  # a layer made is checked once
            with torch.autocast("cpu", enabled=False):
                call(x, dist.group.WORLD)


@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_is_refused(on_ranks, world_size):
    on_ranks(refuse_autocast, world_size=world_size)


# All autograd functions of the layers, with a sum's gradient, which is constant: torch's once_differentiable would not
# notice that the saved tensors need a gradient.
DIFFERENTIATED = {
    "operator": CALLS[RowParallelLinear],
    "column": CALLS[column_linear],
    "cross-entropy": CALLS[vocab_parallel_cross_entropy],
    "attention": CALLS[ring_attention],
    "experts": CALLS[Experts],
    "auxiliary loss": lambda x, g: attach_loss(x, x.square().sum()),
    "all-to-all": lambda x, g: all_to_all(x, g),
}


def refuse_backward():
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    for name, call in DIFFERENTIATED.items():
        with pytest.raises(ValueError, match=r"cannot be differentiated again: leave create_graph=False"):
            torch.autograd.grad(call(x, dist.group.WORLD).sum(), x, create_graph=True)
        output = call(x, dist.group.WORLD).sum()
        with torch.autocast("cpu"), pytest.raises(ValueError, match="the backward of a sharded layer does not work"):
            output.backward()
        assert x.grad is None, name


def test_the_gradient_of_a_gradient_and_backward_in_autocast_are_refused(on_ranks):
    on_ranks(refuse_backward)
