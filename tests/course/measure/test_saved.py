"""What autograd keeps for backward, in bytes."""

import torch

from course.measure.saved import saved_for_backward


def product(weights):
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    with saved_for_backward([weight] if weights else []) as saved:
        x @ weight.T
    x.exp()  # outside
    return saved.total_bytes()


def test_weights_are_left_out_and_nothing_outside_counts():
    assert product(weights=True) == 2 * 4 * 4
    assert product(weights=False) == 2 * 4 * 4 + 3 * 4 * 4


def test_two_views_of_one_memory_count_once():
    x = torch.ones(4, 4, requires_grad=True)
    halves = (x * 2).chunk(2)
    with saved_for_backward() as saved:
        halves[0].square().sum() + halves[1].square().sum()
    assert saved.total_bytes() == 4 * 4 * 4
