"""The exercise of notebook 14 on `fully_shard`: it agrees with one process."""

import copy

import pytest
import torch

from course.exercises import fully_sharded_loop
from course.exercises.fully_sharded_loop import fully_shard_loop
from course.exercises.values import same
from labkit.launch import launch


def solved(num_batches, num_rows):
    """On one rank: the shards of the solution, the batches, and the model as it was at the start."""
    given = fully_sharded_loop.loop_inputs(num_batches, num_rows)
    model, batches, lr = copy.deepcopy(given)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    shards = fully_sharded_loop.my_fully_shard_loop(model, batches, lr)
    return [shard.detach().clone() for shard in shards], batches, start, lr


@pytest.mark.parametrize(("world_size", "num_batches", "num_rows"), fully_shard_loop.cases)
def test_the_solution_agrees_with_one_process(world_size, num_batches, num_rows):
    ranks = launch(solved, num_batches, num_rows, world_size=world_size, backend="gloo")
    shards, batches, (start, *_), (lr, *_) = zip(*ranks)
    model = fully_sharded_loop.ScaledLayers()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for rows in zip(*batches, strict=True):
        optimizer.zero_grad()
        model(torch.cat(rows)).square().mean().backward()  # equally many rows on each rank
        optimizer.step()
    for parameter, parts in zip(model.parameters(), zip(*shards, strict=True), strict=True):
        assert same(torch.cat(parts), parameter.detach())
