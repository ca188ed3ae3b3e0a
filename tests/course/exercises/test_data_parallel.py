"""The exercises of notebook 05, on real ranks: solutions agree with one process, and wrong ways are named."""

import pytest
import torch
import torch.distributed as dist

from course.exercises import data_parallel
from course.exercises.values import plain, same
from labkit.launch import launch

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def ours_and_all(sizes):
    """On one rank: the two averages by the solutions, and what all ranks started from."""
    [gradients] = data_parallel.gradient_inputs(*sizes)
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, gradients)
    return data_parallel.my_average(gradients), data_parallel.my_bucketed_average(gradients, 4), everybodys


def test_averages_agree_with_numbers_in_one_process():
    for average, bucketed, everybodys in launch(ours_and_all, [(2,), (2, 2), (1,), (4,)], world_size=4):
        expected = [torch.stack(each).mean(dim=0) for each in zip(*everybodys)]
        assert same(average, expected)
        assert same(bucketed, expected)


def trained():
    weight, steps, lr = data_parallel.training_inputs(3, 2)
    return data_parallel.my_train(weight, steps, lr).tolist(), steps, lr


def test_the_training_loop_agrees_with_torch_on_the_whole_batch():
    ranks = launch(trained, world_size=4)
    weight = torch.nn.Parameter(torch.tensor([8.0, -4.0]))
    optimizer = torch.optim.SGD([weight], lr=ranks[0][2])
    for number in range(3):
        rows = torch.cat([x for _, steps, _ in ranks for x in steps[number]])
        optimizer.zero_grad()
        (rows @ weight).square().mean().backward()
        optimizer.step()
    for got, *_ in ranks:
        assert same(got, plain(weight))


def unequal(rows_of_ranks):
    """The solution's gradient for the mean of (x w)^2, from unequal rows; and the rows."""
    w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(rows_of_ranks[dist.get_rank()], 2, dtype=torch.float64, generator=generator)
    (rows @ w).square().mean().backward()
    return data_parallel.my_unequal_average(w.grad, len(rows)), rows


def test_unequal_rows_agree_with_one_process_on_all_rows():
    ranks = launch(unequal, [3, 3, 2, 2], world_size=4)
    w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    (torch.cat([rows for _, rows in ranks]) @ w).square().mean().backward()
    for got, _ in ranks:
        assert same(got, w.grad)
