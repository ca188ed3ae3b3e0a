"""Bytes that a GPU holds: weights, gradients, optimizer states, and the activations kept for backward.

Mixed precision with Adam: a parameter takes 2 bytes as a weight, 2 or 4 as a gradient, and 12 in the optimizer (a
float32 copy and two moments). Sources: arXiv 1910.02054, section 3.1; for activations arXiv 2205.05198, sections 4 and
5, with 2 bytes per activation, and attention scores that are kept (no FlashAttention).
"""

from dataclasses import dataclass

from course.sizing.plan import Plan
from labkit.shape import GPT

WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12


@dataclass(frozen=True)
class Memory:
    """What one GPU holds when it is fullest, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(plan: Plan, stage: int = 0) -> Memory:
    """Return what a GPU of a pipeline stage holds; stage 0 is usually the fullest.

    Not counted: what libraries allocate for themselves, fragmentation, and message buffers.
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
    """Return the memory of the fullest stage: the first has the most micro-batches, the last has the logits."""
    return max((memory(plan, stage) for stage in {0, plan.pp_size - 1}), key=lambda each: each.total)


def activation_bytes_per_layer(
    model: GPT, micro_batch_size: int, tp_size: int = 1, *, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Return the bytes that one transformer layer keeps of one micro-batch.

    - none: sbh(10 + 24/t + 5as/(ht)); with sequence parallelism the 10 is divided by t, too
    - selective: the same without 5as/(ht)
    - full: the layer's input, 2sbh; with sequence parallelism 2sbh/t

    Source: arXiv 2205.05198, table 2.
    """
    s, h, t = model.seq_length, model.hidden_size, tp_size
    if recompute == "full":
        return 2.0 * s * micro_batch_size * h / (t if sequence_parallel else 1)
    assert model.num_attention_heads is not None
    scores = 5 * model.num_attention_heads * s / h if recompute == "none" else 0.0
    per_element = (34 + scores) / t if sequence_parallel else 10 + (24 + scores) / t
    return s * micro_batch_size * h * per_element


def in_flight(plan: Plan, stage: int) -> int:
    """Return the most passes through a chunk whose activations a GPU holds at once, with 1F1B or interleaved 1F1B.

    This is the formula for `labkit.schedules.Schedule.peak_in_flight`.
    """
    p, m, v = plan.pp_size, plan.num_micro_batches, plan.num_chunks
    return min(p - stage, m) if v == 1 else min(v * m, 2 * (p - stage - 1) + (v - 1) * p + 1)


def stage_activation_bytes(plan: Plan, stage: int) -> float:
    """Return the bytes of activations on a GPU of this stage when it holds the most micro-batches."""
    model, b, t = plan.model, plan.micro_batch_size, plan.tp_size
    divided = plan.sequence_parallel
    layer = activation_bytes_per_layer(model, b, t, sequence_parallel=divided, recompute=plan.recompute)
    total = in_flight(plan, stage) * plan.layers_per_chunk * layer
    if plan.recompute == "full":  # while backward goes through a layer, all of its activations are there
        total += activation_bytes_per_layer(model, b, t, sequence_parallel=divided)
    hidden = model.seq_length * b * model.hidden_size / (t if divided else 1)
    if stage == 0:  # masks of the embedding's dropout: interleaving keeps two rounds of p micro-batches under way
        rounds = 1 if plan.num_chunks == 1 else 2
        total += min(rounds * plan.pp_size, plan.num_micro_batches) * hidden
    if stage == plan.pp_size - 1:
        total += 4 * hidden + 4 * model.seq_length * b * model.vocab_size / t  # last norm, logits in 16 and 32 bits
    return total


def stage_parameters(plan: Plan, stage: int) -> float:
    """Return the parameters on a GPU: matrices are divided by t, norms and row biases are whole.

    The first and the last stage both have the tied embedding.
    """
    model, t = plan.model, plan.tp_size
    h = model.hidden_size
    layer = (12 * h * h + 7 * h) / t + 6 * h
    total = plan.num_chunks * plan.layers_per_chunk * layer
    if stage == 0:
        total += model.vocab_size * h / t + model.seq_length * h
    if stage == plan.pp_size - 1:
        total += 2 * h + (model.vocab_size * h / t if plan.pp_size > 1 else 0)
    return total
