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
from tests.course.exercises.wrong_answers import experts as answers

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


@pytest.mark.parametrize(
    "name", ["expert_groups", "split_sizes", "dispatch_backward", "auxiliary_loss", "gradient_divisor"]
)
def test_there_are_at_least_twelve_wrong_answers(name):
    assert sum(other == name for other, *_ in answers.WRONG) >= 12
    assert sum(other == name for other, *_ in answers.RIGHT) >= 2


@pytest.mark.parametrize(
    ("name", "function", "status", "text"),
    [
        ("expert_groups", answers.asks_the_layout, "wrong", "labkit's own function was called"),
        ("expert_groups", answers.ep_divides_dp, "wrong", "that ep divides d is an old rule"),
        ("expert_groups", answers.groups_of_two_or_more, "wrong", "A group of one rank is a group, too."),
        ("expert_groups", answers.refuses_what_is_allowed, "raised", "Your function raises this error itself."),
        ("split_sizes", answers.gathers_all, "wrong", "It calls all_gather, but here"),
        ("split_sizes", answers.sends_all_choices, "wrong", "It sends 192 bytes. One number to each rank is enough"),
        ("split_sizes", answers.counted_as_floats, "wrong", "whole numbers, but stored as floats"),
        ("split_sizes", answers.without_minlength, "raised", "not the same in each case, or on each rank"),
        ("split_sizes", answers.without_minlength, "raised", "gets more or fewer bytes than it expects"),
        ("split_sizes", answers.input_first, "wrong", "Is it the output that comes first?"),
        ("split_sizes", answers.only_if_it_has_tokens, "stuck", "that a rank without tokens skips"),
        ("dispatch_backward", answers.forward_again, "raised", "The splits do not fit the rows."),
        ("dispatch_backward", answers.looked_up, "wrong", "`[tokens]` copies, as forward did"),
        ("dispatch_backward", answers.looked_up_at_home, "wrong", "`[tokens]` copies, as forward did"),
        ("dispatch_backward", answers.into_new_memory, "wrong", "Begin with `torch.zeros`, or fill it."),
        ("dispatch_backward", answers.without_splits, "raised", "Without splits, each rank would get equally many"),
        ("dispatch_backward", answers.uneven_lists, "raised", "With gloo, dist.all_to_all sends tensors of one size."),
        ("dispatch_backward", answers.plus_equals, "wrong", "the last alone counts: of several writes"),
        ("dispatch_backward", answers.skipped_if_empty, "stuck", "that a rank with nothing to send skips"),
        ("auxiliary_loss", answers.per_token, "wrong", "k is forgotten."),
        ("auxiliary_loss", answers.no_minlength, "raised", "Experts that nobody chose are missing"),
        ("auxiliary_loss", answers.no_k_and_no_coefficient, "wrong", "k is forgotten."),
        ("auxiliary_loss", answers.no_k_and_no_coefficient, "wrong", "And: The coefficient is forgotten."),
        ("auxiliary_loss", answers.mean_of_what_was_chosen, "wrong", "scores that each token gave to its own choices"),
        (
            "auxiliary_loss",
            answers.index_counted_once,
            "wrong",
            "has a number twice, and what is written there first is lost",
        ),
        ("auxiliary_loss", answers.counted_in_new_memory, "wrong", "Begin with `torch.zeros`, or fill it."),
        ("auxiliary_loss", answers.detached_scores, "wrong", "No gradient reaches `scores`"),
        ("auxiliary_loss", answers.as_number, "wrong", "It returns a float, and backward needs a tensor"),
        ("auxiliary_loss", answers.scales_in_place, "wrong", "It changes `scores`"),
        ("gradient_divisor", answers.averaged, "wrong", "This averages over the copies of an expert."),
        ("gradient_divisor", answers.with_a_slash, "wrong", "whole numbers, but stored as floats"),
    ],
)
def test_a_wrong_way_is_told_so(name, function, status, text, launches_on_kept_ranks):
    verdict = getattr(experts, name).verdict(function)
    assert verdict.status == status
    assert text in " ".join(verdict.text.split())
