"""A training step of a 10-million-parameter MLP: labkit.data_parallel against torch's DistributedDataParallel,
ZeroRedundancyOptimizer and `fully_shard`.

Rounds of the two alternate in one world, so that both see the same machine; the result is the median round of the
slowest rank. One thread per rank. Each step averages gradients once: ours by ShardedOptimizer with a reduce-scatter,
torch's beside ZeroRedundancyOptimizer with an all-reduce. Fully sharded, each linear layer is a unit, and both have the
fused AdamW that `labtrain` uses.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from course.sharded_optimizer import ShardedOptimizer
from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.launch import launch

WIDTH, NUM_LAYERS, ROWS_PER_RANK = 1024, 10, 32  # 10.5 million parameters
NUM_ROUNDS = 30


def rows() -> Iterator[tuple[str, float, float]]:
    for world_size in (2, 4):
        for text, pair in PAIRS.items():
            ours, theirs = launch(compare, pair, world_size=world_size, backend="gloo", timeout_seconds=300)[0]
            yield f"{text}, {world_size} ranks", ours, theirs


def data_parallel(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DataParallel(model, dist.group.WORLD), torch.optim.SGD(model.parameters(), lr=0.01)


def torch_data_parallel(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)


def sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, dist.group.WORLD, lr=0.01)


def torch_sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def fully_sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    units = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    wrapped = FullyShardedDataParallel(model, dist.group.WORLD, units=units)
    return wrapped, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def torch_fully_sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def not_sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


PAIRS = {
    "DataParallel step, 10 million parameters, against DDP": (data_parallel, torch_data_parallel),
    "ShardedOptimizer step with AdamW, against ZeroRedundancyOptimizer": (sharded, torch_sharded),
    "FullyShardedDataParallel step with AdamW, against fully_shard": (fully_sharded, torch_fully_sharded),
    "FullyShardedDataParallel step with AdamW, against DDP": (fully_sharded, not_sharded),
}


def compare(makers: tuple[Callable, Callable]) -> tuple[float, float]:
    """Median seconds of a step of ours and of torch's, the same on every rank."""
    torch.set_num_threads(1)
    trainers, seconds = [], ([], [])
    for make in makers:
        torch.manual_seed(0)
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        trainers.append(make(nn.Sequential(*layers)))
    x = torch.randn(ROWS_PER_RANK, WIDTH)
    for number in range(3 + NUM_ROUNDS):
        for trainer, taken in zip(trainers, seconds):
            taken.append(one_step(*trainer, x))
        if number == 2:  # warm
            seconds = ([], [])
    medians = torch.tensor([statistics.median(taken) for taken in seconds])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return medians[0].item(), medians[1].item()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - start
