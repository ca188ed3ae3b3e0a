"""One tiny training run of the museum by labtrain's trainer, in one process or on ranks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from course.communication import CommunicationLog, communication_log
from course.museum.harness import Job, Placed, Run, Sharding, Tensors, fingerprint
from course.parity import gradients, weights
from labkit.groups import ProcessGroups
from labkit.layout import ParallelLayout
from labkit.shape import GPT
from labkit.tensor_parallel import vocabulary
from labtrain import TrainConfig, Trainer
from labtrain.build import build

LABEL_SMOOTHING, CLIP_NORM, LEARNING_RATE = 0.1, 0.2, 0.5


class TinyConfig(TrainConfig):
    """A config whose vocabulary is one word larger than its text's 27, so that two ranks divide it equally."""

    @property
    def shape(self) -> GPT:
        return replace(super().shape, vocab_size=28)


CONFIG = TinyConfig(
    steps=3, batch_size=12, micro_batch_size=2, seq_length=8, num_layers=2, hidden_size=16, num_attention_heads=2,
    tp_size=2, pp_size=2, precision="float64", clip_norm=CLIP_NORM,
    learning_rate=LEARNING_RATE, min_learning_rate=LEARNING_RATE, warmup_steps=0,
)  # fmt: skip
LAYOUT = CONFIG.layout(world_size=8)
CONTEXT_CONFIG = replace(CONFIG, tp_size=1, pp_size=1, cp_size=2)
SHARDING_CONFIG = replace(CONFIG, tp_size=1, pp_size=1, micro_batch_size=1, zero_stage=1, shard_size=2)
NUM_MICRO_BATCHES = CONFIG.num_micro_batches(LAYOUT.world_size)  # 3: not the size of any axis


def gradient_descent(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)  # AdamW would hide a gradient that is too large as a whole


class TinyTrainer(Trainer):
    """`labtrain`'s trainer with label smoothing; it notes the gradients of step 1."""

    first_gradients: dict[str, torch.Tensor]

    def __init__(self, config: TrainConfig, groups: ProcessGroups):
        super().__init__(build(config, groups, make_optimizer=gradient_descent))

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        smoothed = vocabulary.vocab_parallel_cross_entropy
        return smoothed(logits, targets, self.groups.tp, LABEL_SMOOTHING, reduction="sum"), (targets != -100).sum()

    def compute_gradients(self) -> tuple[float, float]:
        loss, norm = super().compute_gradients()
        if self.steps_done == 0:  # before clipping and optimizer
            found = gradients(self.models[0])
            self.first_gradients = {name: grad for name, grad in found.items() if grad is not None}
        return loss, norm


@dataclass(frozen=True)
class TinyRun(Job):
    """A tiny GPT; ``copies`` is of the gradients of what every tensor rank holds whole.

    ``hidden`` and ``heads`` are of the dropout masks on hidden states and in attention, with tensor parallelism.
    """

    config: TrainConfig
    world_size: int

    @property
    def layout(self) -> ParallelLayout:
        return self.config.layout(self.world_size)

    @property
    def shard_size(self) -> int | None:
        return self.config.shard_size

    def train(self, groups: ProcessGroups) -> tuple[nn.Module, Run]:
        trainer = TinyTrainer(self.config, groups)
        model = trainer.models[0]
        start = weights(model)
        with communication_log() as log:
            steps = list(trainer.steps())
        losses, norms = [step.loss for step in steps], [step.grad_norm for step in steps]
        shards = sharding(trainer, log) if self.config.zero_stage else None
        return model, Run(losses, norms, start, trainer.first_gradients, sharding=shards)

    def fingerprints(self, gradients: Tensors, placed: Placed, groups: ProcessGroups) -> dict[str, str]:
        copies = fingerprint(gradients[name] for name, placement in placed.items() if not placement.shards)
        if self.config.tp_size == 1:
            return {"copies": copies}
        hidden, heads = map(fingerprint, dropout_masks(groups))
        return {"copies": copies, "hidden": hidden, "heads": heads}


ALONE = TinyRun(replace(CONFIG, tp_size=1, pp_size=1), world_size=1)


def sharding(trainer: TinyTrainer, log: CommunicationLog) -> Sharding:
    """Return what all steps have sent, and what the optimizer holds."""
    units = 1 + len(trainer.models[0].units)  # the root is one, too
    held = [parameter for each in trainer.optimizer.param_groups for parameter in each["params"]]
    return Sharding(
        reduce_scatters=sum(record.operation == "reduce_scatter" for record in log.records),
        enough=trainer.config.steps * units,
        kilobytes=round(log.total_bytes("reduce_scatter") / 1000),
        in_optimizer=sum(map(torch.numel, held)),
        in_shards=sum(map(torch.numel, trainer.models[0].parameters())),
    )


def dropout_masks(groups: ProcessGroups) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a step with dropout keeps of the hidden states here, and what decides the masks in attention."""
    trainer, attention = TinyTrainer(replace(CONFIG, dropout=0.5), groups), F.scaled_dot_product_attention
    hidden: list[torch.Tensor] = []
    heads: list[torch.Tensor] = []
    for module in trainer.models[0].modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: hidden.append(output.ne(0)))

    def noted_attention(*args, **options):
        heads.append(torch.get_rng_state())  # the same state draws the same mask
        return attention(*args, **options)

    F.scaled_dot_product_attention = noted_attention  # on this rank, which ends with its run
    trainer.step()
    return hidden, heads
