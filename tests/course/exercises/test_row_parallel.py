"""The exercises of notebook 04, on real ranks: solutions pass, agree with torch, and each mistake gets its advice."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.exercises import row_parallel, vocabulary
from course.exercises.values import same, show
from labkit.launch import launch

EXERCISES = [row_parallel.row_forward, row_parallel.row_backward, vocabulary.vocab_cross_entropy]
MISTAKES = [(exercise, index) for exercise in EXERCISES for index in range(len(exercise.mistakes))]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_solution_passes(exercise):
    verdict = exercise.verdict(exercise.solution_function)
    assert verdict.status == "passed", verdict.text
    assert verdict.text.endswith("correct, on 2 and 4 ranks.")


@pytest.mark.parametrize(
    ("exercise", "index"), MISTAKES, ids=[f"{e.name}-{e.mistakes[i].function.__name__}" for e, i in MISTAKES]
)
def test_each_mistake_gets_its_own_advice(exercise, index):
    verdict = exercise.verdict(exercise.mistakes[index].function)
    text = " ".join(verdict.text.split())
    assert verdict.status == "wrong"
    given = [mistake.advice in text for mistake in exercise.mistakes]
    assert given == [i == index for i in range(len(exercise.mistakes))]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_blank_stub_is_not_attempted(exercise):
    assert exercise.verdict(lambda *_: ...).status == "not attempted"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_answer_comes_soon(exercise, launches):
    exercise.verdict(exercise.mistakes[-1].function)
    assert len(launches) <= 6  # about a second


def whole(tensor, dim):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return torch.cat(pieces, dim)


def own(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def row_layer_by_torch():
    """The solution's values and those of torch's own linear layer on the whole tensors, on one rank."""
    x, weight, bias = row_parallel.row_inputs(2, 3)
    grad_y, *_ = row_parallel.row_gradient_inputs(2, 3)
    whole_x, whole_weight = (whole(tensor, 1).requires_grad_() for tensor in (x, weight))
    whole_bias = bias.clone().requires_grad_()
    y = F.linear(whole_x, whole_weight, whole_bias)
    y.backward(grad_y)
    ours = [row_parallel.my_row_forward(x, weight, bias), *row_parallel.my_row_backward(grad_y, x, weight)]
    return ours, [y, own(whole_x.grad, 1), own(whole_weight.grad, 1), whole_bias.grad]


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_solutions_agree_with_torch(world_size):
    for ours, torchs in launch(row_layer_by_torch, world_size=world_size):
        assert same(ours, torchs)


def loss_by_torch(scale):
    logits, target = vocabulary.logit_inputs(4, scale)
    return vocabulary.my_cross_entropy(logits, target), F.cross_entropy(whole(logits, 1), target, reduction="none")


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_loss_agrees_with_torch(scale):
    for ours, torchs in launch(loss_by_torch, scale, world_size=4):
        assert same(ours, torchs)


def test_gathering_the_whole_input_is_right_but_not_the_way():
    def gathers(x, weight, bias):
        return F.linear(whole(x, 1), whole(weight, 1), bias)

    text = row_parallel.row_forward.verdict(gathers).text
    assert "the values are right" in text
    assert "It calls all_gather" in text


def test_gathering_the_logits_is_right_but_not_the_way():
    def gathers(logits, target):
        return F.cross_entropy(whole(logits, 1), target, reduction="none")

    assert "It calls all_gather" in vocabulary.vocab_cross_entropy.verdict(gathers).text


def test_an_all_reduce_of_all_logits_is_told_how_many_bytes_it_sent():
    def reduces_all_logits(logits, target):
        rank, shard_size = dist.get_rank(), logits.size(1)
        padded = torch.zeros(len(logits), shard_size * dist.get_world_size())
        padded[:, rank * shard_size : (rank + 1) * shard_size] = logits
        dist.all_reduce(padded)
        return F.cross_entropy(padded, target, reduction="none")

    text = " ".join(vocabulary.vocab_cross_entropy.verdict(reduces_all_logits).text.split())
    assert "It sends 128 bytes into all-reduces. Three numbers a token are enough, 48 bytes" in text


def test_backward_that_communicates_for_nothing_is_told_so():
    def communicates(grad_y, x, weight):
        dist.all_reduce(torch.zeros(1))
        return row_parallel.my_row_backward(grad_y, x, weight)

    text = " ".join(row_parallel.row_backward.verdict(communicates).text.split())
    assert "the values are right" in text
    assert "It calls all_reduce. Backward of this layer needs no message at all." in text


def test_an_overflow_is_shown_not_raised():
    assert show([float("inf"), float("nan"), -float("inf"), 12345.0]) == "[inf, nan, -inf, 12345]"
