"""One rank of a training run: its part of the model, its rows of the data, and what it does in a step.

Loss and gradient norm of every step are those of one process with the whole model and the whole batch, whatever the
layout: weights are drawn by their names, data by sample numbers.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from labkit import checkpoint, pipeline
from labkit.cuts import BatchCut
from labkit.data import EVALUATION_SAMPLES
from labkit.data_parallel import DataParallel, ShardedOptimizer
from labkit.groups import ProcessGroups, init_groups, local_device
from labkit.model import ParallelGPT
from labkit.schedules import Schedule
from labkit.tensor_parallel import seed_replicas
from labkit.train.config import TrainConfig
from labkit.train.console import Progress
from labkit.train.gradients import clip_gradients, global_grad_norm
from labkit.train.master_weights import MasterWeights
from labkit.train.not_finite import first_not_finite


@dataclass(frozen=True)
class Step:
    """What a step came to, the same on every rank: ``number`` counts from 1."""

    number: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    evaluation_loss: float | None = None


def train(config: TrainConfig) -> list[Step]:
    """Run the steps of ``config`` on this rank; to be called on every rank of a world that is up.

    ``launch(train, config, world_size=8)`` does it from a notebook, and ``python -m labkit.train`` in a terminal,
    alone, under torchrun or under srun.

    Raises:
        ValueError: the config does not fit the number of ranks, or a checkpoint does not fit the config.
        FloatingPointError: the loss or a gradient is no finite number; says at which step, and on which rank first.
    """
    with training(config) as trainer, Progress(config, trainer.steps_done) as progress:
        return [progress.show(step) for step in trainer.steps()]


def steps(config: TrainConfig) -> Iterator[Step]:
    """`train`, one step at a time: for ``stream(world, steps, config)``, where a cell draws each step and may stop."""
    with training(config) as trainer:
        yield from trainer.steps()


@contextmanager
def training(config: TrainConfig) -> Iterator["Trainer"]:
    """What is up while a run lasts: the process groups, this rank's `Trainer`, its claim on the checkpoint folder."""
    layout = config.layout(dist.get_world_size())
    folder = config.checkpoint_dir
    with checkpoint.claim(folder, config.resume) if folder else nullcontext(), init_groups(layout) as groups:
        yield Trainer(config, groups)


class Trainer:
    """A rank's chunks of the model, its optimizer, and its place in the data."""

    def __init__(self, config: TrainConfig, groups: ProcessGroups):
        self.config, self.groups = config, groups
        self.steps_done = self.samples_done = 0
        world_size, rank = groups.layout.world_size, groups.coords.pp
        self.schedule, self.text = config.make_schedule(world_size), config.make_text()
        stages = [self.schedule.stage_of(rank, chunk) for chunk in range(config.num_chunks)]
        self.models = models = [self._make_model(stage) for stage in stages]
        self.chunks = [DataParallel(model, groups.dp) for model in models]
        embeddings = [(m, m.embedding.weight) for m in models if m.is_first != m.is_last and (m.is_first or m.is_last)]
        self.tied = [weight for _, weight in embeddings]
        self.copies = [weight for model, weight in embeddings if model.is_last]
        self.parameters = [parameter for model in models for parameter in model.parameters()]
        self.optimizer = self._make_optimizer()
        if config.resume and config.checkpoint_dir:
            self.steps_done, self.samples_done = checkpoint.load_newest(config.checkpoint_dir, self._state())

    def steps(self) -> Iterator[Step]:
        """The steps that are left to do."""
        while self.steps_done < self.config.steps:
            yield self.step()

    def step(self) -> Step:
        """Forward and backward of this replica's rows, the average over replicas, and a step of the optimizer."""
        config, start = self.config, time.perf_counter()
        self.seed_dropout()
        inputs, targets = self._batch(self.samples_done)
        self.optimizer.zero_grad()
        loss = self.run(self.schedule, inputs, targets)
        for chunk in self.chunks:
            chunk.sync_gradients()
        norm = global_grad_norm(self.parameters, self.copies, self.groups)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(first_not_finite(self, inputs, targets, loss, norm))
        clip_gradients(self.parameters, norm, config.clip_norm)
        learning_rate = config.learning_rate_at(self.steps_done)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = learning_rate
        self.optimizer.step()
        self.steps_done += 1
        self.samples_done += config.batch_size
        seconds = time.perf_counter() - start
        is_evaluated = config.eval_interval and self.steps_done % config.eval_interval == 0
        evaluation_loss = self.evaluate() if is_evaluated else None
        self._save_if_due()
        tokens = config.batch_size * config.seq_length
        return Step(self.steps_done, loss, norm, learning_rate, seconds, tokens / seconds, evaluation_loss)

    def seed_dropout(self) -> None:
        """The masks follow from the step, so that they can be resumed; and differ from step to step and by replica."""
        seed_replicas(self.config.seed + self.steps_done * self.groups.layout.world_size, self.groups)

    def evaluate(self) -> float:
        """The loss on one batch that is not trained on, without dropout."""
        for chunk in self.chunks:
            chunk.eval()
        loss = self.run(self.schedule.forward_only(), *self._batch(EVALUATION_SAMPLES))
        for chunk in self.chunks:
            chunk.train()
        return loss

    def run(self, schedule: Schedule, inputs, targets, tied: Sequence[nn.Parameter] | None = None) -> float:
        """The pipeline's loss, averaged over the replicas, on every rank; gradients are this replica's own."""
        with ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            tied, loss_function = self.tied if tied is None else tied, cast(Callable, self.models[-1].loss)
            loss = pipeline.run(
                schedule, self.chunks, self.groups, inputs, targets=targets, loss=loss_function, tied=tied
            )
        total = torch.zeros((), dtype=torch.float64, device=local_device())
        if loss is not None:  # on the last stage only
            dist.all_reduce(total.add_(loss), group=self.groups.dp)
        dist.all_reduce(total, group=self.groups.pp)
        return total.item() / self.groups.layout.dp_size

    def _batch(self, first_sample: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """This replica's micro-batches of tokens, and of the tokens that come next: [micro-batch, seq] each."""
        rows = BatchCut(self.config.batch_size, self.groups.layout.dp_size).rows_of_replica(self.groups.coords.dp)
        samples = [self.text.sample(first_sample + row, self.config.seq_length + 1) for row in rows]
        tokens = torch.stack([torch.from_numpy(sample) for sample in samples]).to(local_device())
        return tokens[:, :-1].split(self.config.micro_batch_size), tokens[:, 1:].split(self.config.micro_batch_size)

    def _make_model(self, stage: int) -> ParallelGPT:
        config = self.config
        return ParallelGPT(
            config.shape,
            self.groups.tp,
            stage=stage,
            num_stages=self.schedule.num_model_chunks,
            seed=config.seed,
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            recompute=config.recompute,
            dtype=config.dtype,
            device=local_device(),
        )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW; weight decay for matrices only. With master weights for bfloat16, and sharded if asked for."""
        matrices = [parameter for parameter in self.parameters if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters if parameter.dim() <= 1]
        param_groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        options: dict[str, Any] = dict(
            lr=self.config.learning_rate, weight_decay=self.config.weight_decay, betas=(0.9, 0.95)
        )
        make = partial(MasterWeights, AdamW) if self.config.precision == "bfloat16" else AdamW
        if self.config.sharded_optimizer:
            return ShardedOptimizer(param_groups, make, self.groups.dp, **options)
        return make(param_groups, **options)

    def _state(self) -> checkpoint.State:
        return checkpoint.State(self.models, self.optimizer, self.groups, self.config.shape)

    def _save_if_due(self) -> None:
        interval, is_last = self.config.save_interval, self.steps_done == self.config.steps
        if self.config.checkpoint_dir and (is_last or (interval and self.steps_done % interval == 0)):
            checkpoint.save(self.config.checkpoint_dir, self._state(), self.steps_done, self.samples_done)
