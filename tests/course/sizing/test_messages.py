"""The simulated messages: they end as the real operations do, in as many steps and bytes as the formulas say."""

from math import ceil, log2

import pytest
import torch

from course.measure import operations
from course.sizing.messages import on_a_ring, on_a_tree, sent_bytes
from course.sizing.ring import bus_factor, ring_steps
from labkit.launch import launch

REAL = {
    "all-reduce": operations.all_reduce,
    "reduce-scatter": operations.reduce_scatter,
    "all-gather": operations.all_gather,
}


def numbers(num_ranks, num_elements):
    """Numbers that follow no formula, and that float32 adds exactly."""
    values = [(7 * i * i + 3 * i) % 50 - 20 for i in range(num_ranks * num_elements)]
    return [values[rank * num_elements : (rank + 1) * num_elements] for rank in range(num_ranks)]


def ends(steps):
    return [[value for has in row if has for value in has.values] for row in steps[-1].held]


def run_all(start):
    x = torch.tensor(start[torch.distributed.get_rank()], dtype=torch.float32)
    return {name: operation(x.clone()).tolist() for name, operation in REAL.items()}


@pytest.mark.parametrize(("num_ranks", "num_elements"), [(2, 2), (3, 6), (4, 4)])
def test_it_ends_as_the_real_operation_does(num_ranks, num_elements):
    start = numbers(num_ranks, num_elements)
    results = launch(run_all, start, world_size=num_ranks, backend="gloo")
    for name in REAL:
        assert ends(on_a_ring(start, name)) == [result[name] for result in results], name
    assert ends(on_a_tree(start)) == [result["all-reduce"] for result in results]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", REAL)
def test_a_ring_takes_as_many_steps_and_bytes_as_its_formula(name, num_ranks):
    steps = on_a_ring(numbers(num_ranks, num_ranks * 2), name)
    operation, message_bytes = name.replace("-", "_"), 8 * num_ranks * (num_ranks if name == "all-gather" else 1)
    assert len(steps) - 1 == ring_steps(operation, num_ranks)
    sent = [sent_bytes(steps, rank) for rank in range(num_ranks)]
    assert sent == [pytest.approx(bus_factor(operation, num_ranks) * message_bytes)] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_a_tree_takes_fewer_steps_and_its_root_sends_more(num_ranks):
    start = numbers(num_ranks, num_ranks)
    steps = on_a_tree(start)
    levels = ceil(log2(num_ranks))
    assert len(steps) - 1 == 2 * levels
    assert sent_bytes(steps, 0) == levels * 4 * num_ranks  # once to each child
    assert ends(steps) == [[sum(column) for column in zip(*start)]] * num_ranks


def test_every_message_goes_to_the_next_rank_and_every_rank_sends_one():
    for step in on_a_ring(numbers(4, 4), "all-reduce")[1:]:
        assert sorted(move.source for move in step.moves) == [0, 1, 2, 3]
        assert all(move.target == (move.source + 1) % 4 for move in step.moves)


def test_a_sum_names_the_ranks_in_it():
    steps = on_a_ring([[1, 2, 3], [4, 5, 6], [7, 8, 9]], "all-reduce")
    assert [step.adds for step in steps] == [False, True, True, False, False]
    has = steps[1].held[1][0]  # the first piece of rank 0, added to that of rank 1
    assert (has.values, has.ranks) == ([5], (0, 1))
