"""Estimates how long a training step takes, from a plan and a few constants of the hardware.

The step is a sum of parts: matrix products, kernels that only move memory, overhead, the tensor-parallel collectives,
what attention waits for other context ranks, the pipeline's messages and its bubble, the gradients' all-reduce, the
optimizer. Nothing overlaps but a ring's messages with its blocks, and nothing did in the published runs that the
estimate is compared with. None of those had fused attention or context parallelism.
"""

from dataclasses import dataclass, fields

from course.sizing.flops import flops_per_step
from course.sizing.hardware import Hardware
from course.sizing.layer_seconds import activation_bytes, layer_seconds, link_rate, logits_seconds
from course.sizing.plan import Plan
from course.sizing.stage_memory import expert_parameters, stage_parameters

ADAM = (4 + 4) + (4 + 4) + 2 * (4 + 4) + 2
"""Bytes that Adam reads and writes for each parameter: gradient, then set to 0; float32 copy; two moments; weight."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step in seconds, and what follows from them."""

    plan: Plan
    hardware: Hardware
    products: float
    memory_bound: float
    overhead: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
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

    If stages differ in layers, the fullest sets the pace, and is taken to have the logits too.

    Raises:
        ValueError: ZeRO stages 2 and 3, which send in the middle of a step; that is not modelled.
    """
    check_is_modelled(plan)
    m, bubble_slots = plan.num_micro_batches, (plan.pp_size - 1) / plan.num_chunks
    layers = plan.num_chunks * plan.layers_per_chunk
    layer, logits = layer_seconds(plan, hardware), logits_seconds(plan, hardware)
    last = plan.pp_size - 1
    if share := plan.num_moe_layers(last) / plan.layers_of_rank(last):  # the mean of both kinds
        with_experts = layer_seconds(plan, hardware, has_experts=True)
        layer = {part: (1 - share) * seconds + share * with_experts[part] for part, seconds in layer.items()}
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


def message_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of a message to the next stage: each GPU of a tensor group sends 1/t, then they gather.

    With sequence parallelism there is nothing to gather: each GPU goes on with its own tokens.
    """
    size, t = activation_bytes(plan), plan.tp_size
    gather = 0.0 if plan.sequence_parallel else (t - 1) / t * size / link_rate(plan, hardware, "tp")
    return size / t / link_rate(plan, hardware, "pp") + gather


def gradients_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of the gradients' all-reduce; ZeRO-1 reduce-scatters, then gathers the 16-bit weights.

    It runs over all ranks that have the same weights, d c of them; for experts, those of expert_dp.
    """
    each = plan.gradient_bytes + (2 if plan.zero_stage else plan.gradient_bytes)
    experts = expert_parameters(plan, 0)
    sent = (plan.dp_cp_size - 1) / plan.dp_cp_size * each * (stage_parameters(plan, 0) - experts)
    of_experts = (plan.expert_dp_size - 1) / plan.expert_dp_size * each * experts
    return sent / link_rate(plan, hardware, "dp") + of_experts / link_rate(plan, hardware, "expert_dp")


def optimizer_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds in which Adam reads and writes its states.

    With ZeRO-1 each rank has 1/(d c) of them, and of its experts' states 1/expert_dp.
    """
    experts = expert_parameters(plan, 0)
    dense = stage_parameters(plan, 0) - experts
    held = dense / plan.dp_cp_size + experts / plan.expert_dp_size if plan.zero_stage else dense + experts
    return held * ADAM / hardware.memory_rate
