"""Whatever a unit takes and returns, its gradients are those of one process, or an error names the unit."""

import gc
import itertools
import weakref
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from labkit.data_parallel import FullyShardedDataParallel
from labkit.placement import placed_parameters
from tests.labkit.data_parallel.conftest import backward_alone, local_part, loss_of, world
from tests.support.sweep import IS_SWEEP

WIDTH, ROWS, STEPS = 8, 3, 2
FORMS = [
    dict(reshard_after_forward=reshards, prefetch=prefetch)
    for reshards, prefetch in itertools.product([True, False], [0, 1, 5])
]
WORLD_SIZES = (2, 4) if IS_SWEEP else (2,)
Named = namedtuple("Named", "x also")


@dataclass
class Data:
    x: torch.Tensor
    number: int = 3


class Thing:
    def __init__(self, x):
        self.x = x


class Block(nn.Module):
    """Two matrices and a norm; ``returns`` makes something of the output, ``inside`` checkpoints what it computes."""

    def __init__(self, returns=lambda x: x, before=lambda x: x, inside: Any = "nothing"):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.returns, self.before, self.inside = returns, before, inside
        self.aux: Any = None

    def compute(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))

    def forward(self, x):
        x = self.before(x)
        x = self.compute(x) if self.inside == "nothing" else checkpoint(self.compute, x, use_reentrant=self.inside)
        return self.returns(x)


class OnlyAside(Block):
    """Its only way to the loss is an attribute."""

    def forward(self, x):
        self.aux = super().forward(x)
        return torch.zeros(())


class InAList(Block):
    """Its only way to the loss is in a list, where nobody looks: autograd says when it needs a weight."""

    def forward(self, x):
        self.aux = [super().forward(x)]
        return torch.zeros(())


class BiasInAList(Block):
    """Autograd saves nothing for the sum, so the gradient itself is the first sign of backward."""

    def forward(self, x):
        self.aux = [x + self.up.bias]
        return torch.zeros(())


class Blocks(nn.Module):
    """Blocks, with ``between`` applied to each and its output; ``around`` checkpoints each."""

    def __init__(self, block=Block, between=lambda block, x: x, around: Any = "nothing", wrapped=None):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        if wrapped:
            self.blocks = nn.ModuleList(checkpoint_wrapper(each, checkpoint_impl=wrapped) for each in self.blocks)
        self.between, self.around = between, around

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x) if self.around == "nothing" else checkpoint(block, x, use_reentrant=self.around)
            x = self.between(block, y)
        return self.last(x)


def in_place(change):
    def between(block, x):
        change(x)
        return x

    return between


def first_column_to_3(x):
    x[:, 0] = 3.0


IN_PLACE = {
    "relu": F.relu_,
    "dropout": lambda x: F.dropout(x, 0.3, inplace=True),
    "x += 1": lambda x: x.add_(1.0),
    "x.mul_(2)": lambda x: x.mul_(2.0),
    "a slice": first_column_to_3,
}
A_VIEW = partial(Block, returns=lambda x: x.T.T)
TAKES = {  # what the model does with a block's output
    Data: lambda block, y: y.x,
    Thing: lambda block, y: y.x,
    (lambda x: Named(x, x)): lambda block, y: y.x,
    (lambda x: {"x": [x, 3]}): lambda block, y: y["x"][0],
}


def from_aside(block, y):
    return block.aux


CASES = {
    **{f"{name} on the output": partial(Blocks, between=in_place(change)) for name, change in IN_PLACE.items()},
    **{f"{n} on a view": partial(Blocks, A_VIEW, in_place(IN_PLACE[n])) for n in ("relu", "a slice")},
    "relu on the input": partial(Blocks, partial(Block, before=F.relu_)),
    "x.mul_(2) on the input": partial(Blocks, partial(Block, before=lambda x: x.mul_(2.0))),
    **{f"returns {n}": partial(Blocks, partial(Block, made), get) for n, (made, get) in enumerate(TAKES.items())},
    "only aside": partial(Blocks, OnlyAside, from_aside),
    "aside in a list": partial(Blocks, InAList, lambda block, y: block.aux[0]),
    "a bias aside in a list": partial(Blocks, BiasInAList, lambda block, y: block.aux[0]),
}
for way in (False, True):
    CASES |= {
        f"checkpoint around, {way}": partial(Blocks, around=way),
        f"checkpoint inside, {way}": partial(Blocks, partial(Block, inside=way)),
        f"checkpoint inside, relu, {way}": partial(Blocks, partial(Block, inside=way), in_place(F.relu_)),
        f"checkpoint inside, returns 0, {way}": partial(Blocks, partial(Block, Data, inside=way), TAKES[Data]),
        f"checkpoint inside, only aside, {way}": partial(Blocks, partial(OnlyAside, inside=way), from_aside),
        f"checkpoint_wrapper, {way}": partial(Blocks, wrapped=list(CheckpointImpl)[1 - way]),
    }


def make(case, seed=3):
    torch.manual_seed(seed)
    return CASES[case]().double()


def batches(num_parts):
    return torch.randn(STEPS, num_parts, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def state_after(model, steps, rank=None, case=""):
    """The state dict after SGD steps: on all parts of a batch, or on this rank's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in steps:
        optimizer.zero_grad()
        for part in parts if rank is None else [parts[rank]]:
            torch.manual_seed(5)  # of dropout: the same masks for each part
            (loss_of(model(part)) / (len(parts) if rank is None else 1)).backward()
        optimizer.step()
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}


def assert_same(got, expected, what):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.allclose(got[name], x, rtol=0, atol=1e-10), f"{what}: {name}"


def same_gradients(model, alone):
    for (p, placement), whole in zip(placed_parameters(model).items(), alone.parameters(), strict=True):
        assert torch.allclose(p.grad, local_part(whole.grad, placement, p), rtol=0, atol=1e-10)


def shard(module, **options):
    return FullyShardedDataParallel(module, world(), units=module.blocks, **options)


def memory(model):
    return sum(flat.buffer.untyped_storage().size() for flat in model._flats)


def all_cases(cases, forms_at_once):
    """Each case in some of the forms in turn, of which the next case has others."""
    steps = batches(world().size())
    for number, case in enumerate(cases):
        expected = state_after(make(case), steps)
        stride = len(FORMS) // forms_at_once
        for form in FORMS[number % stride :: stride]:
            model = shard(make(case), **form)
            assert_same(state_after(model, steps, world().rank()), expected, f"{case}, {form}")
            assert memory(model) == 0


@pytest.mark.parametrize(
    ("world_size", "cases", "forms_at_once"),
    [(2, CASES, 6), (4, CASES, 6)] if IS_SWEEP else [(2, CASES, 2), (4, [*CASES][::2], 1)],
    ids=["2", "4"],
)
def test_gradients_do_not_depend_on_what_happens_at_the_borders_of_units(on_ranks, world_size, cases, forms_at_once):
    """Each case on two ranks, every other one on four; `make sweep-layouts` tries all of them in all forms."""
    on_ranks(all_cases, [*cases], forms_at_once, world_size=world_size)


def as_fully_shard():
    """Torch is right in these cases, ours too; it raises, or loses gradients, in the others."""
    from torch.distributed.fsdp import fully_shard

    steps = batches(world().size())
    for case in CASES:
        if "on" in case.split() or "aside" in case or "returns 1" in case or "relu" in case:
            continue
        if "returns 0" in case and torch.__version__ < "2.13":  # which does not look into dataclasses
            continue
        theirs = make(case)
        for block in theirs.blocks:
            fully_shard(block)
        fully_shard(theirs)
        ours = state_after(shard(make(case)), steps, world().rank())
        found = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in ours.items()}
        assert_same(found, state_after(theirs, steps, world().rank()), case)


def test_where_torch_is_right_so_are_we(on_ranks):
    on_ranks(as_fully_shard)


def freed_with_a_graph_that_is_kept():
    """A zero-bubble schedule goes only part of the way a second time; tanh saves its own output."""
    model = shard(make("returns 0"))
    loss = loss_of(model(batches(1)[0][0]))
    loss.backward(retain_graph=True)
    is_there = weakref.ref(model)
    del model, loss
    gc.collect()
    assert is_there() is None


def test_a_graph_that_backward_has_kept_does_not_keep_the_model(on_ranks):
    on_ranks(freed_with_a_graph_that_is_kept, world_size=1)


# -- parameters that change, or are used elsewhere ---------------------------------------------------------------------


def changed_after_a_forward(optimizer_class, reshards):
    """A loss that nobody calls backward on, then a step: the next forward has the new weights."""
    ours, alone = make("relu on the output"), make("relu on the output")
    model, [parts, other] = shard(ours, reshard_after_forward=reshards), batches(world().size())
    optimizers = [optimizer_class(each.parameters(), lr=0.1) for each in (model, alone)]
    for _ in range(2):
        loss_of(model(parts[world().rank()])).backward()
        backward_alone(alone, parts)
        model(other[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(model(other[0]), alone(other[0]), rtol=0, atol=1e-10)


class ByHand:
    """Changes weights in place without torch's optimizers, so no hook of theirs tells."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p.sub_(p.grad, alpha=self.lr)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_forward_has_the_weights_of_the_last_step(on_ranks, world_size):
    adam_w = [partial(torch.optim.AdamW, **options) for options in ({}, {"fused": True}, {"foreach": True})]
    for optimizer_class, reshards in itertools.product([ByHand, *adam_w], [True, False]):
        on_ranks(changed_after_a_forward, optimizer_class, reshards, world_size=world_size)


def changed_before_backward(fused, form):
    ours, alone = make("checkpoint around, False"), make("checkpoint around, False")
    for each in (ours, alone):
        each.around = "nothing"
    model, [parts, _] = shard(ours, **form), batches(world().size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    loss_of(model(parts[0])).backward()
    loss = loss_of(model(parts[world().rank()]))
    optimizer.step()
    optimizer.zero_grad()
    if form["reshard_after_forward"]:
        with pytest.raises(ValueError, match=r"parameters of unit blocks\.2 have changed between forward and backward"):
            loss.backward()
    else:  # they stayed whole, as they were
        loss.backward()
        backward_alone(alone, parts)
        same_gradients(model, alone)
    early = loss_of(model(parts[world().rank()]))
    optimizer.step()
    late = loss_of(model(parts[world().rank()]))
    with pytest.raises(ValueError, match="have changed between forward and backward: call backward before a step"):
        early.backward()
    optimizer.zero_grad()
    loss_of(model(parts[world().rank()])).backward()
    assert all(p.grad is not None for p in model.parameters())
    del late


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_that_change_before_backward_are_refused_or_stay_as_they_were(on_ranks, world_size):
    for fused, form in itertools.product([False, True], FORMS):
        on_ranks(changed_before_backward, fused, form, world_size=world_size)


class Elsewhere(Blocks):
    """Uses a block's parameter outside that block."""

    use: Any = None

    def forward(self, x):
        x = super().forward(x)
        return x if self.use is None else x * self.use(self.blocks[1])


USES = [
    lambda block: block.up.weight.flatten()[0],
    lambda block: block.up.bias.detach().sum(),
    lambda block: float(next(block.parameters()).norm()),
    lambda block: block.norm.weight.shape[0],
    lambda block: block.norm.weight.data + 1,
]


def used_elsewhere(form):
    module = Elsewhere().double()
    model, x = shard(module, **form), torch.ones(ROWS, WIDTH, dtype=torch.float64)
    for context, use in itertools.product([nullcontext, torch.no_grad], USES):
        module.use = use
        wanted = r"of unit blocks\.1 \(a \w+\) is used outside the forward of unit blocks\.1"
        with pytest.raises(ValueError, match=wanted), context():
            model(x)
    module.use = lambda block: block.up.weight.to(block.up.weight.device).dtype.itemsize
    with pytest.raises(ValueError, match="is used outside"):
        model(x)
    module.use = lambda block: block.up.weight.dtype.itemsize
    loss_of(model(x)).backward()
    for name in ("blocks.1.up.weight", "first.bias"):  # after forward
        with pytest.raises(ValueError, match=r"is used outside the forward of (unit blocks|the root)"):
            (loss_of(model(x)) + module.get_parameter(name).flatten().sum()).backward()
        model.zero_grad()
    module.use = None
    plain = Elsewhere().double()
    plain.load_state_dict(model.state_dict())
    steps = batches(world().size())
    assert_same(state_after(model, steps, world().rank()), state_after(plain, steps), "after errors")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_parameter_that_is_used_outside_its_unit_is_named(on_ranks, world_size):
    for form in FORMS:
        on_ranks(used_elsewhere, form, world_size=world_size)


class Returned(Blocks):
    """A unit gives one of its parameters away, beside what it computes."""

    def __init__(self):
        super().__init__()
        self.blocks[0].forward = lambda x: (x, self.blocks[0].up.weight.T)

    def forward(self, x):
        x, weight = self.blocks[0](x)
        return self.last(x) @ weight


def returned():
    with pytest.raises(ValueError, match=r"unit blocks\.0 returns one of its own parameters, which is freed now"):
        shard(Returned())(torch.ones(ROWS, WIDTH))
    module = Returned()
    loss_of(shard(module, reshard_after_forward=False)(torch.ones(ROWS, WIDTH))).backward()
    assert module.blocks[0].up.weight.grad is not None


def test_a_unit_does_not_return_what_is_freed(on_ranks):
    on_ranks(returned)


# -- errors, and what they leave ---------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")


def interrupt(x):
    raise KeyboardInterrupt


def after_errors(form):
    """Errors at each block, in forward and in backward, then clean steps: nothing is left of what failed."""
    steps = batches(world().size())
    alone, ours = make("relu on the output"), make("relu on the output")
    model, x = shard(ours, **form), steps[0][0]
    for block in ours.blocks:
        block.returns = lambda x: {}["in forward"]
        with pytest.raises(KeyError, match="in forward"):
            model(x)
        assert [p.dim() for p in model.parameters()] == [1] * len(list(model.parameters()))
        block.returns = interrupt
        with pytest.raises(KeyboardInterrupt):  # after which torch calls no hook
            model(x)
        with model.no_sync():
            block.returns = Fails.apply
            with pytest.raises(KeyError, match="in backward"):
                loss_of(model(x)).backward()
        with pytest.raises(KeyError, match="in backward"):
            loss_of(model(x)).backward()
        block.returns = lambda x: x
    assert_same(state_after(model, steps, world().rank()), state_after(alone, steps), f"{form}")
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    # Another backward may come before the next forward.
    good, ours.blocks[0].returns = loss_of(model(steps[0][world().rank()])), Fails.apply
    bad = loss_of(model(x))
    with pytest.raises(KeyError, match="in backward"):
        bad.backward()
    model.zero_grad()
    good.backward()
    alone.zero_grad()
    backward_alone(alone, steps[0])
    same_gradients(model, alone)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_step_after_errors_is_clean(on_ranks, world_size):
    for form in FORMS:
        on_ranks(after_errors, form, world_size=world_size)


def saved_and_changed():
    """Torch refuses to use a saved tensor that was changed, also inside a unit."""
    module = Blocks(partial(Block, returns=lambda x: x.exp() + x.mul_(2) * 0))
    module.blocks[0].returns = lambda x: (lambda y: (y, y.add_(1)))(x.exp())[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(shard(module)(torch.ones(ROWS, WIDTH))).backward()


def test_a_tensor_that_was_changed_after_it_was_saved_is_refused(on_ranks):
    on_ranks(saved_and_changed)


def gone():
    """What is saved keeps the wrapper until backward."""
    module = Blocks()
    loss_of(shard(module)(torch.ones(ROWS, WIDTH))).backward()
    assert all(p.grad is not None for p in module.parameters())
    module = nn.Sequential(nn.Embedding(4, WIDTH))
    FullyShardedDataParallel(module, world(), units=[module[0]])(torch.tensor([1])).sum().backward()
    assert module[0].weight.grad is not None


def test_backward_without_the_wrapper(on_ranks):
    on_ranks(gone)


def with_hooks_around():
    """Other hooks, such as those that move tensors elsewhere, get what autograd saves."""
    moved = []
    alone, ours, [parts, _] = make("relu on the output"), make("relu on the output"), batches(world().size())
    model = shard(ours)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (moved.append(x.shape), x)[1], lambda x: x):
        loss = loss_of(model(parts[world().rank()]))
    loss.backward()
    assert {(ROWS, WIDTH), (WIDTH, WIDTH)} <= set(map(tuple, moved))
    backward_alone(alone, parts)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(model.state_dict(), alone.state_dict(), "hooks around")


def test_hooks_around_units_get_what_is_saved(on_ranks):
    on_ranks(with_hooks_around)
