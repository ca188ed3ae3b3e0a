"""Parity: on any number of ranks the sharded layers give what one process gives, forward, backward and after steps."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.communication import communication_log
from labkit.groups import group_of_one, init_groups
from labkit.launch import RankFailed, launch
from labkit.layout import ParallelLayout
from labkit.tensor_parallel import (
    ColumnParallelLinear,
    ParallelMLP,
    ParallelSelfAttention,
    RowParallelLinear,
    ShardedDropout,
    VocabParallelEmbedding,
    column_linear,
    cut_like,
    gather_whole,
    operators,
    own_shard,
    seed_replicas,
    shard_of,
    sharded_dropout,
    vocab_parallel_cross_entropy,
)
from labkit.tensor_parallel.dropout import own_random_stream

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.float64]
BATCH, SEQUENCE, INPUT, OUTPUT = 2, 12, 36, 72  # t and t * 3 divide all but the batch, for every t up to 4


def assert_same(got, expected, what=""):
    exact = got.dtype == torch.float64
    rtol, atol = (1e-10, 1e-10) if exact else (2e-5, 2e-5)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def randoms(*shapes, dtype, seed=1):
    """Random tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def sequence_slice(x, divided):
    group = dist.group.WORLD
    return x.chunk(group.size(), -2)[group.rank()] if divided else x


def two_steps(layer, forward, reference, x, grad):
    """Compare two SGD steps; ``forward`` maps the layer to (input, output, gradient) as this rank has them."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, reference)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole_x = x.clone().requires_grad_()
        expected = reference(whole_x)
        expected.backward(grad)
        forward(whole_x.grad, expected.detach())
        for optimizer in optimizers:
            optimizer.step()


def linear_parity(kind, options, dtype):
    """A column- or row-parallel layer against torch.nn.Linear with the master weight, under the given options."""
    group, stride = dist.group.WORLD, options.get("stride", 1)
    torch.manual_seed(5)
    column = kind is ColumnParallelLinear
    layer = kind(INPUT, OUTPUT, group, keep_master_weight_for_test=True, dtype=dtype, **options)
    reference = nn.Linear(INPUT, OUTPUT, bias=options["bias"], dtype=dtype)
    x, grad, bias = randoms((BATCH, SEQUENCE, INPUT), (BATCH, SEQUENCE, OUTPUT), (OUTPUT,), dtype=dtype)
    divided_sequence = options.get("sequence_parallel", False)

    def shard_output(y):  # of the whole output, what this rank has
        if column:
            return y if options["gather_output"] else own_shard(y, group, -1, stride)
        return sequence_slice(y, divided_sequence)

    def shard_input(x):
        if column:
            return sequence_slice(x, divided_sequence)
        return own_shard(x, group, -1, stride) if options["input_is_parallel"] else x

    def shard_weight(weight):
        return own_shard(weight, group, 0 if column else 1, stride)

    def shard_bias(bias):
        return own_shard(bias, group, 0, stride) if column else bias

    with torch.no_grad():
        reference.weight.copy_(layer.master_weight)
        if options["bias"]:
            reference.bias.copy_(bias)
            layer.bias.copy_(shard_bias(bias))

    def compare(whole_x_grad, expected):
        mine = shard_input(x).clone().requires_grad_()
        before = mine.detach().clone()
        output, output_bias = layer(mine)
        assert (output_bias is not None) == (options["skip_bias_add"] and options["bias"])
        output = output if output_bias is None else output + output_bias
        output.backward(shard_output(grad))
        assert_same(output, shard_output(expected), "output")
        assert_same(mine.grad, shard_input(whole_x_grad), "input gradient")
        assert_same(layer.weight.grad, shard_weight(reference.weight.grad), "weight gradient")
        if options["bias"]:
            assert_same(layer.bias.grad, shard_bias(reference.bias.grad), "bias gradient")
        assert torch.equal(mine, before)

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


def all_linears(kind, second, dtype):
    for options in every_option(second):
        try:
            linear_parity(kind, options, dtype)
        except AssertionError as error:
            raise AssertionError(f"{options}: {error}") from None


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "second"), [(ColumnParallelLinear, "gather_output"), (RowParallelLinear, "input_is_parallel")]
)
def test_linear(kind, second, dtype, world_size):
    launch(all_linears, kind, second, dtype, world_size=world_size)


def test_options_are_tried_in_every_combination():
    assert len(list(every_option("gather_output"))) == 24


def test_the_master_weight_does_not_depend_on_the_number_of_ranks():
    def masters():
        torch.manual_seed(3)
        options = {"keep_master_weight_for_test": True}
        layers = [kind(8, 12, dist.group.WORLD, **options) for kind in (ColumnParallelLinear, RowParallelLinear)]
        return [layer.master_weight for layer in (*layers, VocabParallelEmbedding(10, 4, dist.group.WORLD, **options))]

    alone = launch(masters, world_size=1)[0]
    for rank in launch(masters, world_size=4):
        assert all(torch.equal(got, expected) for got, expected in zip(rank, alone))
    torch.manual_seed(3)
    assert torch.equal(alone[0], nn.init.xavier_normal_(torch.empty(12, 8)))


def test_seeds_that_differ_are_reported_on_every_rank():
    def make(kind, *sizes):
        torch.manual_seed(dist.get_rank())
        with pytest.raises(ValueError, match=r"drew different weights of shape .* set the same seed on all of them"):
            kind(*sizes, dist.group.WORLD)

    for kind, sizes in [(ColumnParallelLinear, (4, 6)), (RowParallelLinear, (6, 4)), (VocabParallelEmbedding, (5, 2))]:
        launch(make, kind, *sizes, world_size=3)


def test_weights_that_no_seed_decides_need_none():
    def make():
        torch.manual_seed(dist.get_rank())
        ColumnParallelLinear(4, 4, dist.group.WORLD, init_method=nn.init.zeros_)

    launch(make, world_size=2)


def test_shapes_of_the_shards():
    """facts: 1024 in, 512 out, on 2 and on 16 ranks."""

    def shapes():
        column = ColumnParallelLinear(1024, 512, dist.group.WORLD)
        row = RowParallelLinear(1024, 512, dist.group.WORLD)
        return tuple(column.weight.shape), tuple(row.weight.shape)

    assert launch(shapes, world_size=2)[1] == ((256, 1024), (512, 512))
    assert launch(shapes, world_size=16)[15] == ((32, 1024), (512, 64))


def test_stride_gives_each_rank_its_part_of_each_fused_matrix():
    def first_rows():
        fused = torch.arange(12.0).unsqueeze(1)  # Q is rows 0-3, K 4-7, V 8-11
        return own_shard(fused, dist.group.WORLD, 0, stride=3).squeeze(1).tolist()

    assert launch(first_rows, world_size=2) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert launch(first_rows, world_size=1) == [list(range(12))]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_frozen_weights(kind):
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

    launch(freeze, kind, world_size=2)


def test_an_input_that_needs_no_gradient_costs_no_communication():
    def first_layer():
        layer = ColumnParallelLinear(4, 8, dist.group.WORLD, gather_output=False)
        output, _ = layer(torch.ones(3, 4))
        with communication_log() as log:
            output.sum().backward()
        return len(log), layer.weight.grad is not None

    assert launch(first_layer, world_size=2) == [(0, True)] * 2


class Watch(TorchDispatchMode):
    """Notes the matrix products, in the order they are computed."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("sequence_parallel", "operation"), [(False, "all_reduce"), (True, "reduce_scatter_single")])
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(sequence_parallel, operation):
    def order(sequence_parallel, operation):
        place = operators if sequence_parallel else dist  # where the name is looked up
        events, original = [], getattr(place, operation)

        class Handle:
            def __init__(self, work):
                self.work = work

            def wait(self):
                events.append("arrived")
                self.work.wait()

        def started(*args, **kwargs):
            events.append("started")
            return Handle(original(*args, **kwargs))

        layer = ColumnParallelLinear(
            4, 8, dist.group.WORLD, gather_output=False, sequence_parallel=sequence_parallel, bias=False
        )
        output, _ = layer(torch.ones(2, 4, 4, requires_grad=True))
        setattr(place, operation, started)
        with Watch(events):
            output.sum().backward()
        setattr(place, operation, original)
        return events

    expected = ["product", "started", "product", "arrived"]
    assert launch(order, sequence_parallel, operation, world_size=2) == [expected] * 2


def layers_of_every_kind(group):
    options = {"keep_master_weight_for_test": True, "dtype": torch.float64}
    return [
        ColumnParallelLinear(5, 36, group, **options),
        ColumnParallelLinear(5, 36, group, stride=3, **options),
        RowParallelLinear(36, 5, group, **options),
        RowParallelLinear(36, 5, group, stride=3, **options),
        VocabParallelEmbedding(10, 3, group, **options),  # 10 words: rows of padding on 3 and on 4 ranks
        VocabParallelEmbedding(2, 3, group, **options),  # on 4 ranks, two have nothing but padding
    ]


def gather_and_cut(group):
    """What is gathered is the master weight, and the master cut again is the shard; for gradients and biases too."""
    torch.manual_seed(6)
    for layer in layers_of_every_kind(group):
        weight, master = layer.weight, layer.master_weight
        whole = gather_whole(weight, weight, group)
        assert torch.equal(whole, master)
        assert torch.equal(cut_like(master, weight, group), weight)
        gradient = master * 3
        weight.grad = cut_like(gradient, weight, group)
        assert weight.grad.shape == weight.shape
        assert torch.equal(gather_whole(weight.grad, weight, group), gradient)
    column, fused, row, *_ = layers_of_every_kind(group)
    (values,) = randoms((36,), dtype=torch.float64)
    for layer in (column, fused):  # the bias is cut as the weight's rows are
        layer.bias.data = cut_like(values, layer.bias, group)
        assert torch.equal(layer.bias, own_shard(values, group, 0, shard_of(layer.weight).stride))
        assert torch.equal(gather_whole(layer.bias, layer.bias, group), values)
    assert shard_of(row.bias) is None
    assert gather_whole(row.bias, row.bias, group) is row.bias
    assert cut_like(row.bias, row.bias, group) is row.bias


@pytest.mark.parametrize("world_size", SIZES)
def test_gather_whole_and_cut_like(world_size):
    launch(lambda: gather_and_cut(dist.group.WORLD), world_size=world_size)


def test_gathering_in_a_group_of_one_needs_no_world():
    gather_and_cut(group_of_one())


def test_parameters_say_how_they_are_cut():
    def shards():
        layers = layers_of_every_kind(dist.group.WORLD)
        return [tuple(shard_of(layer.weight)) for layer in layers], shard_of(nn.Linear(2, 2).weight)

    of_layers, of_plain = launch(shards, world_size=2)[0]
    assert of_layers == [(0, 36, 1), (0, 36, 3), (1, 36, 1), (1, 36, 3), (0, 10, 1), (0, 2, 1)]
    assert of_plain is None


def tied(sequence_parallel, bias):
    """A weight that embeds and predicts gets the sum of both gradients, as in one process."""
    group, dtype = dist.group.WORLD, torch.float64
    torch.manual_seed(8)
    layer = VocabParallelEmbedding(24, 6, group, keep_master_weight_for_test=True, dtype=dtype)
    ids = torch.randint(24, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    values, grad, x = randoms((24,), (BATCH, SEQUENCE, 24), (BATCH, SEQUENCE, 6), dtype=dtype)
    whole_bias = values.clone().requires_grad_() if bias else None
    whole_x, master = x.clone().requires_grad_(), layer.master_weight.clone().requires_grad_()
    expected = F.linear(F.embedding(ids, master) * whole_x, master, whole_bias)
    expected.backward(grad)

    mine = x.clone().requires_grad_()
    my_bias = own_shard(values, group, 0).requires_grad_() if bias else None
    hidden = sequence_slice(layer(ids) * mine, sequence_parallel)
    hidden.retain_grad()
    output = column_linear(hidden, layer.weight, my_bias, group, sequence_parallel)
    output.backward(own_shard(grad, group, -1))
    assert_same(output, own_shard(expected, group, -1), "output")
    if bias:
        assert_same(my_bias.grad, own_shard(whole_bias.grad, group, 0), "bias gradient")
    if not sequence_parallel:  # else each rank cut its slice by hand, and knows only its own part
        assert_same(mine.grad, whole_x.grad, "input gradient")
        assert_same(layer.weight.grad, own_shard(master.grad, group, 0), "weight gradient")


@pytest.mark.parametrize("world_size", SIZES)
def test_a_weight_shared_by_two_layers(world_size):
    def each_way():
        for case in product([False, True], [False, True]):
            tied(*case)

    launch(each_way, world_size=world_size)


def one_process_mlp(up, down):
    return lambda x: F.linear(F.gelu(F.linear(x, up)), down)


def one_process_attention(qkv, out, num_heads):
    def attention(x):
        q, k, v = F.linear(x, qkv).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(-3, -2) for part in (q, k, v))
        return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2), out)

    return attention


def block_parity(kind, sequence_parallel):
    group, dtype = dist.group.WORLD, torch.float64
    torch.manual_seed(2)
    options = {"sequence_parallel": sequence_parallel, "keep_master_weight_for_test": True, "dtype": dtype}
    if kind is ParallelMLP:
        block = ParallelMLP(24, 48, group, **options)
        column, row = block.up, block.down
        whole = one_process_mlp
    else:
        block = ParallelSelfAttention(24, 12, group, **options)
        column, row = block.qkv, block.out

        def whole(qkv, out):
            return one_process_attention(qkv, out, num_heads=12)

    masters = [layer.master_weight.clone().requires_grad_() for layer in (column, row)]
    x, grad = randoms((BATCH, SEQUENCE, 24), (BATCH, SEQUENCE, 24), dtype=dtype)
    whole_x = x.clone().requires_grad_()
    expected = whole(*masters)(whole_x)
    expected.backward(grad)

    mine = sequence_slice(x, sequence_parallel).clone().requires_grad_()
    with communication_log() as forward:
        output = block(mine)
    with communication_log() as backward:
        output.backward(sequence_slice(grad, sequence_parallel))
    assert_same(output, sequence_slice(expected, sequence_parallel), "output")
    assert_same(mine.grad, sequence_slice(whole_x.grad, sequence_parallel), "input gradient")
    stride = column.stride
    assert_same(column.weight.grad, own_shard(masters[0].grad, group, 0, stride), "first weight's gradient")
    assert_same(row.weight.grad, own_shard(masters[1].grad, group, 1), "second weight's gradient")
    return [[record.operation for record in log.records] for log in (forward, backward)]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("kind", [ParallelMLP, ParallelSelfAttention])
def test_block(kind, sequence_parallel, world_size):
    forward, backward = launch(block_parity, kind, sequence_parallel, world_size=world_size)[0]
    if world_size == 1:
        assert forward == backward == []
    elif sequence_parallel:
        assert forward == ["all_gather", "reduce_scatter"]
        # of the output's gradient; of the input again, for the weight gradient; of the input's; of the row's bias
        assert sorted(backward) == ["all_gather", "all_gather", "all_reduce", "reduce_scatter"]
    else:
        assert forward == backward == ["all_reduce"]


def embedding_parity(num_embeddings, sequence_parallel, dtype):
    group = dist.group.WORLD
    torch.manual_seed(4)
    options = {"keep_master_weight_for_test": True, "sequence_parallel": sequence_parallel, "dtype": dtype}
    layer = VocabParallelEmbedding(num_embeddings, 6, group, **options)
    reference = nn.Embedding(num_embeddings, 6, dtype=dtype)
    with torch.no_grad():
        reference.weight.copy_(layer.master_weight)
    ids = torch.randint(num_embeddings, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = torch.tensor([0, num_embeddings - 1, num_embeddings // 2])
    (grad,) = randoms((BATCH, SEQUENCE, 6), dtype=dtype)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, reference)]
    rows = layer.weight.size(0)

    def shard(weight):
        padded = F.pad(weight, (0, 0, 0, rows * group.size() - num_embeddings))
        return padded[group.rank() * rows : (group.rank() + 1) * rows]

    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        output, expected = layer(ids), reference(ids)
        output.backward(sequence_slice(grad, sequence_parallel))
        expected.backward(grad)
        assert_same(output, sequence_slice(expected, sequence_parallel), "output")
        assert_same(layer.weight.grad, shard(reference.weight.grad), "gradient")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(layer.weight, shard(reference.weight), "weight after two steps")


@pytest.mark.parametrize("world_size", SIZES)
def test_embedding(world_size):
    def all_embeddings():
        for size, sequence_parallel, dtype in product([24, 10, 3], [False, True], DTYPES):
            embedding_parity(size, sequence_parallel, dtype)

    launch(all_embeddings, world_size=world_size)


def cross_entropy_parity(vocab_size, label_smoothing, reduction, dtype, scale):
    group = dist.group.WORLD
    rows = -(-vocab_size // group.size())
    logits, weights = randoms((BATCH, SEQUENCE, vocab_size), (BATCH, SEQUENCE), dtype=dtype)
    logits = (logits * scale).requires_grad_()
    target = torch.randint(vocab_size, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    target[0, 1:3] = -100
    target[1, 0] = vocab_size - 1
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)
    grad = weights if reduction == "none" else torch.tensor(1.7, dtype=dtype)
    expected.backward(grad.flatten() if reduction == "none" else grad)

    def shard(x, value):
        padded = F.pad(x, (0, rows * group.size() - vocab_size), value=value)
        return padded.chunk(group.size(), -1)[group.rank()]

    mine = shard(logits.detach(), 99.0).clone().requires_grad_()  # padding of any value takes no part
    loss = vocab_parallel_cross_entropy(mine, target, group, vocab_size=vocab_size, **options)
    loss.backward(grad)
    assert_same(loss, expected.view(BATCH, SEQUENCE) if reduction == "none" else expected, "loss")
    assert_same(mine.grad, shard(logits.grad, 0.0), "gradient")


@pytest.mark.parametrize("world_size", SIZES)
def test_cross_entropy(world_size):
    def all_losses():
        for case in product([24, 10], [0.0, 0.1], ["mean", "sum", "none"], DTYPES, [1.0, 200.0]):
            cross_entropy_parity(*case)

    launch(all_losses, world_size=world_size)


def test_cross_entropy_sends_three_numbers_a_token():
    def count():
        logits = torch.randn(5, 1000, requires_grad=True)
        with communication_log() as log:
            vocab_parallel_cross_entropy(logits, torch.zeros(5, dtype=torch.long), dist.group.WORLD).backward()
        return [(record.operation, record.message_bytes) for record in log.records]

    assert launch(count, world_size=2)[0] == [("all_reduce", 5 * 4), ("all_reduce", 3 * 5 * 4)]


MISTAKES = {
    "tp_size=2 does not divide output_size=9: use tp_size 1, 3, 9, or output_size 8 or 10": lambda g: (
        ColumnParallelLinear(4, 9, g)
    ),
    "tp_size=2 does not divide input_size=7: use tp_size 1, 7, or input_size 6 or 8": lambda g: RowParallelLinear(
        7, 4, g
    ),
    "tp_size=2 * stride=3 does not divide output_size=8: use output_size 6 or 12": lambda g: ColumnParallelLinear(
        4, 8, g, stride=3
    ),
    "use gather_output=False with it": lambda g: ColumnParallelLinear(4, 8, g, sequence_parallel=True),
    "use input_is_parallel=True with it": lambda g: RowParallelLinear(4, 8, g, sequence_parallel=True),
    "has width 5, this layer takes input_size = 4": lambda g: ColumnParallelLinear(4, 8, g)(torch.ones(2, 5)),
    "has width 4, this layer takes input_size=4 / tp_size = 2": lambda g: RowParallelLinear(
        4, 8, g, input_is_parallel=True
    )(torch.ones(2, 4)),
    "ids contain 10, outside the vocabulary: words run from 0 to 9": lambda g: VocabParallelEmbedding(10, 4, g)(
        torch.tensor([1, 10])
    ),
    "ids contain -1, outside the vocabulary": lambda g: VocabParallelEmbedding(10, 4, g)(torch.tensor([[-1]])),
    "target contain 8, outside the vocabulary": lambda g: vocab_parallel_cross_entropy(
        torch.ones(1, 4), torch.tensor([8]), g
    ),
    "reduction='average' is unknown": lambda g: vocab_parallel_cross_entropy(
        torch.ones(1, 4), torch.tensor([0]), g, reduction="average"
    ),
    "tp_size=2 does not divide num_attention_heads=3": lambda g: ParallelSelfAttention(12, 3, g),
    "num_attention_heads=4 does not divide hidden_size=10: use hidden_size 12": lambda g: ParallelSelfAttention(
        10, 4, g
    ),
    "p=1.0 is not a probability to drop": lambda g: sharded_dropout(torch.ones(2), 1.0, g),
}


def test_mistakes_are_refused_before_any_communication():
    def refuse():
        for message, mistake in MISTAKES.items():
            with communication_log() as log, pytest.raises(ValueError) as error:  # noqa: PT012 - the log must end too
                torch.manual_seed(1)
                mistake(dist.group.WORLD)
            assert message in str(error.value)
            made = [record for record in log.records if record.message_bytes > 16]  # a layer made is checked once
            assert not made, message

    launch(refuse, world_size=2)


def test_a_report_names_the_line_of_the_learner():
    def work():
        ColumnParallelLinear(4, 9, dist.group.WORLD)

    with pytest.raises(RankFailed, match=r"ColumnParallelLinear\(4, 9, dist.group.WORLD\)"):
        launch(work, world_size=2)


def masks(layout):
    """The masks of this rank for a replicated and for a sharded tensor, and the same masks when recomputed."""
    groups = init_groups(layout)
    torch.manual_seed(7)
    seed_replicas(7, groups)
    dropout = ShardedDropout(0.5, groups.tp)

    def both(x):
        seen.append((F.dropout(x, 0.5).ne(0), dropout(x).ne(0)))
        return dropout(x) * x

    seen = []
    x = torch.ones(64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(both, x, use_reentrant=False).sum().backward()
    groups.close()
    first, again = seen
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "recomputation drew other masks"
    return first


def test_dropout_masks():
    """Same where replicated, different where sharded, different in each replica, replayed by recomputation."""
    layout = ParallelLayout(4, tp_size=2)  # tensor groups 0 1 and 2 3, which are two data replicas
    replicated, sharded = zip(*launch(masks, layout, world_size=4))
    assert torch.equal(replicated[0], replicated[1]) and torch.equal(replicated[2], replicated[3])
    assert not torch.equal(replicated[0], replicated[2])
    different = {tuple(mask.tolist()) for mask in sharded}
    assert len(different) == 4


def test_an_own_random_stream_leaves_the_common_one_as_if_one_number_was_drawn():
    def draw(how_many):
        torch.manual_seed(9)
        with own_random_stream(dist.group.WORLD, torch.device("cpu")):
            own = torch.rand(how_many)
        common = torch.rand(3)
        torch.manual_seed(9)
        torch.randint(1 << 40, ())
        return own[0].item(), common.tolist(), torch.rand(3).tolist()

    ranks = launch(draw, 5, world_size=3) + launch(draw, 50, world_size=3)
    assert len({own for own, _, _ in ranks}) == 3  # the same ranks draw the same, however much
    assert all(common == expected == ranks[0][1] for _, common, expected in ranks)


def test_dropout_keeps_the_mean_and_is_off_outside_training():
    def measure():
        dropout = ShardedDropout(0.25, dist.group.WORLD)
        x = torch.ones(100_000)
        return dropout(x).mean().item(), torch.equal(dropout.eval()(x), x)

    for mean, unchanged in launch(measure, world_size=2):
        assert mean == pytest.approx(1.0, abs=0.02)
        assert unchanged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_is_replayed_on_a_gpu():
    torch.cuda.set_device(0)
    assert launch(masks_on_gpu, world_size=1) == [True]


def masks_on_gpu():
    seen = []

    def drop(x):
        y = sharded_dropout(x, 0.5, dist.group.WORLD)
        seen.append(y.ne(0))
        return y * x

    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False).sum().backward()
    return torch.equal(*seen)
