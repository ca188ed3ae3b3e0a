"""Linear layers, cut either way, give what one process gives: forward, backward and after steps."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course.communication import communication_log
from labkit.launch import RankFailed
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
    refused_before_any_communication,
    sequence_slice,
)

INPUT, OUTPUT = 18, 36  # t and t * 3 divide both


def two_steps(layer, forward, reference, x, grad):
    """Compare two SGD steps; ``forward`` maps the layer to (input, output, gradient) as this rank has them."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, reference)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        unsharded_x = x.clone().requires_grad_()
        expected = reference(unsharded_x)
        expected.backward(grad)
        forward(unsharded_x.grad, expected.detach())
        for optimizer in optimizers:
            optimizer.step()


def linear_parity(kind, options, dtype=torch.float64):
    """A column- or row-parallel layer against torch.nn.Linear with the master weight, under the given options."""
    group, stride = dist.group.WORLD, options.get("stride", 1)
    torch.default_generator.manual_seed(5)
    column = kind is ColumnParallelLinear
    layer = kind(INPUT, OUTPUT, group, keep_master_weight_for_test=True, dtype=dtype, **options)
    reference = nn.Linear(INPUT, OUTPUT, bias=options["bias"], dtype=dtype)
    x, grad, bias = randoms((BATCH, SEQUENCE, INPUT), (BATCH, SEQUENCE, OUTPUT), (OUTPUT,), dtype=dtype)
    divided_sequence = options.get("sequence_parallel", False)

    def shard_output(y):  # of the whole output, what this rank has
        if column:
            return y if options["gather_output"] else local_shard(y, group, -1, stride)
        return sequence_slice(y, divided_sequence)

    def shard_input(x):
        if column:
            return sequence_slice(x, divided_sequence)
        return local_shard(x, group, -1, stride) if options["input_is_parallel"] else x

    def shard_weight(weight):
        return local_shard(weight, group, 0 if column else 1, stride)

    def shard_bias(bias):
        return local_shard(bias, group, 0, stride) if column else bias

    with torch.no_grad():
        reference.weight.copy_(layer.master_weight)
        if options["bias"]:
            reference.bias.copy_(bias)
            layer.bias.copy_(shard_bias(bias))

    def compare(unsharded_x_grad, expected):
        local_x = shard_input(x).clone().requires_grad_()
        before = local_x.detach().clone()
        output, output_bias = layer(local_x)
        assert (output_bias is not None) == (options["skip_bias_add"] and options["bias"])
        output = output if output_bias is None else output + output_bias
        output.backward(shard_output(grad))
        assert_same(output, shard_output(expected), "output")
        assert_same(local_x.grad, shard_input(unsharded_x_grad), "input gradient")
        assert_same(layer.weight.grad, shard_weight(reference.weight.grad), "weight gradient")
        if options["bias"]:
            assert_same(layer.bias.grad, shard_bias(reference.bias.grad), "bias gradient")
        assert torch.equal(local_x, before)

    two_steps(layer, compare, reference, x, grad)
    assert_same(layer.weight, shard_weight(reference.weight), "weight after two steps")
    if options["bias"]:
        assert_same(layer.bias, shard_bias(reference.bias), "bias after two steps")


def every_option(second):
    """All combinations of the options that go together; ``second`` is gather_output or input_is_parallel."""
    needed = second == "input_is_parallel"  # what sequence_parallel needs it to be
    for bias, skip_bias_add, stride, flag, sequence in product(*[[True, False]] * 2, [1, 3], *[[True, False]] * 2):
        if not sequence or flag == needed:
            named = {"bias": bias, "skip_bias_add": skip_bias_add, "stride": stride}
            yield named | {second: flag, "sequence_parallel": sequence}


def all_linears(kind, second):
    for options in every_option(second):
        try:
            linear_parity(kind, options)
        except AssertionError as error:
            raise AssertionError(f"{options}: {error}") from None


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("kind", "second"), [(ColumnParallelLinear, "gather_output"), (RowParallelLinear, "input_is_parallel")]
)
def test_linear(on_ranks, kind, second, world_size):
    on_ranks(all_linears, kind, second, world_size=world_size)


def test_options_are_tried_in_every_combination():
    assert len(list(every_option("gather_output"))) == 24


def test_shapes_of_the_shards(on_ranks):
    def shapes():
        column = ColumnParallelLinear(1024, 512, dist.group.WORLD)
        row = RowParallelLinear(1024, 512, dist.group.WORLD)
        return tuple(column.weight.shape), tuple(row.weight.shape)

    assert on_ranks(shapes, world_size=2)[1] == ((256, 1024), (512, 512))
    assert on_ranks(shapes, world_size=4)[3] == ((128, 1024), (512, 256))


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


class Watch(TorchDispatchMode):
    """Notes the matrix products, in the order they are computed."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_messages_travel_while_gradients_are_computed(on_ranks, sequence_parallel):
    """The gradient of the input, while that of the weight is computed; before that, a divided input."""

    def order(sequence_parallel):
        events = []

        class Handle:
            def __init__(self, name, work):
                self.name, self.work = name, work

            def wait(self):
                events.append(f"{self.name} arrived")
                self.work.wait()

        def watch(module, name):
            original = getattr(module, name)

            def started(*args, **kwargs):
                events.append(f"{name} started")
                return Handle(name, original(*args, **kwargs))

            setattr(module, name, started)  # where the name is looked up
            return lambda: setattr(module, name, original)

        layer = ColumnParallelLinear(
            4, 8, dist.group.WORLD, gather_output=False, sequence_parallel=sequence_parallel, bias=False
        )
        output, _ = layer(torch.ones(2, 4, 4, requires_grad=True))
        undo = [watch(operators, "all_gather_single"), watch(operators, "reduce_scatter_single")]
        undo.append(watch(dist, "all_reduce"))
        with Watch(events):
            output.sum().backward()
        for restore in undo:
            restore()
        return events

    expected = ["product", "all_reduce started", "product", "all_reduce arrived"]
    if sequence_parallel:
        expected = [
            "all_gather_single started",
            "product",
            "reduce_scatter_single started",
            "all_gather_single arrived",
        ]
        expected += ["product", "reduce_scatter_single arrived"]
    assert on_ranks(order, sequence_parallel) == [expected] * 2


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


MISTAKES = {
    "tp_size=2 does not divide output_size=9: use tp_size 1, 3 or 9, or output_size 8 or 10": lambda g: (
        ColumnParallelLinear(4, 9, g)
    ),
    "tp_size=2 does not divide input_size=7: use tp_size 1 or 7, or input_size 6 or 8": lambda g: RowParallelLinear(
        7, 4, g
    ),
    "tp_size=2 * stride=3 = 6 does not divide output_size=8: use output_size 6 or 12": lambda g: ColumnParallelLinear(
        4, 8, g, stride=3
    ),
    "output_size=8.0 must be a whole number": lambda g: ColumnParallelLinear(4, 8.0, g),
    "input_size='4' must be a whole number": lambda g: ColumnParallelLinear("4", 8, g),
    "input_size=0 must be at least 1": lambda g: RowParallelLinear(0, 8, g),
    "stride=1.5 must be a whole number": lambda g: RowParallelLinear(4, 8, g, stride=1.5),
    "use gather_output=False with it": lambda g: ColumnParallelLinear(4, 8, g, sequence_parallel=True),
    "use input_is_parallel=True with it": lambda g: RowParallelLinear(4, 8, g, sequence_parallel=True),
    "has width 5, this layer takes input_size = 4": lambda g: ColumnParallelLinear(4, 8, g)(torch.ones(2, 5)),
    "has width 4, this layer takes input_size=4 / tp_size = 2": lambda g: RowParallelLinear(
        4, 8, g, input_is_parallel=True
    )(torch.ones(2, 4)),
}


def test_mistakes_are_refused_before_any_communication(on_ranks):
    on_ranks(refused_before_any_communication, MISTAKES)


def test_a_report_names_the_line_of_the_learner(on_ranks):
    def work():
        ColumnParallelLinear(4, 9, dist.group.WORLD)

    with pytest.raises(RankFailed, match=r"ColumnParallelLinear\(4, 9, dist.group.WORLD\)"):
        on_ranks(work)
