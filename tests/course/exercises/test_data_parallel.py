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


@pytest.mark.parametrize(
    ("exercise", "function", "complaint"),
    [
        (
            data_parallel.bucketed_average,
            lambda gradients, bucket_size: data_parallel.my_average(gradients),
            "It sends 3 messages, of [2, 4, 1] numbers. Gradients of [2, 4, 1] numbers, in buckets that are full at 4 "
            "or more, need 2, of [6, 1].",
        ),
        (
            data_parallel.bucketed_average,
            lambda gradients, bucket_size: data_parallel.my_bucketed_average(gradients, 100),
            "It sends 1 message, of [7] numbers. Gradients of [2, 4, 1] numbers",
        ),
    ],
)
def test_right_values_the_wrong_way(exercise, function, complaint):
    text = " ".join(exercise.verdict(function).text.split())
    assert "the values are right, but not the way" in text
    assert complaint in text


def test_a_message_for_each_micro_batch_is_told_so():
    def reduces_each(weight, steps, lr):
        for micro_batches in steps:
            total = torch.zeros_like(weight)
            for x in micro_batches:
                weight.grad = None
                (x @ weight).square().mean().backward()
                dist.all_reduce(weight.grad)
                total += weight.grad / dist.get_world_size() / len(micro_batches)
            with torch.no_grad():
                weight -= lr * total
        return weight

    text = " ".join(data_parallel.training_loop.verdict(reduces_each).text.split())
    assert "It calls 6 all-reduces in 2 steps. One per step is enough" in text


def test_a_collective_on_one_rank_only_gets_advice():
    def only_rank_0(gradients):
        if dist.get_rank() == 0:
            dist.all_reduce(gradients[0])
        return gradients

    verdict = data_parallel.average.verdict(only_rank_0)
    assert verdict.status == "stuck"
    assert "only some ranks call" in " ".join(verdict.text.split())
