"""The mixture of experts against a dense loop over all experts in one process: outputs, losses and gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.expert_parallel import LoadBalancing, MoELayer
from labkit.gradients import all_reduce_grads
from labkit.groups import groups_of_one, init_groups
from labkit.layout import ParallelLayout
from labkit.placement import placed_parameters
from labkit.tensor_parallel import unshard
from labtrain.model import normal
from tests.labkit.data_parallel.conftest import local_part
from tests.support.sweep import IS_SWEEP

HIDDEN, FFN, EXPERTS, SEQ, BATCH = 6, 8, 8, 8, 2
LOSSES = dict(aux_loss_coefficient=0.3, z_loss_coefficient=0.1)


def make(groups, top_k=2, skew="", **options):
    """A layer in float64; ``skew`` makes all tokens choose one expert, or none the last two."""
    names = {"init_method": "up", "output_layer_init_method": "down"}
    inits = {key: named(name) for key, name in names.items()}
    router = {"init_method": normal("router", 0, 0.5), "balance": LoadBalancing(**LOSSES)}
    router |= options.pop("router", {})
    options |= inits | {"dtype": torch.float64, "router": router}
    layer = MoELayer(HIDDEN, FFN, EXPERTS, top_k, groups, **options)
    if skew:
        with torch.no_grad():
            layer.router.weight[:, 0] = 0  # x[..., 0] is 1: this column is a bias
            layer.router.weight[0 if skew == "one" else [-1, -2], 0] = 50.0 if skew == "one" else -50.0
    return layer


def weights_of(layer):
    named = {"router": layer.router.weight, "up": layer.experts.up, "down": layer.experts.down}
    if hasattr(layer, "shared"):
        named |= {"shared up": layer.shared.up.weight, "shared down": layer.shared.down.weight}
    return named


def named(name):
    return lambda weight: normal(f"{name} {weight.dim()}", 0, 0.5)(weight)


def batch(dp_size):
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, BATCH * dp_size, SEQ, HIDDEN, generator=generator, dtype=torch.float64)
    x[..., 0] = 1
    return x, target


def dense(x, layer, top_k, gated, shared):
    """The witness: every expert processes every token; softmax scores, no capacity."""
    logits = x @ layer["router"].T
    scores = logits.softmax(-1)
    probs, experts = scores.topk(top_k, -1)
    if top_k > 1:
        probs = probs / probs.sum(-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(-1, experts, probs)

    def mlp(up, down):
        hidden = x @ up.T
        half = up.size(0) // 2
        return (F.silu(hidden[..., :half]) * hidden[..., half:] if gated else F.gelu(hidden)) @ down.T

    output = sum(weights[..., e : e + 1] * mlp(layer["up"][e], layer["down"][e]) for e in range(EXPERTS))
    if shared:
        output = output + mlp(layer["shared up"], layer["shared down"])
    chosen = torch.zeros_like(scores).scatter(-1, experts, 1.0)
    return output, logits, scores, chosen


def witness(dp_size, top_k, skew, gated, shared):
    """Loss and gradients of the mean over replicas: each has an auxiliary loss over its own rows."""
    layer = make(groups_of_one(), top_k, skew, gated=gated, num_shared_experts=shared)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights_of(layer).items()}
    x, target = batch(dp_size)
    x.requires_grad_()
    output, logits, scores, chosen = dense(x, weights, top_k, gated, shared)
    loss = (output * target).mean()
    for rows in torch.arange(len(x)).chunk(dp_size):
        fractions = chosen[rows].sum((0, 1)) / chosen[rows].sum()
        aux = 0.3 * EXPERTS * (fractions * scores[rows].mean((0, 1))).sum()
        loss = loss + (aux + 0.1 * logits[rows].logsumexp(-1).square().mean()) / dp_size
    loss.backward()
    return loss.item(), output.detach(), x.grad, {name: weight.grad for name, weight in weights.items()}


def close(got, expected, what):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


def check(groups, top_k, skew, gated, shared, sequence_parallel, defer):
    layout = groups.layout
    what = f"{layout!r} k={top_k} {skew} sp={sequence_parallel}"
    loss, output, grad_x, grads = witness(layout.dp_size, top_k, skew, gated, shared)
    options = dict(gated=gated, num_shared_experts=shared, sequence_parallel=sequence_parallel)
    layer = make(groups, top_k, skew, defer_grad_reduce=defer, **options)
    model = DataParallel(layer, groups.dp_cp)
    coords = groups.coords

    def local(unsharded):  # this replica's rows, this context rank's tokens, and with sequence_parallel a slice of them
        part = unsharded.chunk(layout.dp_size)[coords.dp].chunk(layout.cp_size, 1)[coords.cp]
        return part.chunk(layout.tp_size, 1)[coords.tp] if sequence_parallel else part

    unsharded_x, unsharded_target = batch(layout.dp_size)
    x = local(unsharded_x).clone().requires_grad_()
    got, load = model(x)
    close(got, local(output), what)
    parts = layout.tp_size if sequence_parallel else 1
    aux = layer.router.loss(load)
    local_loss = (got * local(unsharded_target)).mean() / parts
    (local_loss + aux).backward()
    share = (local_loss if sequence_parallel or coords.tp == 0 else 0 * local_loss) + aux
    total = share.detach() / groups.dp_cp.size()
    dist.all_reduce(total)
    close(total / layout.pp_size, torch.tensor(loss, dtype=torch.float64), what)
    gradient = x.grad / groups.dp_cp.size()
    close(gradient, local(grad_x), what)
    placed = placed_parameters(layer)
    all_reduce_grads(placed, groups.tp)
    for name, weight in weights_of(layer).items():
        close(unshard(weight.grad, placed[weight]), grads[name], f"{what} {name}")


def layouts(world_size=8):
    sizes = [1, 2, 4, 8]
    for t, c, etp, ep in itertools.product(sizes, [1, 2, 4], sizes, sizes):
        if world_size % (t * c) == 0 and world_size % (etp * ep) == 0:
            yield ParallelLayout(world_size, t, cp_size=c, ep_size=ep, expert_tp_size=etp)


def check_all():
    cases = [(1, ""), (2, ""), (4, ""), (1, "one"), (2, "one"), (2, "none of the last")]
    every = [*layouts()]
    for number, layout in enumerate(every if IS_SWEEP else every[::7]):  # has all (t, c), and all (etp, ep)
        top_k, skew = cases[number % len(cases)]
        with init_groups(layout) as groups:
            for sequence_parallel in {layout.tp_size > 1, False}:
                if SEQ // layout.cp_size % layout.tp_size == 0 or not sequence_parallel:
                    form = number % 2 == 0, int(number % 3 == 1), sequence_parallel, number % 2 == 1
                    check(groups, top_k, skew, *form)


def test_layouts_of_eight_ranks_are_the_dense_loop(on_ranks):
    on_ranks(check_all, world_size=8)


def replicas_without_groups(wrap, options):
    world, layer = dist.group.WORLD, make(groups_of_one())
    *_, grads = witness(world.size(), 2, "", False, 0)
    model = wrap(layer, world, **options)
    x, target = (tensor.chunk(world.size())[world.rank()] for tensor in batch(world.size()))
    output, load = model(x)
    ((output * target).mean() + layer.router.loss(load)).backward()
    placed = placed_parameters(model)
    for name, weight in weights_of(layer).items():
        close(weight.grad, local_part(grads[name], placed[weight], weight), name)


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("wrap", "options"), [(DataParallel, {}), (FullyShardedDataParallel, {"units": []})])
def test_replicas_made_without_groups_average_experts_like_everything_else(on_ranks, wrap, options):
    on_ranks(replicas_without_groups, wrap, options)
