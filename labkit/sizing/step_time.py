"""How long a training step takes, estimated from a plan and a few constants of the hardware.

A sum of parts, in the order of their size: matrix products, what only moves memory, the tensor-parallel collectives,
messages of the pipeline, its bubble, the gradients' all-reduce, the optimizer. Nothing overlaps: the runs in the
paper that it is held against did not either.
"""

from dataclasses import dataclass

from labkit.sizing.hardware import Hardware
from labkit.sizing.memory import stage_parameters
from labkit.sizing.plan import Plan
from labkit.sizing.shape import flops_per_step

OPTIMIZER_TRAFFIC_BYTES = 34
"""What a step of Adam reads and writes for each parameter: gradient, float32 copy, two moments, weight."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in seconds, and what they come to."""

    plan: Plan
    hardware: Hardware
    products: float
    memory_bound: float
    tensor_parallel: float
    pipeline_messages: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        computing = self.products + self.memory_bound + self.optimizer
        return computing + self.tensor_parallel + self.pipeline_messages + self.bubble + self.data_parallel

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
    """Estimate a step. The GPUs of the slowest stage count: the last, which has the logits."""
    model, t, p, v, m = plan.model, plan.tp_size, plan.pp_size, plan.num_chunks, plan.num_micro_batches
    b, s, h = plan.micro_batch_size, model.seq_length, model.hidden_size
    layers = v * plan.layers_per_chunk
    passes = {"none": 3.0, "selective": 3.0, "full": 4.0}[plan.recompute]  # forward counts 1, backward 2
    product_flops = hardware.peak_flops * hardware.product_efficiency
    memory_rate = hardware.memory_bytes_per_second * hardware.memory_efficiency
    # One layer and one micro-batch on one GPU. Bytes: norms, dropout and residuals; GeLU and transposes; the scores.
    flops = (24 * b * s * h * h + 4 * b * s * s * h) / t
    again = 4 * b * s * s * h / t if plan.recompute == "selective" else 0.0
    around = 22 / t if plan.sequence_parallel else 22
    assert model.num_attention_heads is not None
    layer_bytes = b * s * h * (around + 28 / t) + 13 * model.num_attention_heads * s * s * b / t
    message = 2 * b * s * h
    all_reduce = 2 * (t - 1) / t * message / link_rate(plan, hardware, "tp")
    layer_products = (passes * flops + again) / product_flops
    layer_memory = passes * layer_bytes / memory_rate
    layer_tensor = (6 if plan.recompute == "full" else 4) * all_reduce  # two forward, two backward, two again
    logits_products = 6 * b * s * h * model.vocab_size / t / product_flops
    logits_memory = 24 * b * s * model.vocab_size / t / memory_rate
    products, memory_bound = layers * layer_products + logits_products, layers * layer_memory + logits_memory
    to_neighbour = message / t / link_rate(plan, hardware, "pp") + (t - 1) / t * message / link_rate(
        plan, hardware, "tp"
    )
    messages = 2 * v * to_neighbour if p > 1 else 0.0
    one_micro_batch = products + memory_bound + layers * layer_tensor
    d, parameters = plan.dp_size, stage_parameters(plan, 0)
    gradient_bytes = (plan.gradient_bytes + (2 if plan.zero_stage else plan.gradient_bytes)) * parameters
    return StepTime(
        plan=plan,
        hardware=hardware,
        products=m * products,
        memory_bound=m * memory_bound,
        tensor_parallel=m * layers * layer_tensor,
        pipeline_messages=(m + (p - 1) / v) * messages,
        bubble=(p - 1) / v * (one_micro_batch - logits_products - logits_memory),
        data_parallel=(d - 1) / d * gradient_bytes / link_rate(plan, hardware, "dp"),
        optimizer=parameters * OPTIMIZER_TRAFFIC_BYTES / memory_rate / (d if plan.zero_stage else 1),
    )


def link_rate(plan: Plan, hardware: Hardware, axis: str) -> float:
    """Bytes a second that a GPU can send in a group of an axis: inside a node, or by the network if it must leave.

    Of a group with k GPUs in each node, k network cards serve it. The pipeline's messages go from one GPU to one.
    """
    size = {"tp": plan.tp_size, "dp": plan.dp_size, "pp": plan.pp_size}[axis]
    distance = {"tp": 1, "dp": plan.tp_size, "pp": plan.tp_size * plan.dp_size}[axis]
    inside = hardware.node_bytes_per_second * hardware.node_efficiency
    if size * distance > hardware.gpus_per_node:
        here = max(1, min(size, hardware.gpus_per_node // distance)) if axis != "pp" else 1
        return min(inside, here * hardware.network_bytes_per_second * hardware.network_efficiency)
    return inside
