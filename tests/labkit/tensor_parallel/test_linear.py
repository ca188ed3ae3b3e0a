"""Linear layers, cut either way, give what one process gives: forward, backward and after steps."""

from contextlib import ExitStack
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course.communication import communication_log
from labkit.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    local_shard,
    operators,
)
from tests.labkit.tensor_parallel.conftest import (
    BATCH,
    SEQUENCE,
    SIZES,
    assert_same,
    randoms,
    sequence_slice,
)

INPUT, OUTPUT = 18, 36  # t and t * 3 divide both


def linear_parity(kind, options, dtype=torch.float64):
    """Two steps of a column- or row-parallel layer, with these options, against torch.nn.Linear."""
    group, stride = dist.group.WORLD, options["stride"]
    torch.default_generator.manual_seed(5)
    column = kind is ColumnParallelLinear
    layer = kind(INPUT, OUTPUT, group, keep_master_weight_for_test=True, dtype=dtype, **options)
    reference = nn.Linear(INPUT, OUTPUT, bias=options["bias"], dtype=dtype)
    x, grad, bias = randoms((BATCH, SEQUENCE, INPUT), (BATCH, SEQUENCE, OUTPUT), (OUTPUT,), dtype=dtype)
    divided_sequence = options["sequence_parallel"]

    def shard_output(y):  # of the whole output, what this rank has
        if column:
            return y if options["gather_output"] else local_shard(y, group, -1, stride)
        return sequence_slice(y, divided_sequence)

    def shard_input(x):
        if column:
            return sequence_slice(x, divided_sequence)
        return local_shard(x, group, -1, stride) if options["input_is_parallel"] else x

    def shard_parameter(p):
        if p.dim() == 2:
            return local_shard(p, group, 0 if column else 1, stride)
        return local_shard(p, group, 0, stride) if column else p

    with torch.no_grad():
        reference.weight.copy_(layer.master_weight)
        if options["bias"]:
            reference.bias.copy_(bias)
            layer.bias.copy_(shard_parameter(bias))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, reference)]
    for _ in range(2):
        unsharded_x = x.clone().requires_grad_()
        expected = reference(unsharded_x)
        expected.backward(grad)
        local_x = shard_input(x).clone().requires_grad_()
        output, output_bias = layer(local_x)
        assert (output_bias is not None) == (options["skip_bias_add"] and options["bias"])
        output = output if output_bias is None else output + output_bias
        output.backward(shard_output(grad))
        assert_same(output, shard_output(expected), f"{options}: output")
        assert_same(local_x.grad, shard_input(unsharded_x.grad), f"{options}: input gradient")
        assert torch.equal(local_x, shard_input(x))
        for name, p in layer.named_parameters():
            assert_same(p.grad, shard_parameter(reference.get_parameter(name).grad), f"{options}: {name} gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in layer.named_parameters():
        assert_same(p, shard_parameter(reference.get_parameter(name)), f"{options}: {name} after two steps")


def every_option(second):
    """All combinations of the options that go together; ``second`` is gather_output or input_is_parallel."""
    needed = second == "input_is_parallel"  # what sequence_parallel needs it to be
    for bias, skip_bias_add, stride, flag, sequence in product(*[[True, False]] * 2, [1, 3], *[[True, False]] * 2):
        if not sequence or flag == needed:
            named = {"bias": bias, "skip_bias_add": skip_bias_add, "stride": stride}
            yield named | {second: flag, "sequence_parallel": sequence}


def all_linears(kind, second):
    for options in every_option(second):
        linear_parity(kind, options)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("kind", "second"), [(ColumnParallelLinear, "gather_output"), (RowParallelLinear, "input_is_parallel")]
)
def test_linear(on_ranks, kind, second, world_size):
    on_ranks(all_linears, kind, second, world_size=world_size)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_frozen_weights(on_ranks, kind):
    """No weight gradient is computed, and the input still gets its own."""

    def freeze(kind):
        torch.manual_seed(0)
        options = {"gather_output": True} if kind is ColumnParallelLinear else {"input_is_parallel": False}
        layer = kind(4, 8, dist.group.WORLD, keep_master_weight_for_test=True, dtype=torch.float64, **options)
        layer.requires_grad_(False)
        (x,) = randoms((3, 4), dtype=torch.float64)
        x.requires_grad_()
        layer(x)[0].sum().backward()
        assert layer.weight.grad is None
        assert_same(x.grad, layer.master_weight.sum(0).expand(3, 4))

    on_ranks(freeze, kind)


def test_an_input_that_needs_no_gradient_costs_no_communication(on_ranks):
    def first_layer():
        layer = ColumnParallelLinear(4, 8, dist.group.WORLD, gather_output=False)
        output, _ = layer(torch.ones(3, 4))
        with communication_log() as log:
            output.sum().backward()
        return len(log), layer.weight.grad is not None

    assert on_ranks(first_layer) == [(0, True)] * 2


class Events(TorchDispatchMode):
    """Notes the matrix products and messages of this rank, in order."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__:
            self.events.append("product")
        return function(*args, **(kwargs or {}))

    def noting(self, start, name):
        """Wrap a function that starts a message, and what waits for it."""

        def started(*args, **kwargs):
            self.events.append(f"{name} started")
            work = start(*args, **kwargs)
            wait = work.wait
            return SimpleNamespace(wait=lambda: (self.events.append(f"{name} arrived"), wait()))

        return started


def order_in_backward(sequence_parallel):
    layer = ColumnParallelLinear(
        4, 8, dist.group.WORLD, gather_output=False, sequence_parallel=sequence_parallel, bias=False
    )
    output, _ = layer(torch.ones(2, 4, 4, requires_grad=True))
    noted = Events()
    with ExitStack() as stack:
        names = (operators, "all_gather_single"), (operators, "reduce_scatter_single"), (dist, "all_reduce")
        for module, name in names:  # where the name is looked up
            stack.enter_context(patch.object(module, name, noted.noting(getattr(module, name), name)))
        stack.enter_context(noted)
        output.sum().backward()
    return noted.events


REPLICATED = ["product", "all_reduce started", "product", "all_reduce arrived"]
DIVIDED = ["all_gather_single started", "product", "reduce_scatter_single started", "all_gather_single arrived"]
DIVIDED += ["product", "reduce_scatter_single arrived"]


@pytest.mark.parametrize(("sequence_parallel", "expected"), [(False, REPLICATED), (True, DIVIDED)])
def test_messages_travel_while_gradients_are_computed(on_ranks, sequence_parallel, expected):
    """The gradient of the input, while that of the weight is computed; before that, a divided input."""
    assert on_ranks(order_in_backward, sequence_parallel) == [expected] * 2


def tied(sequence_parallel, bias):
    """A weight that embeds and predicts gets the sum of both gradients, as in one process."""
    group, dtype = dist.group.WORLD, torch.float64
    torch.manual_seed(8)
    layer = VocabParallelEmbedding(24, 6, group, keep_master_weight_for_test=True, dtype=dtype)
    ids = torch.randint(24, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    values, grad, x = randoms((24,), (BATCH, SEQUENCE, 24), (BATCH, SEQUENCE, 6), dtype=dtype)
    unsharded_bias = values.clone().requires_grad_() if bias else None
    unsharded_x, master = x.clone().requires_grad_(), layer.master_weight.clone().requires_grad_()
    expected = F.linear(F.embedding(ids, master) * unsharded_x, master, unsharded_bias)
    expected.backward(grad)

    local_x = x.clone().requires_grad_()
    local_bias = local_shard(values, group, 0).requires_grad_() if bias else None
    hidden = sequence_slice(layer(ids) * local_x, sequence_parallel)
    hidden.retain_grad()
    output = column_linear(hidden, layer.weight, local_bias, group, sequence_parallel)
    output.backward(local_shard(grad, group, -1))
    assert_same(output, local_shard(expected, group, -1), "output")
    if bias:
        assert_same(local_bias.grad, local_shard(unsharded_bias.grad, group, 0), "bias gradient")
    if not sequence_parallel:  # else each rank cut its slice by hand, and knows only its own part
        assert_same(local_x.grad, unsharded_x.grad, "input gradient")
        assert_same(layer.weight.grad, local_shard(master.grad, group, 0), "weight gradient")


@pytest.mark.parametrize("world_size", SIZES)
def test_a_weight_shared_by_two_layers(on_ranks, world_size):
    def both_ways():
        for case in product([False, True], [False, True]):
            tied(*case)

    on_ranks(both_ways, world_size=world_size)
