"""Backward in two halves gives what backward gives; the first half leaves the weights, the second only does them."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from course.communication import communication_log
from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.pipeline.split_backward import split_backward
from labkit.shape import GPT
from labkit.tensor_parallel import ColumnParallelLinear, ParallelMLP
from labkit.torch_versions import NODES_OUTLIVE_THEIR_GRAPH
from labtrain.model import ParallelGPT, TransformerLayer
from tests.support.graphs import Keeps

WIDTH = 8
SHAPE = GPT(num_layers=2, hidden_size=WIDTH, seq_length=4, vocab_size=11, num_attention_heads=2)


def transformer_layer(dropout=0.0, group=None, sequence_parallel=False):
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    return TransformerLayer(SHAPE, group or group_of_one(), "layer", 0, dropout, **options)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return x + self.inner(x).relu() * torch.sigmoid(self.gate(x))


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class MadeOfTwoWeights(nn.Module):
    """Its weight is computed from parameters, beside the way from the output to x."""

    def __init__(self):
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x @ (self.length * F.normalize(self.direction, dim=0))


class SeveralParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.sigmoid(q) * k + v


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Constant(nn.Module):
    """Has a weight, and forgets its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return (2 * self.weight).expand(x.shape) ** 2


class FrozenInside(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self[1].requires_grad_(False)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, WIDTH), nn.Tanh())


MODULES = {
    "mlp": mlp,
    "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3, bias=False)),
    "residual": Residual,
    "used twice": UsedTwice,
    "weight made of two": MadeOfTwoWeights,
    "several parts": SeveralParts,
    "transformer layer": transformer_layer,
    "dropout": lambda: transformer_layer(dropout=0.3),
    "checkpointed": lambda: Checkpointed(transformer_layer()),
    "checkpointed dropout": lambda: Checkpointed(transformer_layer(dropout=0.3)),
    "constant": Constant,
    "identity": nn.Identity,
    "no weights": nn.GELU,
    "frozen": lambda: mlp().requires_grad_(False),
    "frozen inside": FrozenInside,
}


@pytest.mark.parametrize("name", MODULES)
def test_halves_are_backward(name):
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        module = MODULES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    halves_are_backward(module, torch.randn(2, 4, WIDTH, dtype=torch.float64))


def halves_are_backward(module, x):
    """Both ways from the same state; on ranks, on every rank. Twice, because gradients are added up."""
    got, expected = [], []
    for backward, found in ((in_halves, got), (at_once, expected)):
        module.zero_grad()
        for step in range(2):
            local = x.clone().requires_grad_(x.is_floating_point())
            torch.manual_seed(step)
            output = module(local)
            if output.requires_grad:
                grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(step), dtype=output.dtype)
                backward(output, local, grad)
            found.append(local.grad)
        found += [parameter.grad for parameter in module.parameters()]
    assert len(got) == len(expected)
    for halves, plain in zip(got, expected):
        assert (halves is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(halves, plain, rtol=1e-12, atol=1e-12)


def in_halves(output, x, grad):
    split_backward(get_gradient_edge(output), x, grad)()


def at_once(output, x, grad):
    output.backward(grad)


def test_token_numbers_have_no_first_half():
    torch.manual_seed(0)
    module, tokens = ParallelGPT(SHAPE, group_of_one(), dtype=torch.float64), torch.tensor([[1, 2, 3, 10]])
    halves_are_backward(module, tokens)


class Count(TorchDispatchMode):
    """Counts operations; backward runs on the thread that calls it, so these too."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.times[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})

    @property
    def products(self):
        return self.times["mm"] + self.times["addmm"] + self.times["bmm"]


def test_each_half_does_its_own_products_and_no_others():
    """Of a chain of linear layers, forward and each half of backward take one matrix product a layer."""
    module = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = module(x)
    with Count() as first:
        weight_gradient = split_backward(get_gradient_edge(output), x, torch.ones_like(output))
    assert first.products == 5
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())
    with Count() as second:
        weight_gradient()
    assert second.products == 5
    assert second.times["gelu_backward"] == 0
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_checkpointed_layer_is_computed_again_once_and_then_for_each_node_with_weights():
    """What the docstring says it costs; the gradients are in the cases above."""
    calls = []

    class Noted(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    inner = nn.Sequential(Noted(WIDTH, WIDTH), nn.Tanh(), Noted(WIDTH, WIDTH))
    x = torch.randn(2, WIDTH, requires_grad=True)
    output = Checkpointed(inner)(x)
    calls.clear()
    weight_gradient = split_backward(get_gradient_edge(output), x, torch.ones_like(output))
    assert len(calls) == 2
    calls.clear()
    weight_gradient()
    assert len(calls) == 2 * 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


def test_the_output_may_be_let_go_between_the_halves():
    """Nothing else holds the graph then, and before torch 2.13 a node of a Python function does not outlive it."""
    x, weight = (torch.randn(3, requires_grad=True) for _ in range(2))
    output = Product.apply(x, weight).sum()
    weight_gradient = split_backward(get_gradient_edge(output), x, None)
    del output
    weight_gradient()
    torch.testing.assert_close(weight.grad, x.detach())


@pytest.mark.skipif(not NODES_OUTLIVE_THEIR_GRAPH, reason="in this torch the loss holds what the second half needs")
def test_what_comes_after_the_last_weight_is_let_go_with_the_first_half():
    """On the last stage, that is the loss with all its logits."""
    x, given = torch.randn(3, WIDTH, requires_grad=True), []
    output = Keeps.apply(nn.Linear(WIDTH, WIDTH)(x), given)
    weight_gradient = split_backward(get_gradient_edge(output), x, torch.ones_like(output))
    del output
    assert given[0]() is None
    weight_gradient()


# -- layers of a tensor group ---------------------------------------------------------------------------------------


def sharded_layers_in_halves(sequence_parallel):
    group = dist.group.WORLD
    torch.manual_seed(3)
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    x = x.chunk(group.size(), -2)[group.rank()] if sequence_parallel else x
    halves_are_backward(ParallelMLP(WIDTH, 16, group, **options), x)
    halves_are_backward(transformer_layer(group=group, sequence_parallel=sequence_parallel), x)
    halves_are_backward(Checkpointed(transformer_layer(group=group, sequence_parallel=sequence_parallel)), x)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_halves_of_sharded_layers(sequence_parallel):
    launch(sharded_layers_in_halves, sequence_parallel, world_size=2)


def work_of_column_layers_halves(sequence_parallel):
    """Of a column layer: matrix products and messages of forward, first half, second half, and all of backward."""
    layer = ColumnParallelLinear(
        WIDTH, WIDTH, dist.group.WORLD, gather_output=False, sequence_parallel=sequence_parallel
    )
    x = torch.randn(4, WIDTH, requires_grad=True)
    done = []

    def note(function, *args):
        with communication_log() as log, Count() as count:
            result = function(*args)
        done.append((count.products, [record.operation for record in log.records]))
        return result

    output, _ = note(layer, x)
    weight_gradient = note(split_backward, get_gradient_edge(output), x, torch.ones_like(output))
    assert layer.weight.grad is None
    note(weight_gradient)
    layer(x)[0].sum().backward()
    note(layer(x)[0].sum().backward)
    return done


def test_a_column_layer_does_nothing_twice():
    """Its backward is a Python function, which must ask the engine what is wanted."""
    for done in launch(work_of_column_layers_halves, False, world_size=2):
        assert done == [(1, []), (1, ["all_reduce"]), (1, []), (2, ["all_reduce"])]
    for done in launch(work_of_column_layers_halves, True, world_size=2):
        forward, first, second, whole = done
        assert forward == (1, ["all_gather"])
        assert first == (1, ["reduce_scatter"])
        assert second == (1, ["all_gather"])
        assert (whole[0], sorted(whole[1])) == (2, ["all_gather", "reduce_scatter"])


def column_layer_under_autograd_grad():
    layer = ColumnParallelLinear(WIDTH, WIDTH, dist.group.WORLD, gather_output=False, dtype=torch.float64)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    layer(x)[0].square().sum().backward()
    wanted = [x, layer.weight, layer.bias]
    for subset in ([0], [1], [0, 2], [0, 1, 2]):
        got = torch.autograd.grad(layer(x)[0].square().sum(), [wanted[i] for i in subset])
        for index, grad in zip(subset, got):
            torch.testing.assert_close(grad, wanted[index].grad)


def test_a_column_layer_under_autograd_grad():
    """There the engine does not tell about leaves, and the layer computes all that any pass may want."""
    torch.manual_seed(0)
    launch(column_layer_under_autograd_grad, world_size=2)
