"""How long a training step takes, estimated from a plan and a few constants of the hardware.

A sum of parts: matrix products, what only moves memory, starting all that, the tensor-parallel collectives, messages of
the pipeline, its bubble, the gradients' all-reduce, the optimizer. Nothing overlaps: in the runs that it is held
against nothing did, either.
"""

from dataclasses import dataclass, fields

from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.stage_memory import stage_parameters
from labkit.shape import flops_per_step

OPTIMIZER_TRAFFIC_BYTES = 34
"""What a step of Adam reads and writes for each parameter: gradient, float32 copy, two moments, weight."""
PASSES = {"none": 3, "selective": 3, "full": 4}
"""How much a layer computes in a step, by what is recomputed: forward counts 1, backward 2, forward again 1."""
ALL_REDUCES = {"none": 4, "selective": 4, "full": 6}
"""Of a layer's activations, by what is recomputed: two forward, two backward, two in forward again."""
GATHERED_AGAIN = 1
"""With sequence parallelism on top: backward gathers two inputs again, each gather half an all-reduce."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in seconds, and what they come to."""

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
        """Seconds of each part, by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[2:]}

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def flops_per_gpu(self) -> float:
        """FLOP/s that each GPU does, recomputation included."""
        plan = self.plan
        return flops_per_step(plan.model, plan.batch_size, plan.recompute) / (self.total * plan.world_size)

    @property
    def hardware_flops_utilisation(self) -> float:
        """Of the peak, counting all FLOPs that were done."""
        return self.flops_per_gpu / self.hardware.peak_flops

    @property
    def model_flops_utilisation(self) -> float:
        """Of the peak, counting only what the model needs: without recomputation."""
        plan = self.plan
        needed = flops_per_step(plan.model, plan.batch_size, "none")
        return needed / (self.total * plan.world_size * self.hardware.peak_flops)

    def days(self, num_tokens: float) -> float:
        """Days for a training run of so many tokens."""
        return num_tokens / (self.plan.batch_size * self.plan.model.seq_length) * self.total / 86400


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Estimate a step, from the GPUs of the last stage: they have the logits to compute as well.

    Raises:
        ValueError: ZeRO stages 2 and 3, which send in the middle of a step: that is not modelled.
    """
    check_is_modelled(plan)
    m, bubble_slots = plan.num_micro_batches, (plan.pp_size - 1) / plan.num_chunks
    layers = plan.num_chunks * plan.layers_per_chunk
    layer, logits = layer_seconds(plan, hardware), logits_seconds(plan, hardware)
    messages = 2 * plan.num_chunks * message_seconds(plan, hardware) if plan.pp_size > 1 else 0.0  # there and back
    return StepTime(
        plan=plan,
        hardware=hardware,
        products=m * (layers * layer["products"] + logits["products"]),
        memory_bound=m * (layers * layer["memory_bound"] + logits["memory_bound"]),
        overhead=m * layers * layer["overhead"],
        tensor_parallel=m * layers * layer["tensor_parallel"],
        pipeline_messages=(m + bubble_slots) * messages,
        bubble=bubble_slots * layers * sum(layer.values()),
        data_parallel=gradients_seconds(plan, hardware),
        optimizer=optimizer_seconds(plan, hardware),
    )


def check_is_modelled(plan: Plan) -> None:
    """Raise ValueError for ZeRO stages 2 and 3, whose messages no formula here counts."""
    if plan.zero_stage > 1:
        raise ValueError(f"zero_stage={plan.zero_stage}: what it sends in a step is not modelled, use 0 or 1")


def all_reduces(recompute: str, sequence_parallel: bool) -> int:
    """How many all-reduces of its activations a layer's messages in a step come to, for each micro-batch."""
    return ALL_REDUCES[recompute] + (GATHERED_AGAIN if sequence_parallel else 0)


def layer_seconds(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """Of one layer and one micro-batch on one GPU: forward, backward, and what is recomputed."""
    model, t, b = plan.model, plan.tp_size, plan.micro_batch_size
    s, h, a = model.seq_length, model.hidden_size, model.num_attention_heads
    assert a is not None
    passes = PASSES[plan.recompute]
    core_passes = passes + 1 if plan.recompute == "selective" else passes  # of the attention: products and scores
    flops = (passes * 24 * b * s * h * h + core_passes * 4 * b * s * s * h) / t
    whole_unless_divided = 22 / (t if plan.sequence_parallel else 1)  # norms, dropout and residuals
    bytes_moved = passes * b * s * h * (whole_unless_divided + 28 / t)  # 28: GeLU, transposes
    bytes_moved += core_passes * 13 * a * s * s * b / t  # softmax and dropout of the scores
    all_reduce = 2 * (t - 1) / t * activation_bytes(plan) / link_rate(plan, hardware, "tp")
    return {
        "products": flops / product_rate(hardware),
        "memory_bound": bytes_moved / memory_rate(hardware),
        "overhead": passes * hardware.layer_overhead_seconds,
        "tensor_parallel": all_reduces(plan.recompute, plan.sequence_parallel) * all_reduce,
    }


def logits_seconds(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """The output layer and the loss for one micro-batch, forward and backward."""
    logits = plan.micro_batch_size * plan.model.seq_length * plan.model.vocab_size / plan.tp_size
    return {
        "products": 6 * logits * plan.model.hidden_size / product_rate(hardware),
        "memory_bound": 24 * logits / memory_rate(hardware),
    }


def message_seconds(plan: Plan, hardware: Hardware) -> float:
    """Activations of a micro-batch to the next stage: each GPU of a tensor group sends 1/t, then they gather.

    With sequence parallelism there is nothing to gather: each GPU goes on with its own tokens.
    """
    size, t = activation_bytes(plan), plan.tp_size
    gather = 0.0 if plan.sequence_parallel else (t - 1) / t * size / link_rate(plan, hardware, "tp")
    return size / t / link_rate(plan, hardware, "pp") + gather


def gradients_seconds(plan: Plan, hardware: Hardware) -> float:
    """The gradients' all-reduce; with ZeRO-1 a reduce-scatter, and an all-gather of the 16-bit weights."""
    each = plan.gradient_bytes + (2 if plan.zero_stage else plan.gradient_bytes)
    sent = (plan.dp_size - 1) / plan.dp_size * each * stage_parameters(plan, 0)
    return sent / link_rate(plan, hardware, "dp")


def optimizer_seconds(plan: Plan, hardware: Hardware) -> float:
    """Adam reads and writes its states; with ZeRO-1 each replica 1/d of them."""
    share = 1 / plan.dp_size if plan.zero_stage else 1.0
    return share * stage_parameters(plan, 0) * OPTIMIZER_TRAFFIC_BYTES / memory_rate(hardware)


def activation_bytes(plan: Plan) -> float:
    """What a layer gives for one micro-batch: 2 bytes for each of b s h numbers."""
    return 2.0 * plan.micro_batch_size * plan.model.seq_length * plan.model.hidden_size


def product_rate(hardware: Hardware) -> float:
    """FLOP/s that matrix products reach."""
    return hardware.peak_flops * hardware.product_efficiency


def memory_rate(hardware: Hardware) -> float:
    """Bytes a second that are read or written."""
    return hardware.memory_bytes_per_second * hardware.memory_efficiency


def link_rate(plan: Plan, hardware: Hardware, axis: str) -> float:
    """Bytes a second that a GPU can send in a group of an axis: inside a node, or by the network if it must leave.

    Groups stay in a node if their ranks tile it. Of a group with k GPUs in each node, k network cards serve it. The
    pipeline's messages go from one GPU to one.
    """
    size = {"tp": plan.tp_size, "dp": plan.dp_size, "pp": plan.pp_size}[axis]
    distance = {"tp": 1, "dp": plan.tp_size, "pp": plan.tp_size * plan.dp_size}[axis]  # between neighbours, in ranks
    inside = hardware.node_bytes_per_second * hardware.node_efficiency
    if plan.world_size <= hardware.gpus_per_node or hardware.gpus_per_node % (size * distance) == 0:
        return inside
    here = max(1, min(size, hardware.gpus_per_node // distance)) if axis != "pp" else 1
    return min(inside, here * hardware.network_bytes_per_second * hardware.network_efficiency)
