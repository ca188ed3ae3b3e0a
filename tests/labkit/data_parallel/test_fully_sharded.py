"""Fully sharded training makes the steps of one process, sends what torch's `fully_shard` sends, and frees memory."""

import gc
import re
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.communication import communication_log
from course.parity import compare
from labkit.data_parallel import FullyShardedDataParallel, flat_parameter
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from tests.labkit.data_parallel.conftest import backward_alone, loss_of, world

WIDTH, ROWS, STEPS = 32, 4, 3
linear = partial(nn.Linear, WIDTH, WIDTH)


# -- models: `units` says which of their modules are units -------------------------------------------------------------


class Layer(nn.Module):
    """Two matrices; notes when it computes, forward and backward, if somebody listens."""

    def __init__(self, dtype=None):
        super().__init__()
        self.up, self.down = linear(dtype=dtype), linear(dtype=dtype)
        self.note = None

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        if self.note:
            self.note("forward")
            hidden.register_hook(lambda grad: self.note("backward"))
        return self.down(hidden)


class Layers(nn.Module):
    """Layers between two that belong to the root, the second of which may be tied to the first."""

    def __init__(self, num_layers=3, tied=False, dtype=None):
        super().__init__()
        self.first, self.last = linear(dtype=dtype), linear(dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(num_layers))
        self.units = list(self.layers)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Frozen(Layers):
    """A bias, a matrix and a whole layer are not trained, nor is the first."""

    def __init__(self):
        super().__init__()
        for frozen in (self.first, self.layers[0].up.bias, self.layers[1].down, self.layers[2]):
            frozen.requires_grad_(False)


class OneByOne(Layers):
    """Each rank's rows take an expert of their own, and nobody the third; a layer is left out on one rank."""

    def __init__(self):
        super().__init__(tied=True)
        self.layers[0].experts = nn.ModuleList(linear() for _ in range(3))
        self.layers[0].forward = lambda x: F.relu_(x) + self.layers[0].experts[int(x[0, 0] < 0)](x)
        self.layers[1].forward = lambda x: Layer.forward(self.layers[1], x) if x[0, 0] < 0 else x

    def forward(self, x):
        x = self.layers[0](x[:, 0, None] + self.first(x) * 1e-3)  # as the sign of x
        return self.last(self.layers[1](x))


class Repeated(Layers):
    """A layer that is called twice; one that takes and gives more than a tensor, and has a type of its own."""

    def __init__(self):
        super().__init__(num_layers=2)
        self.layers[1].down.double()
        self.layers[1].forward = self.several

    def several(self, x, *, scales):
        return {"up": (self.layers[1].up(x * scales[0]), 3)}, self.layers[1].down((x * scales[1]).double())

    def forward(self, x):
        x = self.first(x)
        y = self.layers[0](F.gelu(self.layers[0](x))) + self.layers[0](-x)
        out, also = self.layers[1](y, scales=[x, y])
        return self.last(out["up"][0] + also.to(x.dtype))


class Checkpointed(Layers):
    """Layers that are computed again in backward: one by one, or two together."""

    def __init__(self, use_reentrant):
        super().__init__(num_layers=4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for segment in (self.layers[0], self.layers[1], nn.Sequential(*self.layers[2:])):
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Unused(Layers):
    """A layer that nobody calls, and two parameters that nobody uses; odd shapes, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))
        self.layers[0].nothing = nn.Parameter(torch.empty(0, 3))
        self.layers[0].unused, self.unused = linear(bias=False), nn.Parameter(torch.ones(3))
        self.odd = nn.Linear(WIDTH, 5)
        self.odd.whole_number = nn.Parameter(torch.arange(3), requires_grad=False)
        self.units = [self.layers[2], self.layers[0], self.odd]  # not the order of forward

    def forward(self, x):
        return self.odd(self.layers[2](self.layers[0](self.first(x * self.number))))


MODELS = {
    "layers": Layers,
    "tied": partial(Layers, tied=True),
    "frozen": Frozen,
    "one by one": OneByOne,
    "repeated": Repeated,
    "checkpointed": partial(Checkpointed, use_reentrant=False),
    "checkpointed, reentrant": partial(Checkpointed, use_reentrant=True),
    "unused": Unused,
}


def make(name, seed=3):
    torch.default_generator.manual_seed(seed)
    return MODELS[name]()


def batches(num_parts, num_steps=STEPS, dtype=torch.float32):
    """For each step the rows of each rank; the first number has the same sign in all rows of a rank."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        parts = torch.randn(num_parts, ROWS, WIDTH, generator=generator, dtype=dtype)
        yield [torch.cat([part[:, :1].abs() * (-1) ** n, part[:, 1:]], dim=1) for n, part in enumerate(parts)]


def train_alone(module, steps, optimizer_class=torch.optim.AdamW, **options):
    """What all ranks together should do: the mean of the losses of all parts. Yield the state dict after each step."""
    optimizer = optimizer_class(module.parameters(), **options or dict(lr=0.05, weight_decay=0.1))
    for parts in steps:
        optimizer.zero_grad()
        backward_alone(module, parts)
        optimizer.step()
        yield {name: value.clone() for name, value in module.state_dict().items()}


def train(model, steps, optimizer=None, optimizer_class=torch.optim.AdamW, **options):
    optimizer = optimizer or optimizer_class(model.parameters(), **options or dict(lr=0.05, weight_decay=0.1))
    for parts in steps:
        optimizer.zero_grad()
        loss_of(model(parts[world().rank()])).backward()
        optimizer.step()
        yield model.state_dict()


def assert_same(steps, expected, what, tolerance=0.0):
    for number, (got, wanted) in enumerate(zip(steps, expected, strict=True), start=1):
        assert got.keys() == wanted.keys()
        for each in compare(got, wanted):
            assert each.error <= tolerance, f"{what}: {each} after step {number}"


def shard(module, group=None, **options):
    return FullyShardedDataParallel(module, group or world(), units=module.units, **options)


# -- parity ------------------------------------------------------------------------------------------------------------


def steps_of(name):
    exactly = name != "repeated"  # whose sums have more than two terms, which may be added in a different order
    dtype = torch.float32 if exactly else torch.float64
    module, alone = (make(name, seed).to(dtype) for seed in (3 + world().rank(), 3))  # what rank 0 has is what counts
    expected = list(train_alone(alone, batches(2, dtype=dtype)))
    assert_same(train(shard(module), batches(2, dtype=dtype)), expected, name, tolerance=0.0 if exactly else 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_one_process_to_the_last_bit(on_ranks, name):
    on_ranks(steps_of, name)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "Adam fused": (torch.optim.Adam, dict(lr=0.01, fused=True)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
}


def optimized(name, before):
    """An optimizer without states may also be made before: the parameters stay the same objects."""
    optimizer_class, options = OPTIMIZERS[name]
    module, alone = make("unused"), make("unused")
    early = optimizer_class(module.parameters(), **options) if before else None
    model = shard(module)
    steps = train(model, batches(2), early, optimizer_class, **options)
    assert_same(steps, list(train_alone(alone, batches(2), optimizer_class, **options)), name)
    assert all(p.grad is None for p in (module.unused, module.layers[1].up.weight, module.layers[0].unused.weight))


def test_any_optimizer_that_treats_numbers_one_by_one(on_ranks):
    for number, name in enumerate(OPTIMIZERS):
        on_ranks(optimized, name, number < 2)


def in_groups(hybrid):
    """Four ranks: one group of them all, or two replicas of two shards each."""
    with init_groups(ParallelLayout(4, tp_size=2)) as groups:
        group, replicas = (groups.tp, groups.dp) if hybrid else (world(), None)
        xs = list(batches(4, dtype=torch.float64))
        for name in ("one by one", "repeated")[: 1 + hybrid]:
            module, alone = make(name, seed=3 + world().rank()).double(), make(name).double()
            model = shard(module, group, replicate_group=replicas)
            assert_same(train(model, xs), list(train_alone(alone, xs)), name, tolerance=1e-10)
        model = shard(Layers(), group, replicate_group=replicas)
        with communication_log() as log:
            loss_of(model(torch.ones(1, WIDTH))).backward()
        sent = [(each.operation, each.group, each.message_bytes) for each in log.records]
        return [*map(tuple, map(dist.get_process_group_ranks, (groups.tp, groups.dp)))], sent


@pytest.mark.nccl_rules
@pytest.mark.parametrize("hybrid", [False, True])
def test_four_ranks(on_ranks, hybrid):
    root, layer = (4 * 2 * (WIDTH * WIDTH + WIDTH),) * 2
    for (tp, dp), sent in on_ranks(in_groups, hybrid, world_size=4):
        group = tp if hybrid else (0, 1, 2, 3)
        reduced = [(op, ranks, size) for op, ranks, size in sent if op != "all_gather"]
        assert [each for each in reduced if each[0] == "reduce_scatter"] == [
            ("reduce_scatter", group, size) for size in (layer, layer, layer, root)
        ]
        shards = [(ranks, size) for op, ranks, size in reduced if op == "all_reduce" and ranks == dp]
        flags = (dp, 4 * 16)  # one for each parameter
        assert shards == ([(dp, layer // 2)] * 3 + [(dp, root // 2), flags] if hybrid else [])


def bfloat16():
    """Gradients add up and travel in the type that their parameter says."""
    module, alone = make("layers").bfloat16(), make("layers").bfloat16()
    for p in (*module.parameters(), *alone.parameters()):
        p.grad_dtype = torch.float32
    model, parts = shard(module), [torch.randn(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(2)]
    for number, part in enumerate(parts):
        dist.broadcast(part, number)
        (loss_of(alone(part)) / 2).backward()
    with communication_log() as log:
        loss_of(model(parts[world().rank()])).backward()
    num_parameters = sum(p.numel() for p in alone.parameters())
    assert log.total_bytes("reduce_scatter") == 4 * num_parameters
    assert log.total_bytes("all_gather") == 2 * (num_parameters + 3 * num_parameters // 4)  # layers are 3/4 of them
    for mine, whole in zip(module.parameters(), alone.parameters()):
        assert mine.grad.dtype == torch.float32
        shards = [None, None]
        dist.all_gather_object(shards, mine.grad)
        assert torch.equal(torch.cat(shards), whole.grad.flatten())


def test_gradients_travel_in_their_own_type(on_ranks):
    on_ranks(bfloat16)


def batch_norm():
    torch.manual_seed(3 + world().rank())
    module = nn.Sequential(linear(), nn.Sequential(nn.BatchNorm1d(WIDTH), linear()))
    model = FullyShardedDataParallel(module, world(), units=module)  # with nothing for the root
    loss_of(model(torch.randn(ROWS, WIDTH))).backward()
    return [each.tolist() for each in module.buffers()]


def test_buffers_are_those_of_the_first_rank(on_ranks):
    one, other = on_ranks(batch_norm)
    assert one == other
    assert one[-1] == 1


# -- what is sent, and when --------------------------------------------------------------------------------------------


def traffic(reshard_after_forward):
    """All-gathers and reduce-scatters of one step, as ours and as torch's."""
    from torch.distributed.fsdp import fully_shard  # a second that only this test needs

    module, theirs = make("tied"), make("tied")
    for layer in theirs.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(theirs)
    logs, values = [], []
    for model in (shard(module, reshard_after_forward=reshard_after_forward), theirs):
        steps = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for [*parts] in batches(2, 2):
            with communication_log() as log:
                loss_of(model(parts[world().rank()])).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([(r.operation, r.message_bytes) for r in log.records if r.operation != "all_reduce"])
        assert steps[0] == steps[1]
        logs.append(sorted(steps[0]))
        whole = model.state_dict()
        values.append({n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in whole.items()})
    assert_same(values[:1], values[1:], "torch", tolerance=1e-6)
    return logs


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_messages_and_bytes_are_those_of_torch(on_ranks, reshard_after_forward):
    layer, root = 4 * 2 * (WIDTH * WIDTH + WIDTH), 4 * (WIDTH * WIDTH + 2 * WIDTH)
    gathered = [("all_gather", layer)] * (6 if reshard_after_forward else 3) + [("all_gather", root)]
    scattered = [("reduce_scatter", layer)] * 3 + [("reduce_scatter", root)]
    for ours, theirs in on_ranks(traffic, reshard_after_forward):
        assert ours == sorted(gathered + scattered)
        assert theirs == ours


class Message:
    """A message under way, which tells when somebody waits for it."""

    def __init__(self, work, note):
        self.work, self.note = work, note

    def wait(self):
        self.note()
        self.work.wait()


def events(prefetch):
    """What a rank does in one step, in order; for what it computes, the units that have memory then."""
    module, noted = make("layers"), []
    for number, layer in enumerate(module.layers, start=1):
        layer.extra = nn.Parameter(torch.zeros(WIDTH * number))  # so that a message's size says whose it is
    model = shard(module, prefetch=prefetch)
    numbers = {unit.flats[0].buffer.numel(): number for number, unit in enumerate(model._units)}

    def whole():
        return [n for n, unit in enumerate(model._units) if unit.flats[0].buffer.untyped_storage().size()]

    def noting(verb, start):
        def start_and_note(output, given, **options):
            what = f"{verb} {numbers[max(output.numel(), given.numel())]}"
            noted.append((what, []))
            return Message(start(output, given, **options), lambda: noted.append((f"wait: {what}", [])))

        return start_and_note

    for number, layer in enumerate(module.layers, start=1):
        layer.note = lambda verb, number=number: noted.append((f"{verb} {number}", whole()))
    gather = noting("gather", flat_parameter.all_gather_single)
    scatter = noting("scatter", flat_parameter.reduce_scatter_single)
    with patch.multiple(flat_parameter, all_gather_single=gather, reduce_scatter_single=scatter):
        loss_of(model(torch.ones(ROWS, WIDTH))).backward()
    assert whole() == []
    return noted


ONE_STEP = """
    gather 0, gather 1, wait: gather 0
    gather 2, wait: gather 1, forward 1
    gather 3, wait: gather 2, forward 2
    wait: gather 3, forward 3
    gather 3
    gather 2, wait: gather 3, backward 3, scatter 3
    gather 1, wait: gather 2, backward 2, wait: scatter 3, scatter 2
    wait: gather 1, backward 1, wait: scatter 2, scatter 1
    wait: scatter 1, scatter 0, wait: scatter 0
"""


def test_the_next_unit_and_the_gradients_of_the_last_travel_while_a_unit_computes(on_ranks):
    for noted in on_ranks(events, 1):
        assert [what for what, _ in noted] == ONE_STEP.strip().replace("\n    ", ", ").split(", ")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_memory_is_freed_and_few_units_are_whole_at_a_time(on_ranks, prefetch):
    for noted in on_ranks(events, prefetch):
        computed = [(what.split()[0], int(what[-1]), whole) for what, whole in noted if whole]
        assert len(computed) == 6
        for direction, number, whole in computed:
            ahead = range(number, 4) if direction == "forward" else range(number, 0, -1)
            assert whole == [0, *sorted(ahead[: 1 + prefetch])], (direction, number)


def held():
    module = make("unused")
    model = shard(module)
    loss_of(model(torch.ones(ROWS, WIDTH))).backward()
    shards = sum(p.numel() for p in model.parameters())
    assert all(p.untyped_storage().nbytes() <= 4 * (shards + 1000) for p in module.parameters())
    return [{name: p.numel() for name, p in module.named_parameters()} for module in (module, make("unused"))]


def test_the_ranks_divide_every_parameter(on_ranks):
    (one, whole), (other, _) = on_ranks(held)
    assert {name: one[name] + other[name] for name in whole} == whole
    assert abs(sum(one.values()) - sum(other.values())) < 0.05 * sum(whole.values())


def stale():
    """A unit that stays whole after forward is gathered again once an optimizer has changed it."""
    module, alone = make("layers"), make("layers")
    model, x = shard(module, reshard_after_forward=False), torch.ones(ROWS, WIDTH)
    loss_of(model(x)).backward()
    model(x)  # without a backward
    with communication_log() as log:
        assert model(x).grad_fn
    assert not log.records
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    alone.load_state_dict(model.state_dict())
    assert torch.equal(model(x), alone(x))
    with torch.no_grad():
        model(x)
    assert not any(flat.buffer.untyped_storage().size() for unit in model._units for flat in unit.flats)


def test_what_stays_whole_is_never_out_of_date(on_ranks):
    on_ranks(stale)


# -- accumulation ------------------------------------------------------------------------------------------------------


def context_of(model, how, is_last):
    if how == "each reduces":
        return model.reducing(is_last=is_last)
    return nullcontext() if how == "each sends" or (how == "the last sends" and is_last) else model.no_sync()


def accumulate(name, how, shard_size=None, **form):
    """Three micro-batches a step, twice; the second adds to what the first has left. Return what each sent."""
    num_parts = world().size()
    alone, module = make(name).double(), make(name).double()
    sent = []
    with init_groups(ParallelLayout(num_parts), shard_size) as groups:
        model = shard(module, groups.shard, replicate_group=groups.replicate, **form)
        for _ in range(2):
            with communication_log() as log, model.no_sync() if how == "each reduces" else nullcontext():
                for number, parts in enumerate(batches(num_parts, 3, dtype=torch.float64)):
                    backward_alone(alone, parts)
                    with context_of(model, how, is_last=number == 2):
                        loss_of(model(parts[world().rank()])).backward()
            with communication_log() as at_last:
                model.sync_gradients()
            in_backward = Counter((record.operation, len(record.group)) for record in log.records)
            sent.append((in_backward, [record.operation for record in at_last.records]))
        for each in (model, alone):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_same([model.state_dict()], [alone.state_dict()], f"{name}, {how}", tolerance=1e-10)
    return sent


HOW = {  # a model, the number of its units that are called, and how often each sends in backward
    "the last sends": ("one by one", 3, 1),
    "sync_gradients sends": ("frozen", 3, 0),
    "each sends": ("tied", 4, 3),
    "each reduces": ("layers", 4, 3),  # as a pipeline does: somebody waits much later
}


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_micro_batches_add_up_and_travel_when_they_should(on_ranks, how):
    name, num_units, times = HOW[how]
    [steps, _] = on_ranks(accumulate, name, how)
    for in_backward, at_last in steps:
        assert in_backward["reduce_scatter", 2] == times * num_units
        assert at_last.count("reduce_scatter") == (num_units if times == 0 else 0)
    [steps, _] = on_ranks(partial(accumulate, reshard_after_forward=False), "layers", how)
    for in_backward, _ in steps:
        assert in_backward["all_gather", 2] == 4 or how == "each sends"  # once a step


def test_replicas_hear_of_the_sum_over_micro_batches_once(on_ranks):
    """Shards add up inside the shard group, and cross to replicas once."""
    [steps, *_] = on_ranks(accumulate, "layers", "each reduces", 2, world_size=4)
    for in_backward, _ in steps:
        assert in_backward["reduce_scatter", 2] == 3 * 4
        assert 0 < in_backward["all_reduce", 2] <= 4  # the last wait for sync_gradients


# -- state dicts, and the life of the wrapper --------------------------------------------------------------------------


def state_dicts():
    plain, module = make("unused", seed=4), make("unused")
    model = shard(module)
    assert str(model.state_dict()) == str(make("unused").state_dict())
    model.load_state_dict(plain.state_dict())
    x = torch.ones(ROWS, WIDTH)
    assert torch.equal(model(x), plain(x))
    other = make("unused")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), plain(x))
    assert all(p.dim() == 1 for p in model.parameters())
    with pytest.raises(RuntimeError, match="size mismatch for first"):
        model.load_state_dict(plain.state_dict() | {"first.weight": torch.ones(WIDTH * WIDTH)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first.bias"'):
        model.load_state_dict({n: x for n, x in plain.state_dict().items() if n != "first.bias"})
    assert torch.equal(model(x), plain(x))


def test_the_state_dict_is_that_of_the_plain_module(on_ranks):
    on_ranks(state_dicts)


def dropped():
    """The module lives on, and with it the hooks; the wrapper and its group's threads must not."""
    module = make("layers")
    model = shard(module)
    loss_of(model(torch.ones(ROWS, WIDTH))).backward()
    wrapper, unit = weakref.ref(model), weakref.ref(model._units[0])
    gc.disable()
    try:
        del model
        return wrapper() is None and unit() is None
    finally:
        gc.enable()


def test_the_module_does_not_keep_its_wrapper_alive(on_ranks):
    assert on_ranks(dropped) == [True, True]


# -- what it refuses ---------------------------------------------------------------------------------------------------


REFUSED = {  # the names of units; None is a module of its own
    "units[1], a Linear, is not a unit of this Layers": ["layers.0", None],
    "a ModuleList, is not a unit of this Layers: name modules inside it that are": ["layers"],
    "units[0], a Layers, is not a unit of this Layers": [""],
    "units layers.0 and layers.0.up contain each other: leave one of them out": ["layers.0.up", "layers.0"],
    "units layers.1 and layers.1 contain each other": ["layers.1", "layers.1"],
    "first.weight (unit first) and last.weight (unit last) are one parameter in two units": ["first", "last"],
    "last.weight (the root) and first.weight (unit first) are one parameter in two units: make one unit of a module "
    "that has both, or leave both to the root": ["first"],
}


def refused(text):
    module = Layers(tied=True)
    units = [linear() if name is None else module.get_submodule(name) for name in REFUSED[text]]
    with communication_log() as log, pytest.raises(ValueError, match=re.escape(text)):
        FullyShardedDataParallel(module, world(), units=units)
    assert not log.records


@pytest.mark.parametrize("text", REFUSED)
def test_units_that_cannot_be_are_refused_before_any_message(on_ranks, text):
    on_ranks(refused, text)


def different():
    module = make("layers")
    module.layers[1].up = nn.Linear(WIDTH, WIDTH, bias=world().rank() == 0)
    with pytest.raises(ValueError, match=r"on ranks \[0\].*make the same module on every rank"):
        shard(module)


def test_different_parameters_on_the_ranks_are_refused(on_ranks):
    on_ranks(different)


def too_late():
    model = shard(make("layers"))
    x = torch.ones(ROWS, WIDTH)
    with pytest.raises(ValueError, match="this module is sharded already: load its state_dict into a new one"):
        shard(model.module)
    with pytest.raises(ValueError, match="cannot move or change its type: do that before you shard it"):
        model.double()
    with pytest.raises(ValueError, match=r"no backward\(create_graph=True\)"):
        loss_of(model(x)).backward(create_graph=True)
    model.module.layers[0].up.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="weight of a Linear is now frozen: change that before you shard it"):
        model(x)


def test_what_comes_too_late_is_refused(on_ranks):
    on_ranks(too_late)
