"""The trainer's ZeRO stages on a 10-million-parameter GPT: what a rank holds at most, and what overlap saves.

The first rows say the most bytes that a rank of two holds in a step in bfloat16, which `tests.labtrain.test_memory`
counts, beside what `course.sizing` says; their times are those of a step in float32, against one of stage 0.

The last rows compare gradients that leave during the last backward with gradients that leave after it. Where ranks
share cores, messages take time from computing, so little can be saved. Paced, each layer's backward also sleeps, as a
host does that waits for a GPU: then messages travel meanwhile.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from course.sizing.fully_sharded import sharded_memory
from course.sizing.plan import Plan
from labkit.data_parallel import DataParallel
from labkit.groups import ProcessGroups, init_groups
from labkit.launch import World
from labtrain import TrainConfig
from labtrain.build import build, wrap
from labtrain.model import ParallelGPT
from labtrain.trainer import Trainer
from tests.labtrain.test_memory import bytes_held

CONFIG = TrainConfig(hidden_size=320, num_layers=8, batch_size=16, micro_batch_size=2, seq_length=16)
NUM_ROUNDS, SLEEP_SECONDS = 5, 0.04


def rows() -> Iterator[tuple[str, float, float]]:
    options = dict(backend="gloo", timeout_seconds=300)
    config = replace(CONFIG, precision="bfloat16", batch_size=8)
    with World(2, **options) as world:
        seconds = world.run(stages)[0]
        for stage in range(4):
            staged = replace(config, zero_stage=stage)
            _, most = max(world.run(bytes_held, staged))
            plan = Plan(config.shape, 2, config.batch_size, micro_batch_size=2, recompute="none", zero_stage=stage)
            sizing = sharded_memory(plan).total / config.shape.num_parameters
            yield (
                f"stage {stage}, d = 2: at most {most:.1f} bytes a parameter, sizing {sizing:.1f}",
                seconds[stage],
                seconds[0],
            )
    for world_size in (2, 4):
        with World(world_size, **options) as world:
            for sleep, kind in ((0.0, "computing"), (SLEEP_SECONDS, "paced")):
                seconds = world.run(overlapped, sleep)[0]
                yield f"step, {world_size} ranks, {kind}: messages beside backward, against after it", *seconds


def sends_afterwards(config: TrainConfig, model: ParallelGPT, groups: ProcessGroups) -> DataParallel:
    """Average gradients when the last backward is done."""
    return DataParallel(model, groups.dp_cp, overlap=False)


def stages() -> list[float]:
    """Return the median seconds of a step of each stage."""
    with init_groups(CONFIG.layout(dist.get_world_size())) as groups:
        return alternate([Trainer(build(replace(CONFIG, zero_stage=stage), groups)) for stage in range(4)])


def overlapped(sleep_seconds: float) -> list[float]:
    """Return the median seconds of a step with overlap, and without."""
    with init_groups(CONFIG.layout(dist.get_world_size())) as groups:
        trainers = [Trainer(build(CONFIG, groups, wrap=way)) for way in (wrap, sends_afterwards)]
        for layer in (layer for trainer in trainers for layer in trainer.models[0].layers.values() if sleep_seconds):
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(sleep_seconds))
        return alternate(trainers)


def alternate(trainers: list[Trainer]) -> list[float]:
    """Return each trainer's median seconds of a step, of the slowest rank."""
    torch.set_num_threads(1)
    taken = [[] for _ in trainers]
    for _ in range(2 + NUM_ROUNDS):
        for trainer, seconds in zip(trainers, taken):
            dist.barrier()
            seconds.append(trainer.step().seconds)
    medians = torch.tensor([statistics.median(seconds[2:]) for seconds in taken])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return medians.tolist()
