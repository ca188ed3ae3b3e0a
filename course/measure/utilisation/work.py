"""Makes a rank's work in a step of a plan: real layers on a GPU, paced ones where ranks share a few cores.

A paced layer sleeps a stated time instead of computing. All else is real: ranks, messages, the schedule, autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from course.measure.paced import PacedStage
from course.sizing import Plan
from labkit.groups import ProcessGroups, local_device
from labkit.schedules import Schedule
from labkit.shape import GPT
from labkit.tensor_parallel.operators import copy_to_tp, reduce_from_tp
from labtrain.model import ParallelGPT

PACED_WIDTH = 1024
"""The numbers per sequence in a paced message: real, but smaller than a large model's."""
COMPUTED_WIDTH, COMPUTED_VOCABULARY, COMPUTED_LENGTH = 2048, 8192, 1024
"""The most that real layers have on GPUs: they are made within seconds, and 16 sequences without recomputation fit."""


@dataclass(frozen=True)
class Pace:
    """How long one layer takes for one sequence on one rank; backward twice as long, and longer if it recomputes."""

    layer_seconds: float = 0.003

    def forward_seconds(self, plan: Plan) -> float:
        """Return the time of one micro-batch in one chunk of the model."""
        return self.layer_seconds * plan.layers_per_chunk * plan.micro_batch_size / plan.tp_size

    def backward_seconds(self, plan: Plan) -> float:
        """Return the same for backward."""
        model = plan.model
        core = model.seq_length / (6 * model.hidden_size + model.seq_length)  # the attention's share of a layer's FLOPs
        again = {"none": 0.0, "selective": core, "full": 1.0}[plan.recompute]
        return (2 + again) * self.forward_seconds(plan)


@dataclass
class Work:
    """A rank's chunks of the model, the micro-batches, and what the last stage makes of its output.

    ``activation_spec``: dtype and shape of what goes from stage to stage.
    """

    chunks: list[nn.Module]
    inputs: list[torch.Tensor]
    activation_spec: tuple[torch.dtype, torch.Size]
    loss: Callable
    targets: list[torch.Tensor] | None = None

    def gradients(self) -> torch.Tensor:
        """Return all of this rank's gradients as one vector, for one all-reduce."""
        return torch.cat([p.grad.flatten() for chunk in self.chunks for p in chunk.parameters() if p.grad is not None])


def paced_work(plan: Plan, schedule: Schedule, groups: ProcessGroups, pace: Pace) -> Work:
    """Return chunks that sleep, and inputs of zeros."""
    chunks: list[nn.Module] = [PacedLayers(plan, groups, pace) for _ in range(schedule.num_chunks)]
    inputs = [torch.zeros(plan.micro_batch_size, PACED_WIDTH) for _ in range(schedule.num_micro_batches)]
    return Work(chunks, inputs, (inputs[0].dtype, inputs[0].shape), loss=lambda output, _: output.mean())


def computing_work(plan: Plan, schedule: Schedule, groups: ProcessGroups) -> Work:
    """Return chunks of a real GPT in bfloat16, and inputs of random tokens. See `computed_shape`."""
    shape = computed_shape(plan)
    models = [
        ParallelGPT(
            shape,
            groups.tp,
            stage=schedule.stage_of(groups.coords.pp, chunk),
            num_stages=schedule.num_stages,
            recompute="full" if plan.recompute == "full" else "none",
            sequence_parallel=plan.sequence_parallel,
            dtype=torch.bfloat16,
            device=local_device(),
        )
        for chunk in range(schedule.num_chunks)
    ]
    size = schedule.num_micro_batches, plan.micro_batch_size, shape.seq_length
    tokens = list(torch.randint(shape.vocab_size, size, device=local_device()))
    return Work(list(models), tokens, models[0].activation_spec(tokens[0]), models[-1].loss, tokens)


def computed_shape(plan: Plan) -> GPT:
    """Return the plan's model, as deep, but narrower: its MLP in proportion, its sequences and vocabulary shorter."""
    model, heads = plan.model, plan.model.num_attention_heads
    assert heads is not None
    width = min(model.hidden_size, COMPUTED_WIDTH) // heads * heads
    return replace(
        model,
        hidden_size=width,
        ffn_hidden_size=model.mlp_width * width // model.hidden_size // plan.tp_size * plan.tp_size,
        seq_length=min(model.seq_length, COMPUTED_LENGTH // plan.tp_size * plan.tp_size),
        vocab_size=min(model.vocab_size, COMPUTED_VOCABULARY),
    )


class PacedLayers(nn.Module):
    """The layers of one chunk, paced; with tensor parallelism 1/t of the time, and two real all-reduces per layer."""

    def __init__(self, plan: Plan, groups: ProcessGroups, pace: Pace):
        super().__init__()
        self.group = groups.tp
        parts = 2 * plan.layers_per_chunk if plan.tp_size > 1 else 1  # attention and MLP, where messages are between
        forward, backward = pace.forward_seconds(plan) / parts, pace.backward_seconds(plan) / parts
        self.parts = nn.ModuleList(PacedStage(forward, backward) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = reduce_from_tp(part(copy_to_tp(x, self.group)), self.group)
        return x
