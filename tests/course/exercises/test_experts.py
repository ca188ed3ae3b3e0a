"""The exercises of notebook 15: solutions agree with labkit and with one process, and wrong ways are named."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import experts
from course.exercises.values import same
from labkit.expert_parallel import Load, LoadBalancing, MoELayer, Router, dispatch
from labkit.groups import groups_of_one, init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.placement import placements

SIZES = [
    (1, 1, 6, 1, 1, 3),
    (2, 2, 2, 2, 1, 4),
    (2, 3, 2, 1, 1, 3),
    (4, 1, 3, 2, 2, 3),
    (1, 4, 9, 1, 2, 6),
    (2, 2, 1, 2, 4, 1),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_and_copies_are_those_of_labkit(sizes):
    t, c, d, p, etp, ep = sizes
    layout = ParallelLayout(t * c * d * p, t, p, c, ep_size=ep, expert_tp_size=etp)
    assert experts.my_expert_groups(*sizes) == (layout.groups("ep"), layout.groups("expert_dp"))
    assert experts.my_divisor(t, c, d, etp, ep) == (layout.expert_dp_size, layout.dp_size * layout.cp_size)


def exchanged(num_tokens, top_k):
    """What labkit's dispatch and its backward do, and what the solutions do, with one expert per rank."""
    num_experts = dist.get_world_size()
    with init_groups(ParallelLayout(num_experts, ep_size=num_experts)) as groups:
        chosen = experts.choices(num_tokens, top_k, num_experts, seed=7)
        x = torch.randn(len(chosen), 2, dtype=torch.float64, requires_grad=True)
        rows, exchange = dispatch(x, chosen, num_experts, groups)
        grad = torch.randn(rows.shape, dtype=torch.float64)
        rows.backward(grad)
        splits = exchange.send_splits, exchange.recv_splits
        backward = experts.my_dispatch_backward(grad, exchange.slots // top_k, len(chosen), *splits)
        return splits, experts.my_split_sizes(chosen, num_experts), x.grad, backward


def test_splits_and_backward_are_those_of_labkits_dispatch():
    for splits, mine, grad_x, backward in launch(exchanged, 3, 2, world_size=4):
        assert same(mine, splits) and same(backward, grad_x) and backward.shape == grad_x.shape


def test_the_auxiliary_loss_is_that_of_labkit():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(10, 6, dtype=torch.float64, generator=generator).softmax(-1)
    chosen = scores.topk(3).indices
    counts = torch.bincount(chosen.flatten(), minlength=6)[None]
    router = Router(2, 6, 3, groups_of_one(), balance=LoadBalancing(aux_loss_coefficient=0.3), dtype=torch.float64)
    load = Load(counts, counts, scores.sum(0, keepdim=True), torch.zeros(()).double(), seq_length=10)
    assert same(experts.my_auxiliary_loss(scores, chosen, 0.3), router.loss(load))
    uniform = torch.full((6, 6), 1 / 6).double()
    assert same(experts.my_auxiliary_loss(uniform, torch.arange(18).view(6, 3) % 6, 0.3), 0.3)  # as if balanced


def divisor_of_a_layer(layout):
    with init_groups(layout) as groups:
        placement = placements(MoELayer(2, 4, 4, 2, groups))["experts.up"]
        assert placement.replica_group is not None
        return placement.replica_group.size(), placement.grad_divisor


def test_the_divisor_is_that_of_labkits_layer():
    sizes = 2, 1, 2, 1, 4
    layout = ParallelLayout(4, tp_size=2, ep_size=4, expert_tp_size=1)
    assert launch(divisor_of_a_layer, layout, world_size=4) == [experts.my_divisor(*sizes)] * 4
