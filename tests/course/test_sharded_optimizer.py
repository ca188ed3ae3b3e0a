"""An optimizer whose states are divided among the ranks makes the same steps as undivided, bit by bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from course.communication import communication_log
from course.sharded_optimizer import ShardedOptimizer
from labkit.data_parallel import DataParallel
from labkit.groups import init_groups
from labkit.layout import ParallelLayout
from tests.labkit.data_parallel.conftest import ROWS, WIDTH, linear, loss_of, world

STEPS = 4
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=0.1)),
    "SGD with momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "Adam": (torch.optim.Adam, dict(lr=0.01)),
    "Adam one by one": (torch.optim.Adam, dict(lr=0.01, foreach=False, amsgrad=True)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1)),
    "AdamW foreach": (torch.optim.AdamW, dict(lr=0.01, foreach=True)),
    "AdamW fused": (torch.optim.AdamW, dict(lr=0.01, fused=True)),
    "AdamW, lr a tensor": (torch.optim.AdamW, dict(lr=torch.tensor(0.01), foreach=False)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.1)),
    "RMSprop": (torch.optim.RMSprop, dict(lr=0.01, momentum=0.5)),
    "NAdam": (torch.optim.NAdam, dict(lr=0.01)),
}


class Tied(nn.Module):
    """A weight used twice, one that is frozen, one that nobody uses, and a number."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.frozen, self.unused = (linear(bias=bias) for _ in range(3))
        self.last = linear(WIDTH, 5, bias=bias)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(F.gelu(F.linear(F.gelu(self.frozen(F.gelu(self.first(x)))), self.first.weight)))


def make(optimizer_class=None):
    torch.default_generator.manual_seed(3)
    return Tied(bias=optimizer_class is None or optimizer_class.__name__ != "Muon")  # which takes matrices only


def batches(num_steps=STEPS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(num_steps)]


def train(module, optimizer, xs=None, scheduler=None):
    """Make steps on whole batches, the same on every rank, and yield the weights after each."""
    for x in batches() if xs is None else xs:
        optimizer.zero_grad()
        loss_of(module(x)).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        yield [p.detach().clone() for p in module.parameters()]


def assert_equal(weights_of_steps, others):
    """Bit by bit: every operation of these optimizers is on one number, whoever else has a piece."""
    number = 0
    for number, (weights, expected) in enumerate(zip(weights_of_steps, others, strict=True), 1):
        assert all(map(torch.equal, weights, expected)), f"step {number}"
    assert number > 0


def pair(optimizer_class, params_of=nn.Module.parameters, **options):
    """A module with the plain optimizer and one with ours."""
    plain, divided = make(optimizer_class), make(optimizer_class)
    ours = ShardedOptimizer(params_of(divided), optimizer_class, world(), **options)
    return plain, optimizer_class(params_of(plain), **options), divided, ours


# -- the same weights --------------------------------------------------------------------------------------------------


def as_plain(name):
    optimizer_class, options = OPTIMIZERS[name]
    plain, optimizer, divided, ours = pair(optimizer_class, **options)
    expected = list(train(plain, optimizer))
    assert not torch.equal(expected[0][0], expected[-1][0])
    assert_equal(train(divided, ours), expected)


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in OPTIMIZERS), ("AdamW", 4)])
def test_steps_equal_those_of_the_plain_optimizer(on_ranks, name, world_size):
    on_ranks(as_plain, name, world_size=world_size)


def with_data_parallel(world_size):
    """Rows divided, gradients averaged, states divided: against one process on the whole batch, undivided."""
    alone, module = make(), make()
    model = DataParallel(module, world(), bucket_bytes=200)
    options = dict(lr=0.01, weight_decay=0.1)
    ours = ShardedOptimizer(model.parameters(), torch.optim.AdamW, world(), **options)
    expected = train(alone, torch.optim.AdamW(alone.parameters(), **options))
    steps = train(model, ours, [x.chunk(world_size)[world().rank()] for x in batches()])
    for weights, others in zip(steps, expected, strict=True):
        for one, other in zip(weights, others):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 3])
def test_together_with_averaged_gradients(on_ranks, world_size):
    on_ranks(with_data_parallel, world_size, world_size=world_size)


def two_groups(module):
    """Weights decay, biases learn faster."""
    named = list(module.named_parameters())
    return [
        dict(params=[p for name, p in named if name.endswith("weight")], weight_decay=0.1, lr=0.01),
        dict(params=[p for name, p in named if name.endswith("bias")], weight_decay=0.0, betas=(0.5, 0.9)),
    ]


def parameter_groups():
    plain, optimizer, divided, ours = pair(torch.optim.AdamW, two_groups, lr=0.05)
    assert_equal(train(divided, ours), list(train(plain, optimizer)))
    for each, other in zip(ours.param_groups, optimizer.param_groups, strict=True):
        assert each.keys() == other.keys()
        assert all(each[key] == other[key] for key in each if key != "params")
    plain, optimizer, divided, ours = pair(torch.optim.AdamW, nn.Module.named_parameters, lr=0.05)
    assert_equal(train(divided, ours), list(train(plain, optimizer)))


def test_parameter_groups_keep_their_own_options(on_ranks):
    on_ranks(parameter_groups)


SCHEDULERS = [
    lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    lambda optimizer: OneCycleLR(optimizer, max_lr=[0.05, 0.1], total_steps=STEPS),  # changes betas too
]


def scheduled(scheduler_of):
    plain, optimizer, divided, ours = pair(torch.optim.AdamW, two_groups, lr=0.05)
    expected = list(train(plain, optimizer, scheduler=scheduler_of(optimizer)))
    assert_equal(train(divided, ours, scheduler=scheduler_of(ours)), expected)
    assert ours.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.01


@pytest.mark.parametrize("number", range(len(SCHEDULERS)))
def test_a_schedule_of_learning_rates(on_ranks, number):
    on_ranks(scheduled, SCHEDULERS[number])


def closure():
    plain, optimizer, divided, ours = pair(torch.optim.SGD, lr=0.1, momentum=0.9)
    for x in batches(3):
        losses = []
        for module, each in ((plain, optimizer), (divided, ours)):

            def compute(module=module, each=each, x=x):
                each.zero_grad()
                loss = loss_of(module(x))
                loss.backward()
                return loss

            losses.append(each.step(compute))
        assert torch.equal(*losses)
        assert all(map(torch.equal, plain.parameters(), divided.parameters()))


def test_a_closure_is_called_and_its_loss_returned(on_ranks):
    on_ranks(closure)


def gradients_of_none():
    plain, optimizer, divided, ours = pair(torch.optim.Adam, lr=0.1)
    before = [p.detach().clone() for p in divided.parameters()]
    ours.step()  # nobody has a gradient yet
    assert all(map(torch.equal, divided.parameters(), before))
    assert_equal(train(divided, ours), list(train(plain, optimizer)))
    ours.zero_grad()
    assert all(p.grad is None for p in divided.parameters())


def test_a_step_without_gradients_changes_nothing(on_ranks):
    on_ranks(gradients_of_none)


# -- who owns what -----------------------------------------------------------------------------------------------------


def few_parameters():
    torch.manual_seed(3)
    plain, divided = (nn.Linear(WIDTH, 1, dtype=torch.float64) for _ in range(2))
    divided.load_state_dict(plain.state_dict())
    ours = ShardedOptimizer(divided.parameters(), torch.optim.AdamW, world(), lr=0.1)
    assert_equal(train(divided, ours), list(train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))))
    return len(ours.state_dict()["state"])


def test_more_ranks_than_parameters(on_ranks):
    assert on_ranks(few_parameters, world_size=4) == [2] * 4  # whole, on every rank


class Odd(nn.Module):
    """Several types, a number, nothing at all, and an image filter in a different memory order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=t) for t in (torch.float32, torch.float64, torch.bfloat16))
        self.number, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def odd_parameters():
    torch.manual_seed(world().rank())  # what the owner has is what counts after a step: here the start must be alike
    plain, divided = Odd(), Odd()
    DataParallel(plain, world())
    divided.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    ours = ShardedOptimizer(divided.parameters(), torch.optim.AdamW, world(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for one, other in zip(plain.parameters(), divided.parameters()):
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
            other.grad = one.grad.clone()
        optimizer.step()
        ours.step()
        assert all(map(torch.equal, plain.parameters(), divided.parameters()))
    plain.load_state_dict(divided.state_dict())
    return sorted(map(str, {p.dtype for p in divided.parameters()}))


def test_parameters_of_several_types_and_shapes(on_ranks):
    types = ["torch.bfloat16", "torch.float32", "torch.float64"]
    assert on_ranks(odd_parameters) == [types] * 2


def bytes_of(optimizer):
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x.untyped_storage().nbytes() for x in tensors if x.dim() > 0)  # not the count of steps


def memory(optimizer_class, num_layers):
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
    ours = ShardedOptimizer(module.parameters(), optimizer_class, world(), lr=0.1)
    list(train(module, ours, [torch.randn(ROWS, 64)]))
    before = bytes_of(ours)
    ours.load_state_dict(ours.state_dict())
    return before, bytes_of(ours)


@pytest.mark.parametrize(("optimizer_class", "bytes_per_parameter"), [(torch.optim.Adam, 8), (torch.optim.Adagrad, 4)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_keeps_its_part_of_the_states(on_ranks, optimizer_class, bytes_per_parameter, world_size):
    """Psi parameters of 4 bytes, 8 bytes of states each for Adam: 8 Psi / d where d divides the layers evenly."""
    num_parameters = 4 * (64 * 64 + 64)
    expected = bytes_per_parameter * num_parameters / world_size
    assert on_ranks(memory, optimizer_class, 4, world_size=world_size) == [(expected, expected)] * world_size


def one_large_embedding():
    torch.manual_seed(3)
    module = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 4))
    ours = ShardedOptimizer(module.parameters(), torch.optim.Adam, world(), lr=0.1)
    list(train(module, ours, [torch.arange(8)]))
    return bytes_of(ours)


def test_a_large_embedding_is_divided_too(on_ranks):
    """Dealt out whole, it would be one rank's alone. Padding counts for nothing, and is at most 16 numbers each."""
    counts = [each / 8 for each in on_ranks(one_large_embedding, world_size=4)]
    assert sum(counts) == 500 * 16 + 16 * 4 + 4
    assert max(counts) - min(counts) <= 16


def messages_of_a_step():
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ours = ShardedOptimizer(module.parameters(), torch.optim.AdamW, world(), lr=0.1)
    loss_of(module(torch.randn(ROWS, 64))).backward()
    with communication_log() as log:
        ours.step()
    return [record.message_bytes for record in log.records]


def test_a_step_sends_what_an_all_reduce_would(on_ranks):
    """Its two halves: gradients are reduce-scattered, weights gathered. A flag of 4 bytes for each parameter."""
    whole = 4 * 2 * (64 * 64 + 64)
    assert on_ranks(messages_of_a_step) == [[whole, 4 * 4, whole]] * 2


def within_dp_group():
    """Two tensor ranks with other weights each: their data-parallel groups divide their own states."""
    with init_groups(ParallelLayout(4, tp_size=2)) as groups:
        results = []
        for divided in (False, True):
            torch.manual_seed(groups.coords.tp)
            module = nn.Sequential(linear(), nn.GELU(), linear())
            if divided:
                optimizer = ShardedOptimizer(module.parameters(), torch.optim.Adam, groups.dp, lr=0.1)
            else:
                optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
            results.append(list(train(module, optimizer)))
        assert_equal(*results)
        return len(optimizer.state)


def test_within_the_data_parallel_groups_of_a_layout(on_ranks):
    assert on_ranks(within_dp_group, world_size=4) == [4] * 4


# -- states that are saved ---------------------------------------------------------------------------------------------

OF_STATES = {
    "AdamW": (torch.optim.AdamW, dict(lr=0.05)),
    "SGD with momentum": (torch.optim.SGD, dict(lr=0.05, momentum=0.9)),
}


def parts(name):
    """The state dicts of all ranks, after two steps; and of the plain optimizer, the weights of two more."""
    optimizer_class, options = OF_STATES[name]
    plain, optimizer, divided, ours = pair(optimizer_class, two_groups_of_any, **options)
    list(train(plain, optimizer, batches()[:2]))
    list(train(divided, ours, batches()[:2]))
    middle = [p.detach().clone() for p in plain.parameters()]
    after = list(train(plain, optimizer, batches()[2:]))
    return ours.state_dict(), middle, after


def two_groups_of_any(module):
    named = list(module.named_parameters())
    weights, biases = ([p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias"))
    return [dict(params=weights, weight_decay=0.1), dict(params=biases, lr=0.1)]


def continued(name, state_dict, middle, after, divided):
    """A new module and a new optimizer, with other options, go on from the state dict."""
    optimizer_class, options = OF_STATES[name]
    module = make()
    with torch.no_grad():
        for p, value in zip(module.parameters(), middle):
            p.copy_(value)
    options = options | {"lr": 7.0}
    if divided:
        optimizer = ShardedOptimizer(two_groups_of_any(module), optimizer_class, world(), **options)
    else:
        optimizer = optimizer_class(two_groups_of_any(module), **options)
    optimizer.load_state_dict(copy.deepcopy(state_dict))  # torch takes the tensors themselves, and changes them
    assert_equal(train(module, optimizer, batches()[2:]), after)
    return sorted(optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", OF_STATES)
@pytest.mark.parametrize("loading_ranks", [2, 4])
def test_states_go_into_a_plain_optimizer_and_into_any_number_of_ranks(on_ranks, name, loading_ranks):
    (state_dict, middle, after), (other, *_) = on_ranks(parts, name, world_size=2)
    for number, state in state_dict["state"].items():
        assert all(torch.equal(state[key], other["state"][number][key]) for key in state)
    keys = sorted(state_dict["state"])
    assert continued(name, state_dict, middle, after, False) == keys
    assert (
        on_ranks(continued, name, state_dict, middle, after, True, world_size=loading_ranks) == [keys] * loading_ranks
    )


def after_a_load(state_dict):
    ours = ShardedOptimizer(make().parameters(), torch.optim.AdamW, world(), lr=0.1)
    ours.load_state_dict(copy.deepcopy(state_dict))
    return {number: state["exp_avg"] for number, state in ours.state_dict()["state"].items()}


def test_a_plain_optimizers_states_are_whole_though_some_parameters_have_none(on_ranks):
    module = make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    list(train(module, optimizer, batches(1)))
    expected = {number: state["exp_avg"] for number, state in optimizer.state_dict()["state"].items()}
    for loaded in on_ranks(after_a_load, optimizer.state_dict(), world_size=3):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[number], expected[number]) for number in expected)


# -- what it refuses ---------------------------------------------------------------------------------------------------


def refused(make_it):
    try:
        make_it(make())
    except ValueError as error:
        return str(error)


def later(module):
    optimizer = ShardedOptimizer(module.first.parameters(), torch.optim.Adam, world(), lr=0.1)
    optimizer.add_param_group({"params": list(module.last.parameters())})


def test_what_it_cannot_divide_is_refused(on_ranks):
    def lbfgs(module):
        ShardedOptimizer(module.parameters(), torch.optim.LBFGS, world())

    def adafactor(module):
        ShardedOptimizer(module.parameters(), torch.optim.Adafactor, world())

    for text in on_ranks(refused, adafactor):
        assert text.startswith("Adafactor does not treat numbers one by one")
    for text in on_ranks(refused, lbfgs):
        assert text.startswith("LBFGS does not treat numbers one by one")
    for text in on_ranks(refused, later):
        assert "give it all groups when it is made" in text


def test_no_parameters_at_all_is_what_torch_refuses(on_ranks):
    for text in on_ranks(refused, lambda module: ShardedOptimizer([], torch.optim.Adam, world())):
        assert "empty parameter list" in text
