"""A trainer on fake tensors and in fake groups: it goes through its steps, but computes and sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.data_parallel.replicas import DataParallelBase, grad_dtype_of
from labkit.groups import ProcessGroups, init_groups
from labtrain.build import build, wrap
from labtrain.config import TrainConfig
from labtrain.estimate import _even_loads
from labtrain.model import ParallelGPT
from labtrain.trainer import Batch, Trainer


class FakeTrainer(Trainer):
    """A trainer whose weights and tokens are fake."""

    def __init__(self, config: TrainConfig, groups: ProcessGroups):
        super().__init__(build(config, groups, wrap=_wrap_on_cpu))

    def micro_batches(self, first_sample: int) -> Batch:
        rows, length = len(self.rows()), self.config.seq_length // self.config.cp_size
        tokens = torch.zeros(rows, length, dtype=torch.long).split(self.config.micro_batch_size)
        return tokens, tokens


def _wrap_on_cpu(config: TrainConfig, model: ParallelGPT, groups: ProcessGroups) -> DataParallelBase:
    """Wrap a chunk whose fake weights would otherwise stay on the meta device."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # modules that share a tensor go on sharing it
    tables: list[dict[str, Any]] = [table for part in model.modules() for table in (part._parameters, part._buffers)]
    for table in tables:
        for name, x in table.items():
            if x is not None and x.device.type == "meta":
                made[x] = table[name] = made[x] if x in made else _on_cpu(x)
    return wrap(config, model, groups)


def _on_cpu(x: torch.Tensor) -> torch.Tensor:
    data = torch.empty_like(x, device="cpu")
    if not isinstance(x, nn.Parameter):
        return data
    made = nn.Parameter(data)
    if grad_dtype_of(x) != made.dtype:
        made.grad_dtype = grad_dtype_of(x)
    return made


@contextmanager
def fake_world(config: TrainConfig, world_size: int, rank: int) -> Iterator[ProcessGroups]:
    """Yield a rank's groups, in a world of this process alone in which collectives and messages do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with init_groups(config.layout(world_size), config.shard_size) as groups:
            yield groups
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Let tensors have no memory, whatever looks into them see ones, and what compares ranks or reads files do nothing.

    FSDP makes a subclass of each shard to refuse its use; a fake tensor cannot become one.
    """
    with (
        FakeTensorMode(),
        _even_loads(),
        torch.random.fork_rng(devices=[]),
        patch.object(FakeTensor, "tolist", lambda x: [1.0] * x.numel()),
        patch.object(torch.Tensor, "as_subclass", lambda x, _: x),
        patch("labkit.data_parallel.replicas.check_alike"),
        patch("labtrain.build.check_alike"),
        patch("labtrain.pretrained.load"),
    ):
        yield
