"""Runs a step of any rank of a large job here, on fake tensors and in fake groups: nothing is computed or sent.

The trainer, its groups and its pipeline are the real ones, so what the log says is what such a rank would send.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch.distributed as dist

from course.communication import Communication, CommunicationLog, communication_log
from course.measure.fake_trainer import FakeTrainer, fake_tensors, fake_world
from labkit.grid import check_index
from labkit.groups import AXES_OF_GROUP
from labkit.parallel_config import V_SHAPED
from labtrain.config import TrainConfig
from labtrain.estimate import what_a_rank_holds
from labtrain.memory_estimate import MemoryEstimate

_FEW = 1  # micro-batches for each stage, after which every further one sends the same


@dataclass(frozen=True)
class DryRun:
    """What one rank of a job would hold and send."""

    rank: int
    groups: dict[str, list[int]]
    """The ranks that it shares a group with, by the group's kind."""
    num_parameters: int
    """Of its optimizer: from ZeRO-1 on, those of its own shards."""
    held: MemoryEstimate
    messages: CommunicationLog
    """Those of a step after the first one, which also exchanges shapes; not in the order of the calls."""

    def fits(self, memory_bytes: float) -> bool:
        """Return whether all that it holds when it is fullest fits this much memory."""
        return self.held.total <= memory_bytes

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.num_parameters:,} parameters; holds {self.held}\n{self.messages}"


def dry_run(config: TrainConfig, world_size: int, rank: int = 0) -> DryRun:
    """Return what a rank of a job of ``world_size`` ranks would hold, and send in a step; or raise as it would.

    Of many micro-batches it runs a few: every further one sends the same again. Tokens are taken to choose all experts
    equally often, and what experts tell each other of their loads is left out. So are evaluations and checkpoints.

    >>> run = dry_run(TrainConfig(tp_size=2, batch_size=64), world_size=1024, rank=1000)
    Traceback (most recent call last):
    labkit.sizes.Misfit: dp_size=512 * micro_batch_size=4 = 2048 does not divide batch_size=64: use batch_size 2048

    Raises:
        ValueError: the sizes do not fit together, or not these ranks; or this process is itself a rank of a world.
    """
    rank = check_index("rank", rank, "world_size", world_size)
    if dist.is_initialized():
        raise ValueError("this process is a rank of a running world: call dry_run in one that is not")
    quiet: dict = dict(checkpoint_dir=None, resume=False, save_interval=0, keep=0, async_save=False, eval_interval=0)
    config = replace(config.resize_to(world_size), **quiet)
    config.parallel.check(config.shape, world_size)
    layout, m, p = config.layout(world_size), config.num_micro_batches(world_size), config.pp_size
    _, held = what_a_rank_holds(config, world_size, layout.coords(rank).pp)
    few = _FEW * p * (2 if config.schedule in V_SHAPED else 1)
    more = few + p
    if m <= more:
        num_parameters, counts = _run(config, world_size, rank, m)
    else:
        _, before = _run(config, world_size, rank, few)
        num_parameters, after = _run(config, world_size, rank, more)
        counts = {key: after[key] + (after[key] - before[key]) * (m - more) // (more - few) for key in after}
    records = [Communication(*key) for key in sorted(counts) for _ in range(counts[key])]
    groups = {name: layout.group_of(rank, *axes) for name, axes in AXES_OF_GROUP.items()}
    return DryRun(rank, groups, num_parameters, held, CommunicationLog(records))


def _run(config: TrainConfig, world_size: int, rank: int, num_micro_batches: int) -> tuple[int, Counter]:
    """Run a step of so many micro-batches; return the rank's parameters, and how many messages of each kind it sent."""
    layout = config.layout(world_size)
    config = replace(config, batch_size=layout.dp_size * config.micro_batch_size * num_micro_batches)
    with fake_world(config, world_size, rank) as groups, fake_tensors():
        trainer = FakeTrainer(config, groups)
        with communication_log() as log:
            trainer.step()
        counts = Counter((each.operation, each.group, each.message_bytes) for each in log.records)
        return sum(p.numel() for p in trainer.parameters), counts
