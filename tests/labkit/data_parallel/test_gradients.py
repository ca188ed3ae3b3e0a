"""Parity: on any number of ranks the averaged gradients and the weights are those of one process on the whole batch."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from course.communication import communication_log
from labkit.data_parallel import DataParallel, average_gradients
from labkit.launch import RankFailed
from tests.labkit.data_parallel.conftest import ROWS, WIDTH, linear, loss_of, world

STEPS = 3
FORMS = {
    "a message each": dict(bucket_bytes=0, overlap=False),
    "bucketed": dict(bucket_bytes=300, overlap=False),
    "one bucket": dict(overlap=False),
    "overlapped": dict(bucket_bytes=300),
    "overlapped, a message each": dict(bucket_bytes=0),
    "default": dict(),
}


# -- models: each a function that makes the module, the same one every time --------------------------------------------


class Tied(nn.Module):
    """A weight that is used three times: at the bottom, in the middle and on top."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.last.weight = self.first.weight

    def forward(self, x):
        return F.linear(self.last(F.gelu(self.first(x))), self.first.weight)


class Frozen(nn.Module):
    """Some parameters are not trained: a bias, and a whole layer between two that are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU(), linear())
        self.layers[0].bias.requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


class Unused(nn.Module):
    """A parameter that no rank ever uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.last = linear(), linear(), linear()

    def forward(self, x):
        return self.last(F.gelu(self.used(x)))


class Experts(nn.Module):
    """Of two experts, the positive rows take one and the negative rows the other; nobody takes the third.

    A rank whose rows are all positive has no gradient for the second expert.
    """

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(3))
        self.last = linear()

    def forward(self, x):
        mine = x[:, 0] < 0
        parts = [F.gelu(self.experts[which](x[mine == which])) for which in (0, 1) if (mine == which).any()]
        return self.last(torch.cat(parts))


class Checkpointed(nn.Module):
    """The inner layers are computed a second time during backward; both segments may share a weight."""

    def __init__(self, use_reentrant, tied):
        super().__init__()
        self.segments = nn.ModuleList(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(2))
        if tied:
            self.segments[1][0].weight = self.segments[0][0].weight
        self.first, self.last, self.use_reentrant = linear(), linear(), use_reentrant

    def forward(self, x):
        x = self.first(x)
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Types(nn.Module):
    """Layers of three types in turn, so that the layers of a bucket are not neighbours in the model."""

    def __init__(self):
        super().__init__()
        types = torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float32
        self.layers = nn.ModuleList(linear(dtype=dtype) for dtype in types)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x.to(layer.weight.dtype)))
        return x.double()


class Shapes(nn.Module):
    """Parameters that are not matrices: a number, nothing at all, and image filters in a different memory order."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        conv = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
        self.conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(0.1 * torch.randn(WIDTH, 9, dtype=torch.float64).T)

    def forward(self, x):
        images = x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1)
        return self.conv(images).flatten(1)[:, :9] @ self.turned * self.scale + self.nothing.sum()


def deep_mlp():
    return nn.Sequential(*(layer for _ in range(4) for layer in (linear(), nn.GELU())))


MODELS = {
    "deep MLP": deep_mlp,
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    "experts": Experts,
    "checkpointed": lambda: Checkpointed(use_reentrant=False, tied=True),
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True, tied=False),
    "types": Types,
    "shapes": Shapes,
}
TOLERANCE = {"types": 0.02}
"""Relative to the largest element; otherwise 1e-10. In bfloat16, sums of different rows differ in the third digit."""


def make(name, seed=3):
    torch.default_generator.manual_seed(seed)
    return MODELS[name]()


def batches(num_ranks, num_steps=STEPS):
    """The whole batch of each step. The first column has the same sign in all rows of a rank, for the experts."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        signs = (torch.arange(num_ranks) % 2 * -2 + 1).repeat_interleave(ROWS // num_ranks)
        x[:, 0] = x[:, 0].abs() * signs
        yield x


def train(module, model, x_of_steps, set_to_none=True, after_backward=None):
    """Make steps; yield after each the gradients and the weights by name. ``model`` is the module, or wraps it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for x in x_of_steps:
        optimizer.zero_grad(set_to_none)
        loss_of(model(x)).backward()
        if after_backward:
            after_backward(module)
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        optimizer.step()
        yield gradients, {name: p.detach().clone() for name, p in module.named_parameters()}


def mine_of(xs, group=None):
    group = group or world()
    return [x.chunk(group.size())[group.rank()] for x in xs]


def assert_same(got, expected, what, exactly=False, tolerance=1e-10):
    assert got.keys() == expected.keys(), what
    for name in got:
        one, other = got[name], expected[name]
        assert (one is None) == (other is None), f"{what}, {name}: {one} and {other}"
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            error = (one - other).abs().max().item() if one.numel() else 0.0
            largest = other.abs().max().item() if one.numel() else 0.0
            allowed = 0.0 if exactly else tolerance * largest
            assert error <= allowed, f"{what}, {name}: {error} off, where the largest is {largest}"


def assert_same_gradients(module, alone, what):
    assert_same(*({name: p.grad for name, p in each.named_parameters()} for each in (module, alone)), what)


def assert_same_training(steps, expected, what, **how):
    number = 0
    for number, (one, other) in enumerate(zip(steps, expected, strict=True), 1):
        assert_same(one[0], other[0], f"{what}: gradients of step {number}", **how)
        assert_same(one[1], other[1], f"{what}: weights after step {number}", **how)
    assert number == len(expected)


# -- parity ------------------------------------------------------------------------------------------------------------


def parity(name, set_to_none=True):
    num_ranks = world().size()
    xs = list(batches(num_ranks))
    module = make(name)
    expected = list(train(module, module, xs, set_to_none))
    module = make(name)
    model = DistributedDataParallel(module, find_unused_parameters=name in ("unused", "experts"))
    trained_by_torch = list(train(module, model, mine_of(xs), set_to_none))
    for form in FORMS if name in ("tied", "experts") else ("bucketed", "overlapped", "default"):
        module = make(name, seed=3 + world().rank())  # what rank 0 has is what counts
        steps = list(train(module, DataParallel(module, world(), **FORMS[form]), mine_of(xs), set_to_none))
        tolerance = TOLERANCE.get(name, 1e-10)
        assert_same_training(steps, expected, f"{form}, against one process", tolerance=tolerance)
        how = dict(exactly=num_ranks == 2, tolerance=tolerance)  # with more, sums may run in a different order
        assert_same_training(steps, trained_by_torch, f"{form}, against torch", **how)
    if name != "experts":  # where ranks have gradients for different parameters
        module = make(name)
        naive = train(module, module, mine_of(xs), set_to_none, lambda module: average_gradients(module, world()))
        assert_same_training(naive, trained_by_torch, "the naive average, against torch", **how)


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in MODELS), ("deep MLP", 3), ("experts", 4)])
def test_steps_equal_one_process_and_torch(on_ranks, name, world_size):
    on_ranks(parity, name, world_size=world_size)


def test_gradients_set_to_zero_instead_of_none(on_ranks):
    on_ranks(parity, "experts", False, world_size=2)


def reentrant_and_tied(form):
    """Two segments share a weight, whose gradient then arrives in two parts."""
    torch.manual_seed(3)
    module = Checkpointed(use_reentrant=True, tied=True)
    model = DataParallel(module, world(), **FORMS[form])
    xs = list(batches(world().size()))
    try:
        steps = list(train(module, model, mine_of(xs)))
    except ValueError as error:
        return str(error)
    torch.manual_seed(3)
    alone = Checkpointed(use_reentrant=True, tied=True)
    assert_same_training(steps, list(train(alone, alone, xs)), form)


def test_a_gradient_that_arrives_in_two_parts_is_refused_while_backward_sends(on_ranks):
    assert on_ranks(reentrant_and_tied, "bucketed") == [None, None]
    for text in on_ranks(reentrant_and_tied, "overlapped"):
        assert text.startswith("segments.0.0.weight got a second gradient")
        assert "use_reentrant=False" in text


def batch_norm():
    """Against torch; one process would take the mean and variance of all rows."""
    buffers = []
    for wrap in (DistributedDataParallel, lambda module: DataParallel(module, world(), bucket_bytes=300)):
        torch.manual_seed(3)
        module = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, dtype=torch.float64), linear())
        buffers.append((module, list(train(module, wrap(module), mine_of(batches(world().size()))))))
    (by_torch, expected), (module, steps) = buffers
    assert_same_training(steps, expected, "against torch", exactly=True)
    if world().rank() == 0:
        assert_same(dict(module.named_buffers()), dict(by_torch.named_buffers()), "against torch", exactly=True)
    return [buffer.tolist() for buffer in module.buffers()]


def test_running_means_are_those_of_the_first_rank_everywhere(on_ranks):
    one, other = on_ranks(batch_norm)
    assert one == other
    assert one[-1] == STEPS


def sparse_embedding(form):
    """Its gradient becomes dense; words that only one rank has, or both, or nobody; one backward after another."""
    words = torch.tensor([[0, 1, 1], [1, 3, 3]])
    torch.manual_seed(3)
    alone, module = (
        nn.Sequential(nn.Embedding(5, WIDTH, sparse=s, dtype=torch.float64), linear()) for s in (False, True)
    )
    module.load_state_dict(alone.state_dict())
    model = DataParallel(module, world(), **FORMS[form])
    for step in range(3):
        loss_of(alone(words)).backward()
        with model.no_sync() if step == 0 else nullcontext():
            loss_of(model(words[world().rank()])).backward()
    assert_same_gradients(module, alone, form)


@pytest.mark.parametrize("form", ["bucketed", "overlapped, a message each"])
def test_sparse_gradients_are_averaged_as_dense_ones(on_ranks, form):
    on_ranks(sparse_embedding, form)


def wrapped_twice():
    """A second wrapper is refused while there is the first; after that, the hooks of the first do nothing."""
    xs = list(batches(world().size()))
    alone, module = make("deep MLP"), make("deep MLP")
    model = DataParallel(module, world(), bucket_bytes=0)
    loss_of(model(mine_of(xs)[0])).backward()
    with pytest.raises(ValueError, match=r"already averages 0\.weight: use that wrapper, or delete it first"):
        DataParallel(module, world())
    del model
    module.zero_grad()
    model = DataParallel(module, world(), bucket_bytes=300)
    assert_same_training(train(module, model, mine_of(xs)), list(train(alone, alone, xs)), "the second")


def test_a_second_wrapper_is_refused(on_ranks):
    on_ranks(wrapped_twice)


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulate(name, form, last_in_no_sync):
    """Three micro-batches a step, twice; the second step also adds to what the first left."""
    options = FORMS[form]
    alone, module = make(name), make(name)
    model = DataParallel(module, world(), **options)
    for step, x in enumerate(batches(world().size(), 2)):
        loss_of(alone(x)).backward()
        micro_batches = mine_of([x])[0].chunk(3)
        with communication_log() as log:
            for number, micro_batch in enumerate(micro_batches):
                loss = loss_of(model(micro_batch)) / len(micro_batches)
                if number < len(micro_batches) - 1 or last_in_no_sync:
                    with model.no_sync():
                        loss.backward()
                    assert not log.records
                else:
                    loss.backward()
            if last_in_no_sync:
                model.sync_gradients()
        assert_same_gradients(module, alone, f"step {step}")
        sent = [record.operation for record in log.records]
        num_trained = sum(p.requires_grad for p in module.parameters())
        assert set(sent) == {"all_reduce"}
        assert len(sent) == (num_trained if options.get("bucket_bytes") == 0 else len(model._buckets))
        gradient_bytes = sum(p.nbytes + p.element_size() for p in module.parameters() if p.requires_grad)
        assert log.total_bytes() == gradient_bytes  # once, with a flag for each parameter


@pytest.mark.parametrize("form", ["a message each", "bucketed", "overlapped"])
@pytest.mark.parametrize("last_in_no_sync", [False, True])
def test_accumulation_sends_once_and_gradients_add_up(on_ranks, form, last_in_no_sync):
    for name in ("tied", "frozen", "experts"):
        on_ranks(accumulate, name, form, last_in_no_sync)


def places_of_gradients():
    """Where gradients are after each of three backwards, the last of which sends; and the biggest of the buckets."""
    module = make("tied")
    model, [x] = DataParallel(module, world()), batches(world().size(), 1)
    places = []
    for number in range(3):
        with model.no_sync() if number < 2 else nullcontext():
            loss_of(model(x)).backward()
        places.append({p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None})
    return places, {bucket.buffer.untyped_storage().data_ptr() for bucket in model._buckets}


def test_gradients_are_in_the_buckets_from_the_first_micro_batch_on(on_ranks):
    """So each exists once: autograd adds to the bucket, and what travels is not a copy."""
    for places, buckets in on_ranks(places_of_gradients):
        assert places == [buckets] * 3


def nested_no_sync():
    model = DataParallel(make("deep MLP"), world())
    x = mine_of(batches(2, 1))[0]
    with communication_log() as log:
        try:
            with model.no_sync():
                with model.no_sync():
                    loss_of(model(x)).backward()
                loss_of(model(x)).backward()  # the outer one still holds
                raise KeyError
        except KeyError:
            pass
        assert not log.records
        loss_of(model(x)).backward()
        assert log.records


def test_no_sync_nests_and_ends_with_an_error(on_ranks):
    on_ranks(nested_no_sync)


def backward_that_fails(form):
    alone, module = make("deep MLP"), make("deep MLP")
    model = DataParallel(module, world(), **FORMS[form])

    def fail(grad):
        raise KeyError("in the middle of backward")

    hook = module[4].weight.register_hook(fail)
    for number, x in enumerate(batches(world().size(), 3)):
        local_loss = loss_of(model(mine_of([x])[0]))
        if number == 0:
            with pytest.raises(KeyError):
                local_loss.backward()
            hook.remove()
            model.zero_grad()
            continue
        loss_of(alone(x)).backward()
        local_loss.backward()
        assert_same_gradients(module, alone, "after a backward that failed")


@pytest.mark.parametrize("form", ["a message each", "overlapped"])
def test_a_backward_that_failed_does_not_spoil_the_next(on_ranks, form):
    on_ranks(backward_that_fails, form)


# -- when messages leave -----------------------------------------------------------------------------------------------


def order_of_events(form):
    """What happens during one backward: gradients as they arrive, and messages as they are called."""
    module = make("deep MLP")
    events = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: events.append(name))
    model = DataParallel(module, world(), **FORMS[form])
    loss = loss_of(model(mine_of(batches(2, 1))[0]))
    all_reduce = dist.all_reduce

    def noted(*args, **kwargs):
        events.append("send")
        return all_reduce(*args, **kwargs)

    with patch.object(dist, "all_reduce", noted):
        loss.backward()
    return events


@pytest.mark.parametrize("form", FORMS)
def test_overlapped_buckets_leave_before_backward_is_done(on_ranks, form):
    for events in on_ranks(order_of_events, form, world_size=2):
        gradients = [number for number, event in enumerate(events) if event != "send"]
        early = events[: gradients[-1]].count("send")
        assert len(gradients) == 8
        sends = events.count("send")
        if form.startswith("overlapped"):
            assert sends >= 3 and early == sends - 1  # all but the last, which the last gradient fills
        else:
            assert early == 0
        if form in ("a message each", "overlapped, a message each"):
            assert sends == 8
        if form in ("one bucket", "default"):
            assert sends == 1


def buckets_of(bucket_bytes, name="deep MLP"):
    module = make(name)
    names = {parameter: name for name, parameter in module.named_parameters()}
    model = DataParallel(module, world(), bucket_bytes=bucket_bytes)
    return [[names[parameter] for parameter in bucket.parameters] for bucket in model._buckets]


def test_buckets_run_from_the_last_layer_to_the_first_and_hold_about_what_was_asked(on_ranks):
    one_each, by_layer = (on_ranks(buckets_of, size, world_size=2)[0] for size in (0, WIDTH * (WIDTH + 1) * 8))
    assert one_each == [[f"{layer}.{part}"] for layer in (6, 4, 2, 0) for part in ("bias", "weight")]
    assert by_layer == [[f"{layer}.bias", f"{layer}.weight"] for layer in (6, 4, 2, 0)]


def test_a_bucket_has_one_type_and_a_negative_size_is_refused(on_ranks):
    buckets = on_ranks(buckets_of, 10**6, "types", world_size=2)[0]
    assert [{name[:8] for name in bucket} for bucket in buckets] == [
        {"layers.4", "layers.1"},
        {"layers.3", "layers.0"},
        {"layers.2"},
    ]
    with pytest.raises(RankFailed, match="bucket_bytes=-1 must be at least 0"):
        on_ranks(buckets_of, -1, world_size=2)


# -- state dicts -------------------------------------------------------------------------------------------------------


def state_dicts():
    plain, module = make("tied"), make("tied")
    model = DataParallel(module, world())
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    x = mine_of(batches(2, 1))[0]
    list(train(module, model, [x]))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model(x))
    other = make("tied", seed=8)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(other(x), model(x))
    xs = list(batches(2))
    expected = list(train(other, other, xs))
    assert_same_training(train(module, model, mine_of(xs)), expected, "after load_state_dict")


def test_state_dicts_go_into_the_plain_module_and_back(on_ranks):
    on_ranks(state_dicts)


# -- what it refuses --------------------------------------------------------------------------------------------------


IN_NO_BUCKET = {
    "0.bias": lambda module: module[0].bias.requires_grad_(True),
    "1.scale": lambda module: setattr(module[1], "scale", nn.Parameter(torch.ones(()))),
    "1.weight": lambda module: setattr(module, "1", linear()),
}


def changed_after_it_was_wrapped():
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for name, change in IN_NO_BUCKET.items():
        module = nn.Sequential(linear(), linear())
        module[0].requires_grad_(False)
        model = DataParallel(module, world())
        model(x).sum().backward()
        change(module)
        with pytest.raises(
            ValueError, match=f"^this DataParallel does not average {name}, which was frozen or missing"
        ):
            model(x)


def test_a_parameter_that_is_in_no_bucket_is_refused(on_ranks):
    """Otherwise its replicas would drift apart."""
    on_ranks(changed_after_it_was_wrapped)


def second_derivatives(form):
    """With the graph of the gradients in `.grad` it is refused; torch.autograd.grad does not touch `.grad`."""
    alone, module = make("deep MLP"), make("deep MLP")
    model = DataParallel(module, world(), **FORMS[form])
    [x] = batches(world().size(), 1)
    with pytest.raises(ValueError, match=r"6.bias .*create_graph=True.* use torch.autograd.grad\(\.\.\., create_graph"):
        loss_of(model(mine_of([x])[0])).backward(create_graph=True)
    module.zero_grad()
    for each, rows in ((alone, x), (model, mine_of([x])[0])):
        rows = rows.clone().requires_grad_()
        [grad] = torch.autograd.grad(each(rows).square().sum(), rows, create_graph=True)
        loss_of(grad).backward()
    assert_same_gradients(module, alone, "a penalty on the gradient")


@pytest.mark.parametrize("form", ["bucketed", "overlapped, a message each"])
def test_create_graph_is_refused_and_second_derivatives_are_right(on_ranks, form):
    on_ranks(second_derivatives, form)
