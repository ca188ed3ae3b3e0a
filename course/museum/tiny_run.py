"""One tiny training run of the museum, in one process or on ranks, and what can be seen of it from outside.

Nothing here knows a fault. A fault changes labkit on the rank that runs it, before the run starts. That rank is a
process of its own and ends with the run, so nothing of the fault stays.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.communication import CommunicationLog, communication_log
from course.parity import Difference, compare, gradients, weights
from labkit.groups import ProcessGroups, init_groups
from labkit.layout import ParallelLayout
from labkit.placement import placements
from labkit.shape import GPT
from labkit.tensor_parallel import shard_like, vocabulary
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
class Run:
    """Losses and gradient norms of the steps, and the weights before step 1 and the gradients in it, by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


class Sharding(NamedTuple):
    """The reduce-scatters of all steps: called, needed, and their KB. The numbers in optimizer and shards."""

    reduce_scatters: int
    enough: int
    kilobytes: int
    in_optimizer: int
    in_shards: int


@dataclass(frozen=True)
class Seen:
    """What one rank shows: its run, compared with one process, and fingerprints, which are equal for equal tensors.

    ``copies`` is of the gradients of what every tensor rank holds whole; ``hidden`` and ``heads`` are of the dropout
    masks on hidden states and in attention; empty without tensor parallelism.
    """

    losses: list[float]
    norms: list[float]
    weights: list[Difference]
    gradients: list[Difference]
    copies: str
    hidden: str
    heads: str
    sharding: Sharding | None


def in_one_process() -> Run:
    """Train in a process that holds the whole model; call it in a world of one rank."""
    with init_groups(ParallelLayout(1)) as groups:
        return train(TinyTrainer(replace(CONFIG, tp_size=1, pp_size=1), groups))


def on_rank(apply: Callable[[], None], expected: Run, config: TrainConfig) -> Seen:
    """Put a fault on this rank; train there, and compare that with the run of one process."""
    apply()
    with init_groups(config.layout(dist.get_world_size()), config.shard_size) as groups:
        trainer = TinyTrainer(config, groups)
        with communication_log() as log:
            run = train(trainer)
        placed = placements(trainer.models[0])

        def alike(found: dict, whole: dict) -> tuple[dict, dict]:
            if config.zero_stage:
                return joined(found, groups.shard, whole), whole
            return found, {name: shard_like(whole[name], placement) for name, placement in placed.items()}

        start, first = alike(run.weights, expected.weights), alike(run.gradients, expected.gradients)
        hidden, heads = map(fingerprint, dropout_masks(groups)) if config.tp_size > 1 else ("", "")
        return Seen(
            run.losses,
            run.norms,
            compare(*start),
            compare(*first),
            fingerprint([first[0][name] for name, placement in placed.items() if not placement.shards]),
            hidden,
            heads,
            sharding(trainer, log) if config.zero_stage else None,
        )


def joined(shards: dict, group: dist.ProcessGroup, like: dict) -> dict[str, torch.Tensor]:
    """Return whole tensors, of which each rank of the group has a shard."""
    of_ranks = [shards] * group.size()
    dist.all_gather_object(of_ranks, shards, group=group)
    return {name: torch.cat([each[name] for each in of_ranks]).view_as(like[name]) for name in shards}


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


def train(trainer: TinyTrainer) -> Run:
    """Run all steps on this rank."""
    start, steps = weights(trainer.models[0]), list(trainer.steps())
    return Run([step.loss for step in steps], [step.grad_norm for step in steps], start, trainer.first_gradients)


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


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return the same text for the same tensors."""
    return hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
