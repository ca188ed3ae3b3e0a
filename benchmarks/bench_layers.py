"""A parallel MLP, forward and backward: labkit.tensor_parallel against torch.distributed.tensor.parallel (DTensor).

Rounds of the two alternate in one world, so that both see the same machine; the result is the median round of the
slowest rank. One thread per rank.
"""

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from labkit.launch import launch
from labkit.tensor_parallel import ParallelMLP

SIZES = {"large": (512, 512, 2048), "small": (64, 64, 256)}  # tokens, hidden, ffn
NUM_ROUNDS = 60


def rows() -> Iterator[tuple[str, float, float]]:
    for world_size in (2, 4):
        for name, sizes in SIZES.items():
            ours, theirs = launch(compare, *sizes, world_size=world_size, backend="gloo")[0]
            text = "/".join(map(str, sizes))
            yield f"MLP forward and backward, {name} ({text}), {world_size} ranks, against DTensor", ours, theirs


def compare(num_tokens: int, hidden_size: int, ffn_hidden_size: int) -> tuple[float, float]:
    """Median seconds of ours and of DTensor's, the same on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden_size)
    ours = ParallelMLP(hidden_size, ffn_hidden_size, dist.group.WORLD)
    models = [ours, dtensor_mlp(hidden_size, ffn_hidden_size)]
    seconds: list[list[float]] = [[], []]
    for number in range(5 + NUM_ROUNDS):
        for model, taken in zip(models, seconds):
            taken.append(one_round(model, x))
        if number == 4:  # warm
            seconds = [[], []]
    medians = torch.tensor([statistics.median(taken) for taken in seconds])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return medians[0].item(), medians[1].item()


def one_round(model: nn.Module, x: torch.Tensor) -> float:
    x = x.clone().requires_grad_()
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


def dtensor_mlp(hidden_size: int, ffn_hidden_size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    up, down = nn.Linear(hidden_size, ffn_hidden_size), nn.Linear(ffn_hidden_size, hidden_size)
    model = nn.Sequential(up, nn.GELU(), down)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
