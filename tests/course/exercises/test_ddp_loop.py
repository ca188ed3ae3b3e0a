"""The exercise on a DDP loop: the solution trains as one process does, and what sends too much is told so."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from course.exercises import ddp_loop
from course.exercises.values import same
from labkit.launch import launch

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def trained():
    """On one rank: the numbers of the samples that the solution reads, and the weights at its end."""
    model, data, *rest = ddp_loop.loop_inputs(23, 3, 2)
    ddp_loop.my_ddp_loop(model, data, *rest)
    return data.read, [parameter.tolist() for parameter in model.parameters()]


def test_the_solution_agrees_with_one_process_on_the_same_samples():
    ranks = launch(trained, world_size=3)
    model, data, num_epochs, num_micro_batches, lr = ddp_loop.loop_inputs(23, 3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    per_update = 2 * num_micro_batches
    for epoch in range(num_epochs):
        assert {number for read, _ in ranks for number in read[8 * epoch :][:8]} == set(range(23))
    for update in range(2 * num_epochs):
        numbers = [number for read, _ in ranks for number in read[update * per_update :][:per_update]]
        optimizer.zero_grad()
        model(data.rows[numbers]).square().mean().backward()
        optimizer.step()
    for _, weights in ranks:
        assert same(weights, [parameter.tolist() for parameter in model.parameters()])


def sends_always(model, data, num_epochs, num_micro_batches, lr):
    return ddp_loop.loop_wrongly(model, data, num_epochs, num_micro_batches, lr, waits=lambda number, m: False)


def forward_outside(model, data, num_epochs, num_micro_batches, lr):
    parallel, sampler = DistributedDataParallel(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for number, x in enumerate(DataLoader(data, batch_size=2, sampler=sampler), 1):
            loss = parallel(x).square().mean() / num_micro_batches
            if number % num_micro_batches:
                with parallel.no_sync():
                    loss.backward()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("function", [sends_always, forward_outside])
def test_a_message_for_each_micro_batch_is_told_so(function):
    text = " ".join(ddp_loop.ddp_loop.verdict(function).text.split())
    assert "the values are right, but not the way they were computed" in text
    assert "It calls 18 all-reduces in 9 updates, and one for each is enough." in text


def test_an_answer_of_the_wrong_kind_is_told_so():
    text = " ".join(ddp_loop.ddp_loop.verdict(lambda *_: torch.ones(2)).text.split())
    assert "gave a Tensor expected the trained model" in text
