"""Bytes that a GPU holds: weights, gradients, optimizer states, and the activations kept for backward.

Mixed precision with Adam: 2 bytes a weight, 2 or 4 a gradient, 12 for the optimizer (a float32 copy and two
moments). Sources: arXiv 1910.02054, section 3.1; activations, arXiv 2205.05198, sections 4 and 5, with 2 bytes an
activation and attention scores kept (no FlashAttention).
"""

from dataclasses import dataclass

from course.sizing.plan import Plan
from labkit.shape import GPT

WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12


@dataclass(frozen=True)
class Memory:
    """What one GPU holds at its fullest, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(plan: Plan, stage: int = 0) -> Memory:
    """What a GPU of a pipeline stage holds; stage 0 is usually the fullest.

    Not counted: what libraries allocate for themselves, fragmentation, buffers of messages.
    """
    parameters, d = stage_parameters(plan, stage), plan.dp_size
    shard = [1 / d if plan.zero_stage >= level else 1.0 for level in (1, 2, 3)]
    return Memory(
        weights=parameters * WEIGHT_BYTES * shard[2],
        gradients=parameters * plan.gradient_bytes * shard[1],
        optimizer=parameters * OPTIMIZER_BYTES * shard[0],
        activations=stage_activation_bytes(plan, stage),
    )


def fullest(plan: Plan) -> Memory:
    """The memory of the stage that needs most: the first, with most micro-batches, or the last, with the logits."""
    return max((memory(plan, stage) for stage in {0, plan.pp_size - 1}), key=lambda each: each.total)


def zero_state_bytes(num_parameters: float, dp_size: int, zero_stage: int, gradient_bytes: int = 2) -> float:
    """Weights, gradients and optimizer states of one GPU, in bytes, at a ZeRO stage.

    >>> [round(zero_state_bytes(7.5e9, 64, stage) / 1e9, 2) for stage in range(4)]
    [120.0, 31.41, 16.64, 1.88]

    Source: arXiv 1910.02054, figure 1.
    """
    parts = (OPTIMIZER_BYTES, gradient_bytes, WEIGHT_BYTES)  # in the order in which the stages divide them
    return num_parameters * sum(part / dp_size if zero_stage > i else part for i, part in enumerate(parts))


def activation_bytes_per_layer(
    model: GPT, micro_batch_size: int, tp_size: int = 1, *, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes that one transformer layer keeps of one micro-batch.

    none: sbh(10 + 24/t + 5as/(ht)), all over t with sequence parallelism; selective: without 5as/(ht); full: the
    layer's input, 2sbh, or 2sbh/t where the sequence is divided. Source: arXiv 2205.05198, table 2.
    """
    s, h, t = model.seq_length, model.hidden_size, tp_size
    if recompute == "full":
        return 2.0 * s * micro_batch_size * h / (t if sequence_parallel else 1)
    assert model.num_attention_heads is not None
    scores = 5 * model.num_attention_heads * s / h if recompute == "none" else 0.0
    per_element = (34 + scores) / t if sequence_parallel else 10 + (24 + scores) / t
    return s * micro_batch_size * h * per_element


def in_flight(plan: Plan, stage: int) -> int:
    """The most passes through a chunk whose activations a GPU holds: with 1F1B, or with v chunks interleaved.

    The same as `labkit.schedules.Schedule.peak_in_flight`, by formula.
    """
    p, m, v = plan.pp_size, plan.num_micro_batches, plan.num_chunks
    return min(p - stage, m) if v == 1 else min(v * m, 2 * (p - stage - 1) + (v - 1) * p + 1)


def stage_activation_bytes(plan: Plan, stage: int) -> float:
    """Activations of a GPU of this stage when it holds most micro-batches."""
    model, b, t = plan.model, plan.micro_batch_size, plan.tp_size
    divided = plan.sequence_parallel
    layer = activation_bytes_per_layer(model, b, t, sequence_parallel=divided, recompute=plan.recompute)
    total = in_flight(plan, stage) * plan.layers_per_chunk * layer
    if plan.recompute == "full":  # one layer at a time is there in full, while backward goes through it
        total += activation_bytes_per_layer(model, b, t, sequence_parallel=divided)
    hidden = model.seq_length * b * model.hidden_size / (t if divided else 1)
    if stage == 0:  # the mask of the embedding's dropout; interleaving, two rounds of p micro-batches are under way
        rounds = 1 if plan.num_chunks == 1 else 2
        total += min(rounds * plan.pp_size, plan.num_micro_batches) * hidden
    if stage == plan.pp_size - 1:
        total += 4 * hidden + 4 * model.seq_length * b * model.vocab_size / t  # last norm, logits and their float32
    return total


def stage_parameters(plan: Plan, stage: int) -> float:
    """Parameters of a GPU: matrices divided by t, norms and row biases whole; the tied embedding on both end stages."""
    model, t = plan.model, plan.tp_size
    h = model.hidden_size
    layer = (12 * h * h + 7 * h) / t + 6 * h
    total = plan.num_chunks * plan.layers_per_chunk * layer
    if stage == 0:
        total += model.vocab_size * h / t + model.seq_length * h
    if stage == plan.pp_size - 1:
        total += 2 * h + (model.vocab_size * h / t if plan.pp_size > 1 else 0)
    return total
