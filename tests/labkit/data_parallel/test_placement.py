"""Parameters of two kinds in one module, averaged over two groups; and modules that are made where they are sharded."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.groups import init_groups
from labkit.launch import RankFailed
from labkit.layout import ParallelLayout
from labkit.placement import Placement, placed_parameters, placements, set_placement
from tests.labkit.data_parallel.conftest import ROWS, linear, local_part, loss_of, world
from tests.support.storages import storages

WIDTH, STEPS = 6, 3


def test_chunks_may_have_equal_names():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    set_placement(other, "weight", Placement(grad_divisor=7))
    placed = placed_parameters(one, other)
    assert [placed[p].grad_divisor for p in (one.weight, one.bias, other.weight, other.bias)] == [None, None, 7, None]


class Layer(nn.Module):
    """A matrix that all ranks have, and one, `expert`, that pairs of ranks have."""

    def __init__(self):
        super().__init__()
        self.everywhere, self.expert = linear(), linear()

    def forward(self, x):
        x = torch.tanh(self.everywhere(x))
        return x + self.expert(x)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = linear(), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def is_expert(name):
    return "expert" in name


def place(module, full_name, placement):
    path, _, name = full_name.rpartition(".")
    set_placement(module.get_submodule(path), name, placement)


def make(seed):
    torch.manual_seed(seed)
    return Layers()


def two_kinds(wrapper, divisor):
    """Pairs (0, 1) and (2, 3) have experts of their own; everything else is the same on all four."""
    with init_groups(ParallelLayout(4, tp_size=2)) as groups:
        pair, rank = groups.tp, world().rank()
        first = dist.get_process_group_ranks(pair)[0]
        module, alone, experts = make(rank), make(0), make(first)  # what the first ranks have is what counts
        for (name, _), whole, expert in zip(module.named_parameters(), alone.parameters(), experts.parameters()):
            if is_expert(name):
                place(module, name, Placement(replica_group=pair, grad_divisor=divisor))
                whole.data = expert.data
        if wrapper == "sharded":
            model = FullyShardedDataParallel(module, world(), units=module.layers)
        else:
            model = DataParallel(module, world(), bucket_bytes=300)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, alone)]
        generator = torch.Generator().manual_seed(7)
        for _ in range(STEPS):
            parts = torch.randn(4, ROWS, WIDTH, generator=generator, dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model(parts[rank])).backward()
            mine = reference_gradients(alone, parts[rank], pair, divisor or 2)
            for p, grad in zip(alone.parameters(), mine):
                p.grad = grad
            placed = placements(module)
            for (name, p), grad in zip(module.named_parameters(), mine):
                flat = placed[name].flat
                assert torch.allclose(p.grad, local_part(grad, placed[name], p), rtol=0, atol=1e-12), name
                if flat is not None:
                    assert flat.shape == grad.shape and not flat.replicas
                    [group] = (each.groups for each in model._flats if any(p is of.shard for of in each.parameters))
                    assert group == (pair if is_expert(name) else world(),)
            for optimizer in optimizers:
                optimizer.step()
        if wrapper == "sharded":
            for (name, x), expected in zip(model.state_dict().items(), alone.state_dict().values()):
                assert torch.allclose(x, expected, rtol=0, atol=1e-10), name


def reference_gradients(alone, part, pair, divisor):
    """By hand: this rank's own gradients, added up over the four ranks or over the pair."""
    alone.zero_grad()
    loss_of(alone(part)).backward()
    gradients = []
    for name, p in alone.named_parameters():
        total = p.grad.clone()
        dist.all_reduce(total, group=pair if is_expert(name) else world())
        gradients.append(total / (divisor if is_expert(name) else 4))
    return gradients


@pytest.mark.parametrize("wrapper", ["plain", "sharded"])
def test_parameters_of_two_kinds_are_averaged_over_two_groups(on_ranks, wrapper):
    for divisor in (None, 8):
        on_ranks(two_kinds, wrapper, divisor, world_size=4)


def hybrid(divided):
    """Four ranks have the same of both kinds; the experts' shards are of four, or (``divided``) of two, as the rest."""
    with init_groups(ParallelLayout(4), shard_size=2) as groups:
        module, alone, rank = make(world().rank()), make(0), world().rank()
        for name, _ in module.named_parameters():
            if is_expert(name):
                place(module, name, Placement(replica_group=world(), grad_divisor=8))
        pair = groups.replicate, groups.shard
        options = dict(units=module.layers, replicate_group=groups.replicate)
        own_groups = {world(): pair} if divided else None
        model = FullyShardedDataParallel(module, groups.shard, own_groups=own_groups, **options)
        parts = torch.randn(2, 4, ROWS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        for rows in parts[:, rank]:
            loss_of(model(rows)).backward()
        grads = [reference_gradients(alone, rows, world(), 8) for rows in parts[:, rank]]
        placed = placements(model)
        for (name, p), *both in zip(module.named_parameters(), *grads):
            placement = placed[f"module.{name}"]
            assert placement.flat.replicas == ((groups.replicate,) if divided or not is_expert(name) else ())
            assert torch.allclose(p.grad, local_part(sum(both), placement, p), rtol=0, atol=1e-12), name
        return [p.numel() for name, p in module.named_parameters() if is_expert(name)]


@pytest.mark.parametrize("divided", [False, True])
def test_parameters_with_a_group_of_their_own_are_sharded_over_it_or_over_a_part(on_ranks, divided):
    numbers = [sum(sizes) for sizes in on_ranks(hybrid, divided, world_size=4)]
    assert sum(numbers) == sum(p.numel() for n, p in make(0).named_parameters() if is_expert(n)) * (1 + divided)


def too_few():
    module = make(0)
    set_placement(module.first, "weight", Placement(replica_group=world()))
    with init_groups(ParallelLayout(4), shard_size=2) as groups:
        own_groups = {world(): (None, groups.shard)}
        FullyShardedDataParallel(module, groups.shard, units=[], own_groups=own_groups)


def test_groups_that_are_not_all_of_their_replica_group_are_refused(on_ranks):
    with pytest.raises(RankFailed, match="own_groups have 2 ranks in all, but their replica_group has 4: divide those"):
        on_ranks(too_few, world_size=4)


# -- made on the meta device -------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Numbers in a buffer, and a parameter in two places."""

    def __init__(self, tied):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.tied = tied

    def reset_parameters(self):
        with torch.no_grad():
            self.count.copy_(torch.arange(3.0))
            self.scale.fill_(0.5)

    def forward(self, x):
        return self.tied(x * self.scale) + self.count.sum()


def on_meta(device):
    with torch.device(device):
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        layers = [nn.Sequential(each, nn.LayerNorm(WIDTH)) for each in linears]
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.BatchNorm1d(WIDTH))
        module.append(Table(module[0]))
    module[2][0].bias.requires_grad_(False)
    set_placement(module[1][0], "weight", Placement(grad_divisor=2))
    module[1][1].weight.grad_dtype = torch.float64
    module[1][1].weight.note = "kept"
    return module


def made(wrapper):
    def parallel(module):
        torch.manual_seed(world().rank())  # what rank 0 draws is what counts
        if wrapper == "plain":
            return DataParallel(module, world())
        return FullyShardedDataParallel(module, world(), units=module[1:4])

    module = on_meta("meta")
    model = parallel(module)
    assert module[5].tied is module[0] and not module[2][0].bias.requires_grad
    weight = module[1][1].weight
    assert weight.note == "kept" and placements(module)["1.0.weight"].grad_divisor == 2
    assert weight.grad_dtype == torch.float64
    plain = on_meta("cpu")
    torch.manual_seed(0)
    order = [plain] if wrapper == "plain" else [*reversed(plain[1:4]), plain]
    done = set()
    for each in (each for part in order for each in part.modules()):  # as it was made
        if each not in done and hasattr(each, "reset_parameters"):
            each.reset_parameters()
        done.add(each)
    values = model.state_dict()
    for name, expected in plain.state_dict().items():
        assert torch.equal(values[name], expected), name
    x = torch.randn(ROWS, WIDTH)
    dist.broadcast(x, 0)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss_of(each(x)).backward()
        if wrapper == "plain":
            assert module[1][0].weight.grad is not None
        plain[1][0].weight.grad = None
        optimizer.step()
    values, expected = model.state_dict(), plain.state_dict()
    for name in expected.keys() - {"1.0.weight"}:
        assert torch.allclose(values[name], expected[name], atol=1e-6), name


@pytest.mark.parametrize("wrapper", ["plain", "sharded"])
def test_a_module_on_the_meta_device_is_made_as_the_first_rank_makes_it(on_ranks, wrapper):
    on_ranks(made, wrapper)


def bytes_in_use():
    return sum(storages().values())


class Watched(nn.Linear):
    def reset_parameters(self):
        super().reset_parameters()
        if not self.weight.is_meta:
            most.append(bytes_in_use())


most: list[int] = []


def test_a_rank_never_holds_more_than_its_shards_and_one_unit():
    """One rank whose messages go nowhere: gloo's threads would free what was sent, sooner or later."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        bytes_while_it_is_made()
    finally:
        dist.destroy_process_group()


def bytes_while_it_is_made():
    width, num_layers = 64, 10
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Sequential(Watched(width, width), nn.LayerNorm(width)) for _ in range(num_layers)))
    most.clear()
    before = bytes_in_use()
    FullyShardedDataParallel(module, world(), units=module)
    unit = 4 * (width * width + 3 * width)
    assert len(most) == num_layers
    assert max(most) - before <= num_layers * unit / world().size() + unit + 4096
    assert max(most) - before > unit + (num_layers - 1) * unit / world().size() - 4096  # it did look


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))


def unfillable():
    for device_of in ("parameter", "buffer"):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), NoReset())
            if device_of == "buffer":
                module[1].table = None
                module[1].register_buffer("angles", torch.ones(3))
        name = "table" if device_of == "parameter" else "angles"
        for wrap in (lambda m: DataParallel(m, world()), lambda m: FullyShardedDataParallel(m, world(), units=[])):
            with pytest.raises(ValueError, match=f"{name} of 1 is on the meta device, and .* give NoReset a reset_par"):
                wrap(module)
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), module[1])


def test_what_nobody_can_fill_is_refused(on_ranks):
    on_ranks(unfillable)


def in_16_bits():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataParallel(nn.Linear(2, 2).bfloat16(), world())
        DataParallel(nn.Linear(2, 2), world())
    texts = [str(each.message) for each in caught if "16 bits" in str(each.message)]
    return texts


def test_gradients_in_16_bits_are_announced(on_ranks):
    for texts in on_ranks(in_16_bits):
        [text] = texts
        assert "set parameter.grad_dtype = torch.float32" in text


def placements_stay():
    """The rest of a placement, and the old flat index."""
    module = make(0)
    set_placement(module.first, "weight", Placement(defer_grad_reduce=True))
    FullyShardedDataParallel(module, world(), units=module.layers)
    placement = placements(module)["first.weight"]
    assert replace(placement, flat=None) == Placement(defer_grad_reduce=True)
    return [placement.flat.shape, placement.flat.start, module.first.weight.numel()]


def test_a_placement_says_which_numbers_a_rank_has(on_ranks):
    (shape, start, numel), (_, other_start, other) = on_ranks(placements_stay)
    assert shape == (WIDTH, WIDTH) and (start, other_start) == (0, numel) and numel + other == WIDTH * WIDTH
