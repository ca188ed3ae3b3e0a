"""How long a training step takes, estimated from a plan and a few constants of the hardware.

The step is a sum of parts: matrix products, kernels that only move memory, overhead, the tensor-parallel collectives,
the pipeline's messages and its bubble, the gradients' all-reduce, the optimizer. Nothing overlaps, and nothing did in
the published runs that it is compared with.
"""

from dataclasses import dataclass, fields

from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.stage_memory import stage_parameters
from labkit.shape import flops_per_step

# What kernels beside the matrix products read and write, in bytes: one bracket for each kernel.
NORMS_AND_DROPOUTS = 2 * ((2 + 2) + (2 + 2 + 2 + 1))
"""Forward, for each number of [b, s, h]: norm; dropout plus residual, with a mask of 1 byte. Both twice in a layer."""
GELU_AND_HEADS = 4 * (2 + 2) + 3 * (2 + 2)
"""Forward, for each number of [b, s, h]: GeLU on 4h numbers; laying out q, k and v by heads, 3h numbers."""
SCORES = (2 + 2) + (2 + 2) + (2 + 2 + 1)
"""Forward, for each attention score: scale and mask; softmax; dropout with its mask."""
LOSS = (2 + 4) + 4 + (4 + 4) + (4 + 2)
"""Forward and backward, for each logit: float32 copy; maximum; exponentials and their sum; gradient."""
ADAM = (4 + 4) + (4 + 4) + 2 * (4 + 4) + 2
"""For each parameter: gradient, then set to zero; float32 copy; two moments; weight."""

PASSES = {"none": 3, "selective": 3, "full": 4}
"""How much a layer computes in a step, by what is recomputed: forward counts 1, backward 2, forward again 1."""
ALL_REDUCES = {"none": 4, "selective": 4, "full": 6}
"""How often a layer's activations are all-reduced: twice forward, twice backward, twice in forward again."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in seconds, and what follows from them."""

    plan: Plan
    hardware: Hardware
    products: float
    memory_bound: float
    overhead: float
    tensor_parallel: float
    pipeline_messages: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[2:]}

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())

    @property
    def flops_per_gpu(self) -> float:
        """The FLOP/s that each GPU does, recomputation included."""
        plan = self.plan
        return flops_per_step(plan.model, plan.batch_size, plan.recompute) / (self.total * plan.world_size)

    @property
    def hardware_flops_utilisation(self) -> float:
        """The share of the peak, counting all FLOPs that are done."""
        return self.flops_per_gpu / self.hardware.peak_flops

    @property
    def model_flops_utilisation(self) -> float:
        """The share of the peak, counting only what the model needs: no recomputation."""
        plan = self.plan
        needed = flops_per_step(plan.model, plan.batch_size, "none")
        return needed / (self.total * plan.world_size * self.hardware.peak_flops)

    def days(self, num_tokens: float) -> float:
        """Return the days that a training run of ``num_tokens`` takes."""
        return num_tokens / (self.plan.batch_size * self.plan.model.seq_length) * self.total / 86400


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Estimate a step on the GPUs of the last stage, which also compute the logits.

    Raises:
        ValueError: ZeRO stages 2 and 3, which send in the middle of a step; that is not modelled.
    """
    check_is_modelled(plan)
    m, bubble_slots = plan.num_micro_batches, (plan.pp_size - 1) / plan.num_chunks
    layers = plan.num_chunks * plan.layers_per_chunk
    layer, logits = layer_seconds(plan, hardware), logits_seconds(plan, hardware)
    work = {part: m * (layers * seconds + logits.get(part, 0.0)) for part, seconds in layer.items()}
    messages = 2 * plan.num_chunks * message_seconds(plan, hardware) if plan.pp_size > 1 else 0.0  # there and back
    return StepTime(
        plan,
        hardware,
        **work,
        pipeline_messages=(m + bubble_slots) * messages,
        bubble=bubble_slots * layers * sum(layer.values()),
        data_parallel=gradients_seconds(plan, hardware),
        optimizer=optimizer_seconds(plan, hardware),
    )


def check_is_modelled(plan: Plan) -> None:
    """Raise ValueError for ZeRO stages 2 and 3, whose messages are in none of the formulas."""
    if plan.zero_stage > 1:
        raise ValueError(f"zero_stage={plan.zero_stage}: what it sends in a step is not modelled, use 0 or 1")


def all_reduces(recompute: str, sequence_parallel: bool) -> int:
    """Return how many all-reduces of its activations a layer sends per micro-batch, or the equivalent.

    Sequence parallelism adds one: backward gathers two inputs again, and each gather is half an all-reduce.
    """
    return ALL_REDUCES[recompute] + (1 if sequence_parallel else 0)


def layer_seconds(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of one layer and one micro-batch on one GPU: forward, backward, and recomputation."""
    model, t, b = plan.model, plan.tp_size, plan.micro_batch_size
    s, h, a = model.seq_length, model.hidden_size, model.num_attention_heads
    assert a is not None
    passes = PASSES[plan.recompute]
    core_passes = passes + 1 if plan.recompute == "selective" else passes  # of the attention: products and scores
    flops = (passes * 24 * b * s * h * h + core_passes * 4 * b * s * s * h) / t
    norms_and_dropouts = NORMS_AND_DROPOUTS / (t if plan.sequence_parallel else 1)
    bytes_moved = passes * b * s * h * (norms_and_dropouts + GELU_AND_HEADS / t)
    bytes_moved += core_passes * a * s * s * b * SCORES / t
    all_reduce = 2 * (t - 1) / t * activation_bytes(plan) / link_rate(plan, hardware, "tp")
    return {
        "products": flops / hardware.product_rate,
        "memory_bound": bytes_moved / hardware.memory_rate,
        "overhead": passes * hardware.layer_overhead_seconds,
        "tensor_parallel": all_reduces(plan.recompute, plan.sequence_parallel) * all_reduce,
    }


def logits_seconds(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of the output layer and the loss for one micro-batch, forward and backward."""
    logits = plan.micro_batch_size * plan.model.seq_length * plan.model.vocab_size / plan.tp_size
    return {
        "products": 6 * logits * plan.model.hidden_size / hardware.product_rate,
        "memory_bound": LOSS * logits / hardware.memory_rate,
    }


def message_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of a message to the next stage: each GPU of a tensor group sends 1/t, then they gather.

    With sequence parallelism there is nothing to gather: each GPU goes on with its own tokens.
    """
    size, t = activation_bytes(plan), plan.tp_size
    gather = 0.0 if plan.sequence_parallel else (t - 1) / t * size / link_rate(plan, hardware, "tp")
    return size / t / link_rate(plan, hardware, "pp") + gather


def gradients_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of the gradients' all-reduce; ZeRO-1 reduce-scatters, then gathers the 16-bit weights."""
    each = plan.gradient_bytes + (2 if plan.zero_stage else plan.gradient_bytes)
    sent = (plan.dp_size - 1) / plan.dp_size * each * stage_parameters(plan, 0)
    return sent / link_rate(plan, hardware, "dp")


def optimizer_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which Adam reads and writes its states; with ZeRO-1 each replica has 1/d of them."""
    share = 1 / plan.dp_size if plan.zero_stage else 1.0
    return share * stage_parameters(plan, 0) * ADAM / hardware.memory_rate


def activation_bytes(plan: Plan) -> float:
    """Return the bytes of a layer's output for one micro-batch: 2 for each of b s h numbers."""
    return 2.0 * plan.micro_batch_size * plan.model.seq_length * plan.model.hidden_size


def link_rate(plan: Plan, hardware: Hardware, axis: str) -> float:
    """Return the bytes per second that a GPU can send in a group of an axis, inside a node or over the network.

    Groups stay in a node if their ranks tile it. A group with k GPUs in each node has k network cards. A message of
    the pipeline goes from one GPU to one other.
    """
    size = {"tp": plan.tp_size, "dp": plan.dp_size, "pp": plan.pp_size}[axis]
    distance = {"tp": 1, "dp": plan.tp_size, "pp": plan.tp_size * plan.dp_size}[axis]  # between neighbours, in ranks
    inside = hardware.node_bytes_per_second * hardware.node_efficiency
    if plan.world_size <= hardware.gpus_per_node or hardware.gpus_per_node % (size * distance) == 0:
        return inside
    here = max(1, min(size, hardware.gpus_per_node // distance)) if axis != "pp" else 1
    return min(inside, here * hardware.network_bytes_per_second * hardware.network_efficiency)
