"""Trains one rank's chunks of the model on its rows of the data: gradients, clipping, update,
checkpoint.

Loss and gradient norm of every step are those of one process with the whole model and the whole
batch, whatever the layout: each weight is drawn by its name, each sample by its number.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from labkit import pipeline
from labkit.context_parallel import positions
from labkit.expert_parallel import end_step
from labkit.gradients import all_reduce_grads, loss_and_grad_norm, scale_grads
from labkit.groups import ProcessGroups, init_groups, local_device
from labkit.partition import rows_of_replica
from labkit.schedules import Schedule
from labkit.sizes import ranks_text
from labkit.tensor_parallel import seed_replicas
from labkit.timeline.trace import Trace
from labtrain.build import Job, build
from labtrain.config import TrainConfig
from labtrain.console import Step, progress_bar
from labtrain.data import EVALUATION_SAMPLES
from labtrain.exit_signal import ExitSignal
from labtrain.profile import profiling
from labtrain.world import check_same_options, check_tokens

if TYPE_CHECKING:
    from labtrain.checkpoint_tensors import State

Batch = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""The tokens of a rank's micro-batches, [micro-batch, seq/c] each, and for each the tokens that
come next.
"""

BuildJob = Callable[[TrainConfig, ProcessGroups], Job]
"""`labtrain.build.build`, or a function of yours that returns such a job."""


def train(config: TrainConfig, build: BuildJob = build) -> list[Step]:
    """Run the steps of ``config`` on this rank; call it on every rank of a world that is up.

    In a notebook: ``launch(train, config, world_size=8)``. In a terminal: ``python -m labtrain``.

    Raises:
        ValueError: the config does not fit the number of ranks, or a checkpoint does not fit the
            config.
        FloatingPointError: the loss or a gradient is not finite; says which step and ranks.
    """
    with training(config, build) as trainer, progress_bar(config, trainer.steps_done) as show:
        return [show(step) for step in trainer.steps()]


def steps(config: TrainConfig, build: BuildJob = build) -> Iterator[Step]:
    """Run `train` one step at a time, so that the caller can look at each step, and may stop."""
    with training(config, build) as trainer:
        yield from trainer.steps()


@contextmanager
def training(config: TrainConfig, build: BuildJob = build) -> Iterator["Trainer"]:
    """Hold what a run needs: the process groups, this rank's `Trainer`, the lock on the checkpoint
    folder.
    """
    # It imports half of torch, so not when a notebook imports this module
    from labtrain import checkpoint

    check_same_options(config)
    config = config.resize_to(dist.get_world_size())
    layout = config.layout(dist.get_world_size())
    check_tokens(config)
    config.check_memory(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    folder = config.checkpoint_dir
    saving: AbstractContextManager[Callable] = nullcontext(checkpoint.save)
    if folder:
        saving = checkpoint.lock_folder(folder, config.resume, config.async_save)
    # It stays until what is saved in the background is complete
    exit_signal = ExitSignal(config.exit_duration)
    with init_groups(layout, config.shard_size) as groups, exit_signal, saving as save:
        yield Trainer(build(config, groups), save, exit_signal)


class Trainer:
    """Trains one rank's part of a job, as `labtrain.build.build` returns it, step by step.

    What a step sends, beside what layers send to compute, and stages to each other:

    - replicas average gradients while backward runs; with ZeRO each keeps its shard, and sends one
      flag for each parameter; then replicas get the buffers of their first rank;
    - the ends of the pipeline add up the gradients of a tied embedding;
    - each tensor group sums the gradients of which its ranks have parts, in one all-reduce;
    - all ranks sum t + 2 numbers: the loss, the squared norm, how many targets count, and whether a
      rank wants to end;
    - with experts, all ranks sum how often each was chosen.

    A run with a different model, wrapper or optimizer takes a different job. One with a different
    loss or different data overrides `loss`, `rows` or `micro_batches`.
    """

    def __init__(
        self, job: Job, save: Callable | None = None, exit_signal: ExitSignal | None = None
    ):
        from labtrain import checkpoint

        config = job.config
        self.config = config
        self.groups = job.groups
        self.schedule = job.schedule
        self.models = job.models
        self.chunks = job.chunks
        self.parameters = job.parameters
        self.tied = job.tied
        self.optimizer = job.optimizer
        self.save = save or checkpoint.save
        self.exit_signal = exit_signal or ExitSignal()
        self.is_ending = False
        self.steps_done = 0
        self.samples_done = 0
        self.trace: Trace | None = None  # while steps are profiled
        self.dataset = config.make_dataset()
        self._state = self._make_state()
        if config.resume and config.checkpoint_dir:
            done = checkpoint.load_newest(config.checkpoint_dir, self._state)
            self.steps_done, self.samples_done = done

    def _make_state(self) -> "State":
        """Return what a checkpoint saves and restores."""
        from labtrain import checkpoint

        config = self.config
        data = {"seed": config.seed, "text": self.dataset.fingerprint}
        options = json.loads(json.dumps(asdict(config), default=str))  # as a checkpoint has them
        if config.init_from is not None:
            # A relative path would be a different folder for whoever exports elsewhere
            options["init_from"] = str(Path(config.init_from).resolve())
        model = (self.models, self.optimizer, self.groups, config.shape)
        return checkpoint.State(*model, data, options)

    def steps(self) -> Iterator[Step]:
        """Run the steps that are left to do, unless the run is to end early; the config says which
        are profiled.
        """
        while self.steps_done < self.config.steps and not self.is_ending:
            if self.steps_done + 1 not in self.config.profiled_steps:
                yield self.step()
                continue
            with profiling(str(self.config.profile_dir), self.groups) as self.trace:
                while self.steps_done + 1 in self.config.profiled_steps and not self.is_ending:
                    with self.trace.span("step", f"step {self.steps_done + 1}"):
                        step = self.step()
                    yield step
            self.trace = None

    def step(self) -> Step:
        """Compute gradients, clip them, and update the weights; then evaluate and save if it is
        time.
        """
        config = self.config
        start = time.perf_counter()
        loss, norm = self.compute_gradients()
        if config.clip_norm:
            scale = config.clip_norm / (norm + 1e-6)
            if scale < 1:
                scale_grads(self.parameters, scale)
        learning_rate = config.learning_rate_at(self.steps_done)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = learning_rate
        self.optimizer.step()
        for model in self.models:
            end_step(model, self.groups)  # the biases of routers
        self.steps_done += 1
        self.samples_done += config.batch_size
        seconds = time.perf_counter() - start
        evaluation_loss = self.evaluate() if self._is_due(config.eval_interval) else None
        is_last = self.is_ending or self.steps_done == config.steps
        if config.checkpoint_dir and (is_last or self._is_due(config.save_interval)):
            done = (self.steps_done, self.samples_done)
            self.save(config.checkpoint_dir, self._state, *done, config.keep)
        exit_reason = ""
        if self.is_ending:
            exit_reason = self.exit_signal.reason or "asked on another rank"
        return Step(
            step=self.steps_done,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            seconds=seconds,
            tokens_per_second=config.batch_size * config.seq_length / seconds,
            evaluation_loss=evaluation_loss,
            exit_reason=exit_reason,
        )

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.steps_done % interval == 0

    def compute_gradients(self) -> tuple[float, float]:
        """Leave the gradients of the whole batch in the parameters; return its loss and their norm,
        both finite.
        """
        batch = self.micro_batches(self.samples_done)
        # Every step and replica has its own dropout masks. The step decides them, so a resumed run
        # draws the same.
        first_seed = self.config.seed + self.steps_done * self.groups.layout.world_size
        seed_replicas(first_seed, self.groups)
        self.optimizer.zero_grad()
        loss_share, num_counted = self.run(self.schedule, batch, average=True)
        # The norm needs whole gradients, so these sums come first
        all_reduce_grads(self.parameters, self.groups.tp)
        wants_to_end = bool(self.exit_signal.reason)
        sums = loss_and_grad_norm(
            loss_share, self.parameters, self.groups, num_counted, wants_to_end
        )
        self.is_ending = sums.is_ending
        factor = self._all_over_counted(batch, sums.num_counted)
        if factor != 1:  # some targets do not count
            scale_grads(self.parameters, factor)
        loss = factor * sums.loss
        norm = factor * sums.grad_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            values = f"the loss is {loss:g}, the gradient norm {norm:g}"
            where = self._where_not_finite(loss_share)
            raise FloatingPointError(f"step {self.steps_done + 1}: {values}. {where}")
        return loss, norm

    def evaluate(self) -> float:
        """Return the loss on one batch that no step trains on, without dropout."""
        for chunk in self.chunks:
            chunk.eval()
        batch = self.micro_batches(EVALUATION_SAMPLES)
        loss_share, num_counted = self.run(self.schedule.forward_only(), batch)
        for chunk in self.chunks:
            chunk.train()
        sums = loss_and_grad_norm(loss_share, {}, self.groups, num_counted)
        return self._all_over_counted(batch, sums.num_counted) * sums.loss

    def run(
        self, schedule: Schedule, batch: Batch, average: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the pipeline; return this rank's share of the loss, in float64, and how many of its
        targets count.

        Over replicas both add up. The loss and its gradients are those of the sum over the targets
        that count, divided by the number of all targets: how many count is known only when all
        ranks have computed their losses. Gradients are averaged over replicas only if asked for.
        """
        inputs, targets = batch
        num_counted = torch.zeros((), dtype=torch.float64, device=local_device())

        def loss_of(logits: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
            assert targets is not None
            result = self.loss(logits, targets)
            if not isinstance(result, tuple):
                fault = f"loss() returned a {type(result).__name__}"
                rule = "the sum over the targets that count, and how many do"
                raise ValueError(f"{fault}: return {rule}, as Trainer.loss does")
            total, count = result
            num_counted.add_(count)
            return total / targets.numel()

        loss = pipeline.run(
            schedule,
            self.chunks,
            self.groups,
            inputs,
            targets=targets,
            loss=loss_of,
            tied=self.tied,
            trace=self.trace,
            average=average,
            reduce_every_micro_batch=self.config.zero_stage >= 2,
            activation_spec=self.models[0].activation_spec(inputs[0]),
            ignore_index=None,  # `loss_of` counts
        )
        if loss is None:  # it is on the ranks of the last stage
            loss = torch.zeros((), device=local_device())
        return loss.double() / self.groups.dp_cp.size(), num_counted

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the sum of a micro-batch's losses over the targets that count, and how many do:
        those not -100.

        It runs on the rank of the last stage. A step's loss is the mean over all targets that
        count, in all micro-batches and on all ranks, as in one process with the whole batch. To
        leave some out, make them -100 in `micro_batches`, or here:

            return super().loss(logits, targets.masked_fill(targets == padding, -100))

        The losses of routers are divided by the number of targets that count too, so their weight
        grows with the share that does not, as with ``calculate_per_token_loss`` in Megatron-LM.
        """
        return self.models[-1].loss(logits, targets, reduction="sum"), (targets != -100).sum()

    def rows(self) -> range:
        """Return which rows of a batch this rank's replica has."""
        dp_size = self.groups.layout.dp_size
        return rows_of_replica(self.config.batch_size, dp_size, self.groups.coords.dp)

    def micro_batches(self, first_sample: int) -> Batch:
        """Return this rank's part of the batch that starts with a sample."""
        config = self.config
        numbers = [first_sample + row for row in self.rows()]
        samples = [self.dataset.sample(number, config.seq_length + 1) for number in numbers]
        tokens = torch.stack([torch.from_numpy(sample) for sample in samples])  # [rows, seq + 1]
        cp = self.groups.cp
        held = positions(config.seq_length, cp.size(), cp.rank(), config.zigzag)
        # Before the cut: what comes next may be on a different rank
        inputs = tokens[:, :-1][:, held].to(local_device())  # [rows, seq/c]
        targets = tokens[:, 1:][:, held].to(local_device())
        return inputs.split(config.micro_batch_size), targets.split(config.micro_batch_size)

    def _all_over_counted(self, batch: Batch, num_counted: int) -> float:
        """Return the number of all targets of the whole batch, divided by the number of those that
        count.
        """
        num_targets = sum(targets.numel() for targets in batch[1]) * self.groups.dp_cp.size()
        if num_counted == 0:
            found = f"none of the {num_targets} targets of a batch counts"
            fault = f"after step {self.steps_done}: {found}"
            raise ValueError(f"{fault}: a loss needs at least one that is not -100")
        return num_targets / num_counted

    def _where_not_finite(self, loss_share: torch.Tensor) -> str:
        """Return which ranks have a loss or a gradient that is not finite. Every rank calls it.

        A collective spreads a NaN to its whole group, and replicas have averaged their gradients.
        So the ranks of a loss say more than those of gradients.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        is_bad = {
            "the loss": not bool(loss_share.isfinite()),
            "gradients": not all(bool(gradient.isfinite().all()) for gradient in gradients),
        }
        of_ranks: list[Any] = [None] * self.groups.layout.world_size
        dist.all_gather_object(of_ranks, is_bad)
        found = []
        for what in is_bad:
            ranks = [rank for rank, of_rank in enumerate(of_ranks) if of_rank[what]]
            if ranks:
                found.append(f"{what} on ranks {ranks_text(ranks)}")
        where = "Every loss and gradient is finite, but a sum is not"
        if found:
            where = f"Not finite: {', '.join(found)}"
        return f"{where}. Nothing was updated in this step"
