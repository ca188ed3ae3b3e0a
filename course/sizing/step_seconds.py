"""Estimates how long a training step takes, from a plan and a few constants of the hardware.

The step is a sum of parts: matrix products, kernels that only move memory, overhead, the tensor-parallel collectives,
what attention waits for other context ranks, the pipeline's messages and its bubble, the gradients' all-reduce, the
optimizer. Nothing overlaps but a ring's messages with its blocks, as in the runs of 2021 (`course.sizing.table_1`);
unless the hardware says which share of the messages is `Hidden`, as in the runs of `course.sizing.runs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from course.sizing.flops import flops_per_step
from course.sizing.fully_sharded import waiting
from course.sizing.hardware import Hardware
from course.sizing.layer_seconds import activation_bytes, layer_seconds, link_rate, logits_seconds
from course.sizing.plan import Plan
from course.sizing.stage_memory import Kinds, fullest, offloaded_bytes, stage_kinds

ADAM = (4 + 4) + (4 + 4) + 2 * (4 + 4) + 2
"""Bytes that Adam reads and writes for each parameter: gradient, then set to 0; float32 copy; two moments; weight.
Where `Plan.optimizer_bytes` are fewer, it reads and writes fewer."""


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
        return self._flops(self.plan.recompute, self.plan.modules) / (self.total * self.plan.world_size)

    @property
    def peak_flops(self) -> float:
        """The peak of the plan's precision, of which both utilisations are shares."""
        return self.hardware.peak_of(self.plan.precision)

    @property
    def hardware_flops_utilisation(self) -> float:
        """The share of that peak, counting all FLOPs that are done."""
        return self.flops_per_gpu / self.peak_flops

    @property
    def model_flops_utilisation(self) -> float:
        """The share of that peak, counting only what the model needs: no recomputation.

        Where fused attention computes only the scores that a query sees, only these count.
        """
        return self._flops("none", ()) / (self.total * self.plan.world_size * self.peak_flops)

    @property
    def memory_bytes(self) -> float:
        """What the fullest GPU holds."""
        return fullest(self.plan).total

    @property
    def fits(self) -> bool:
        """Whether that is at most what a GPU has: a plan that does not fit has no such step."""
        return self.memory_bytes <= self.hardware.memory_bytes

    def __str__(self) -> str:
        """Return the seconds, the utilisation, whether the plan fits, and whether anything was fitted to the GPU."""
        precision, peak = self.plan.precision, self.peak_flops / 1e12
        used = f"{self.model_flops_utilisation:.0%} of the {precision} peak, {peak:.0f} teraFLOP/s"
        needed = f"{self.memory_bytes / 1e9:.0f} of {self.hardware.memory_bytes / 1e9:.0f} GB"
        fit = f"needs {needed}" if self.fits else f"DOES NOT FIT: needs {needed}"
        unfitted = "" if self.hardware.fitted_to else f"; nothing was fitted to {self.hardware.name}"
        return f"{self.total:.3g} s a step, {used}; {fit}{unfitted}"

    def _flops(self, recompute: str, modules: Sequence[str]) -> float:
        return flops_per_step(self.plan.model, self.plan.batch_size, recompute, self.plan.fused_attention, modules)

    def days(self, num_tokens: float) -> float:
        """Return the days that a training run of ``num_tokens`` takes."""
        return num_tokens / (self.plan.batch_size * self.plan.model.seq_length) * self.total / 86400


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Estimate a step on the GPUs of the pipeline rank that takes longest for a micro-batch; it sets the pace."""
    passes, micro_batch = passes_seconds(plan, hardware)
    data_parallel, optimizer = update_seconds(plan, hardware, micro_batch)
    return StepTime(plan, hardware, **passes, data_parallel=data_parallel, optimizer=optimizer)


def passes_seconds(plan: Plan, hardware: Hardware) -> tuple[dict[str, float], float]:
    """Return the seconds of all micro-batches, by part, and those of a rank's layers for one.

    ZeRO's stage does not matter here. With as many layers everywhere, the slowest rank is the one that also computes
    the logits. Chunks of a rank count as their mean.
    """
    ranks = {plan.loss_rank}
    if plan.stage_layers or plan.model.num_experts:
        ranks.update(same[0] for same in plan.ranks_by_layers)
    layer, once = max((_of_a_micro_batch(plan, hardware, rank) for rank in ranks), key=lambda each: _total(*each))
    m, bubble_slots, micro_batch = plan.num_micro_batches, plan.bubble_slots, sum(layer.values())
    work = {part: m * (seconds + once.get(part, 0.0)) for part, seconds in layer.items()}
    messages = 2 * plan.num_chunks * message_seconds(plan, hardware) if plan.pp_size > 1 else 0.0  # there and back
    if plan.num_chunks > 1:  # the rank has another chunk to compute while one waits
        messages *= 1 - hardware.hidden.pipeline
    work["pipeline_messages"], work["bubble"] = (m + bubble_slots) * messages, bubble_slots * micro_batch
    return work, micro_batch


def _of_a_micro_batch(plan: Plan, hardware: Hardware, rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a pipeline rank's layers, and of the logits if it has them, by part."""
    layers, layer = plan.layers_of_rank(rank), layer_seconds(plan, hardware)
    if share := plan.num_moe_layers(rank) / layers:  # the mean of both kinds
        with_experts = layer_seconds(plan, hardware, True)
        layer = {part: (1 - share) * seconds + share * with_experts[part] for part, seconds in layer.items()}
    if plan.recompute_layers is not None:
        share, without = plan.recomputed_share, replace(plan, recompute="none", recompute_layers=None)
        other, _ = _of_a_micro_batch(without, hardware, rank)
        layer = {part: share * seconds + (1 - share) * other[part] / layers for part, seconds in layer.items()}
    logits = logits_seconds(plan, hardware) if rank == plan.loss_rank else {}
    if plan.offload_layers:
        waits = offload_seconds(plan, hardware, layers * sum(layer.values()))
        layer = layer | {"memory_bound": layer["memory_bound"] + waits / layers}
    return {part: layers * seconds for part, seconds in layer.items()}, logits


def offload_seconds(plan: Plan, hardware: Hardware, computing: float) -> float:
    """Return how long a micro-batch waits for activations on their way to the CPU, and on their way back.

    They travel while the layers compute: a third of ``computing`` forward, the rest backward.
    """
    travel = offloaded_bytes(plan) / (hardware.host_bytes_per_second * hardware.node_efficiency)
    return max(0.0, travel - computing / 3) + max(0.0, travel - 2 * computing / 3)


def _total(*parts: dict[str, float]) -> float:
    return sum(sum(each.values()) for each in parts)


def message_seconds(plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of a message to the next stage: each GPU of a tensor group sends 1/t, then they gather.

    With sequence parallelism there is nothing to gather: each GPU goes on with its own tokens.
    """
    size, t = activation_bytes(plan), plan.tp_size
    gather = 0.0 if plan.sequence_parallel else (t - 1) / t * size / link_rate(plan, hardware, "tp")
    return size / t / link_rate(plan, hardware, "pp") + gather


class Shared(NamedTuple):
    """A GPU's parameters by who has the same, d c replicas or (experts) expert_dp, and the rates between these."""

    dense: float
    experts: float
    rate: float
    expert_rate: float


def shared_parameters(plan: Plan, hardware: Hardware) -> Shared:
    """Return what the ranks of the first stage share."""
    rates = [link_rate(plan, hardware, axis) for axis in ("dp", "expert_dp")]
    return Shared(*stage_kinds(plan, 0), *rates)


def update_seconds(
    plan: Plan, hardware: Hardware, micro_batch: float, shared: Shared | None = None
) -> tuple[float, float]:
    """Return the seconds of the gradients' messages that nothing hides, and those of the optimizer.

    Some find work to hide behind in the last micro-batch and, for weights, in the first; with several chunks, in p
    micro-batches, a round; in all of them, if ZeRO stages 2 and 3 send in all of them. ``micro_batch`` is how long a
    rank computes one. Adam reads and writes its states: with ZeRO a rank has 1/(d c) of them, of experts 1/expert_dp.
    """
    shared = shared or shared_parameters(plan, hardware)
    if plan.zero_stage > 1:
        seconds = waiting(plan, hardware, None, Kinds(shared.dense, shared.experts)).seconds
    else:
        seconds = gradients_seconds(plan, hardware, shared)
        if hardware.hidden.data:
            behind = plan.pp_size if plan.num_chunks > 1 else 1
            seconds -= hardware.hidden.data * min(seconds, behind * micro_batch)
    held = shared.dense + shared.experts
    if plan.zero_stage:
        held = shared.dense / plan.dp_cp_size + shared.experts / plan.expert_dp_size
    moved_bytes = ADAM - 2 * (12 - plan.optimizer_bytes)
    return seconds, held * moved_bytes / hardware.memory_rate


def gradients_seconds(plan: Plan, hardware: Hardware, shared: Shared | None = None) -> float:
    """Return the seconds of the gradients' all-reduce, and of what ZeRO sends instead.

    Stage 1 reduce-scatters, then gathers the 16-bit weights. Stage 2 reduce-scatters after each micro-batch, stage 3
    also gathers the weights twice in each (`course.sizing.fully_sharded.collectives`). It runs over all ranks that have
    the same weights, d c of them; for experts, those of expert_dp.
    """
    shared = shared or shared_parameters(plan, hardware)
    m, g, sharing, of_experts = plan.num_micro_batches, plan.gradient_bytes, plan.dp_cp_size, plan.expert_dp_size
    each = [g + g, g + 2, m * g + 2, m * (g + 2 * 2)][plan.zero_stage]
    sent = (sharing - 1) / sharing * each * shared.dense
    return sent / shared.rate + (of_experts - 1) / of_experts * each * shared.experts / shared.expert_rate
