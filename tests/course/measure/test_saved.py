"""What is kept for backward, in bytes: by autograd, or by anybody."""

import torch

from course.measure.saved import memory_made, saved_for_backward


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


def test_memory_that_is_gone_does_not_count_and_views_do_not_count_twice():
    weight = torch.ones(3, 4)
    with memory_made([weight]) as made:
        x = torch.ones(2, 4, requires_grad=True)
        y = (x + 1) @ weight.T  # neither the sum nor a view of the weight is kept
        first, second = y.chunk(2)
    assert made.held_bytes() == x.nbytes + y.nbytes
    del x, y, first, second
    assert made.held_bytes() == 0


def test_what_autograd_keeps_is_what_exists():
    with memory_made() as made, saved_for_backward() as saved:
        x = torch.ones(4, 4, requires_grad=True)
        y = x.exp().sin().sum()
    assert made.held_bytes() - y.nbytes == saved.total_bytes() + x.nbytes
