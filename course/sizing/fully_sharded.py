"""Counts what each stage of ZeRO holds, sends and hides on one GPU, and what hybrid sharding changes.

The d c ranks with the same weights divide 12 bytes a parameter (stage 1: optimizer), 4 (stage 2: float32 gradients)
and 2 (stage 3: weights). Hybrid sharding divides them over ``shard_size`` neighbours only: each such group has a
copy of the model. The formulas are those of `labkit.data_parallel.FullyShardedDataParallel`, which fetches one unit
ahead. Sources: arXiv 1910.02054, sections 5 and 7; arXiv 2304.11277, section 3.

Experts have replicas of their own, n/(etp ep) = expert_dp. If f ranks divide a copy of all else, e = f expert_dp/(d c)
divide one of the experts. So of D parameters and X of experts, a GPU keeps D/f + X/e; where it sends (f-1)/f numbers
for each of the D, it sends (e-1)/e for each of the X. A layer that is whole has the rank's own experts only: E/ep of
them, and 1/etp of each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from course.sizing.hardware import Hardware
from course.sizing.layer_seconds import PASSES, group_rate, layer_seconds
from course.sizing.plan import Plan
from course.sizing.remembered import remembered
from course.sizing.ring import bus_factor
from course.sizing.stage_memory import (
    WEIGHT_BYTES,
    Kinds,
    MemoryEstimate,
    layer_parameters,
    stage_activation_bytes,
    stage_kinds,
)
from labkit.shape import GPT


class Collective(NamedTuple):
    """A collective over ``size`` ranks that are ``distance`` apart, in some of a step's micro-batches."""

    operation: str
    bytes: float
    """Of the full buffer, per parameter."""
    size: int
    distance: int
    times: int
    """In how many micro-batches of a step."""

    @property
    def sent_bytes(self) -> float:
        """What a GPU sends at once, per parameter."""
        return bus_factor(self.operation, self.size) * self.bytes

    def seconds(self, plan: Plan, hardware: Hardware) -> float:
        """Return how long that takes, per parameter."""
        return self.sent_bytes / group_rate(hardware, plan.world_size, self.size, self.distance)

    def leaving_share(self, plan: Plan, gpus_per_node: int) -> float:
        """Return which share of what all GPUs send around this ring leaves a node."""
        here = max(1, gpus_per_node // self.distance)
        return 0.0 if plan.world_size <= gpus_per_node or self.size <= here else 1 / here


class Sent(NamedTuple):
    """The collectives of a step, by when a unit needs them."""

    forward: Sequence[Collective]
    """Of its weights, before it computes forward."""
    again: Sequence[Collective]
    """Of its weights, before it computes backward. The root, what is in no unit, is whole until then."""
    gradients: Sequence[Collective]


def collectives(plan: Plan, shard_size: int | None = None, experts: bool = False) -> Sent:
    """Return what the plan's ZeRO stage sends of all parameters but the experts, or of these.

    - 0: one all-reduce of the gradients, in the last backward.
    - 1: one reduce-scatter there, and an all-gather of the weights in the next forward: as many numbers as stage 0.
    - 2: a reduce-scatter in each backward.
    - 3: an all-gather in each forward, one more in each backward: 3 (d-1)/d numbers a parameter, not 2.

    Hybrid sharding also all-reduces each GPU's shard of the gradients over the d/f copies, in the last backward. Not
    counted: a flag for each parameter and step, and the biases of routers, which no gradient changes.

    Raises:
        ValueError: ``shard_size`` does not divide the ranks with the same weights, or the plan has a pipeline.
    """
    m, stage, (size, shards, distance) = plan.num_micro_batches, plan.zero_stage, _sharing(plan, shard_size, experts)
    if stage == 0:
        return Sent([], [], [Collective("all_reduce", plan.gradient_bytes, size, distance, 1)])
    gather = Collective("all_gather", WEIGHT_BYTES, shards, distance, m if stage == 3 else 1)
    scatter = Collective("reduce_scatter", plan.gradient_bytes, shards, distance, 1 if stage == 1 else m)
    over_copies = size // shards, distance * shards, 1
    copies = [Collective("all_reduce", plan.gradient_bytes / shards, *over_copies)] * (shards < size)
    return Sent([gather], [gather] * (stage == 3), [scatter, *copies])


def sharded_memory(plan: Plan, shard_size: int | None = None) -> MemoryEstimate:
    """Return what a GPU holds when it is fullest.

    `memory` counts what the ZeRO paper counts. This function adds what is whole for a moment:

    - stages 1 and 2 have a shard of the weights beside all of them;
    - stage 3 has the root (what is in no unit), and two neighbours of the units whole: one computes, one is fetched;
    - gradients of a unit exist twice while they are put side by side to be sent, its experts after the rest; and while
      they travel, its neighbour makes its own. Stage 1 adds them all up whole.
    """
    _check_no_pipeline(plan)
    units, stage = unit_parameters(plan), plan.zero_stage
    of_stage, over = stage_kinds(plan, 0), [_sharing(plan, shard_size, experts)[1] for experts in (False, True)]
    total, shards = sum(of_stage), sum(whole / parts for whole, parts in zip(of_stage, over))
    wholes = [sum(unit) for unit in units]
    root, largest = total - sum(wholes), max(map(max, units))
    neighbours = max(map(sum, zip(wholes, [*wholes[1:], 0])))
    twice = max(neighbours, *(sum(unit) + max(unit) for unit in units))
    weights = [total, total + shards, total + shards, shards + root + neighbours][stage]
    gradients = [total, total + largest, shards + root + twice, shards + root + twice][stage]
    held = WEIGHT_BYTES * weights, plan.gradient_bytes * gradients, plan.optimizer_bytes * (shards if stage else total)
    return MemoryEstimate(*held, stage_activation_bytes(plan, 0))


class Moment(NamedTuple):
    """What a rank holds at a moment of stage 3, in bytes: its shards, and what is whole of each unit."""

    name: str
    shards: int
    weights: Sequence[int]
    gradients: Sequence[int]


def moments(unit_bytes: Sequence[int], dp_size: int, prefetch: int = 1) -> list[Moment]:
    """Return what a rank holds while each unit computes forward, and when backward has made its gradients.

    >>> [moment.weights for moment in moments([4, 4, 4], dp_size=2)]
    [[4, 4, 0], [0, 4, 4], [0, 0, 4], [0, 4, 4], [4, 4, 0], [4, 0, 0]]
    """
    units, found, shards = range(len(unit_bytes)), [], sum(unit_bytes) // dp_size
    for unit in units:
        weights = [size if unit <= each <= unit + prefetch else 0 for each, size in enumerate(unit_bytes)]
        found.append(Moment(f"F{unit}", shards, weights, [0] * len(units)))
    for unit in reversed(units):
        weights = [size if unit - prefetch <= each <= unit else 0 for each, size in enumerate(unit_bytes)]
        gradients = [size if each == unit else 0 for each, size in enumerate(unit_bytes)]
        found.append(Moment(f"B{unit}", shards, weights, gradients))
    return found


@dataclass(frozen=True)
class Sharding:
    """What a stage holds, sends and hides, on one GPU and in one step."""

    memory: MemoryEstimate
    sent_bytes: float
    leaving_bytes: float
    """Of these, what leaves the node, on average over its GPUs."""
    message_seconds: float
    waiting_seconds: float
    """Of these, what is left after the layers have hidden what they can."""
    hides: bool
    """Whether all messages of a layer travel while a layer computes. Those of the two ends never do."""


def sharding(plan: Plan, hardware: Hardware, shard_size: int | None = None) -> Sharding:
    """Return what a plan's stage holds, sends and hides.

    While a layer computes, the next one's weights travel, and in backward the gradients of the one before, too, as if
    layers stood in a ring. What the embedding and the output layer send, when a pass begins and when it ends, has
    nothing to travel beside. A layer's experts travel after its other parameters, and nothing travels beside their
    all-to-alls, which need the same links. Like `step_time`, it leaves out the time to start a message, so rings of
    hundreds of ranks take longer.
    """
    _check_no_pipeline(plan)
    total, units = stage_kinds(plan, 0), unit_parameters(plan)
    root = total.dense - sum(each.dense for each in units)
    of_kinds = [collectives(plan, shard_size, experts) for experts in (False, True)]
    waits = waiting(plan, hardware, shard_size)
    again = Kinds(total.dense - root, total.experts)
    sent = [
        (each, each.times * of_all[kind])
        for kind, of_kind in enumerate(of_kinds)
        for of_all, ways in zip((total, again, total), of_kind)
        for each in ways
    ]
    leaving = sum(n * each.sent_bytes * each.leaving_share(plan, hardware.gpus_per_node) for each, n in sent)
    return Sharding(
        sharded_memory(plan, shard_size),
        sum(n * each.sent_bytes for each, n in sent),
        leaving,
        sum(n * each.seconds(plan, hardware) for each, n in sent),
        waits.seconds,
        waits.hides,
    )


class Waiting(NamedTuple):
    """How long a step waits for messages that its layers do not hide, and whether the layers hide all of their own."""

    seconds: float
    hides: bool


def waiting(plan: Plan, hardware: Hardware, shard_size: int | None = None, total: Kinds | None = None) -> Waiting:
    """Return what `sharding` says of a plan's waiting, of a pipeline's first stage, too.

    `course.sizing.step_time` counts the same for stages 2 and 3. ``total`` is `stage_kinds`, if somebody has it.
    """
    total = total or stage_kinds(plan, 0)
    kinds = [layer_parameters(plan, has_experts) for has_experts in (False, True)]
    num_layers, moe = plan.layers_of_rank(0), plan.num_moe_layers(0)
    alike = {(moe > 0,) * 3: num_layers}
    neighbours = alike if moe in (0, num_layers) else _neighbours(plan.model, plan.pp_size, num_layers, moe)
    ends = total.dense - sum(count * kinds[this].dense for (_, this, _), count in neighbours.items())
    matrices = 0 if plan.model.tied else 2 if plan.pp_size == 1 else 1  # the embedding's and the output's are units
    root = ends - matrices * plan.vocab_size * plan.model.hidden_size / plan.tp_size
    m, seconds, hides = plan.num_micro_batches, 0.0, True
    computing = [_computing_seconds(plan, hardware, each) if (moe if each else moe < num_layers) else 0.0
                 for each in (False, True)]  # fmt: skip
    forward = [each / PASSES[plan.recompute] for each in computing]
    for first, times in ((True, 1), (False, m - 1)) if m > 1 else ((True, 1),):
        fetch, again, gradients = _seconds_per_parameter(plan, hardware, shard_size, first)
        for (before, this, after), count in neighbours.items():
            late = _travel(kinds[after], fetch) - forward[this]
            both = _travel(kinds[before], again) + _travel(kinds[after], gradients) - (computing[this] - forward[this])
            seconds += times * count * (max(0.0, late) + max(0.0, both))
            hides = hides and late <= 0.0 and both <= 0.0
        seconds += times * (ends * (fetch.dense + gradients.dense) + (ends - root) * again.dense)
    return Waiting(seconds, hides)


def _travel(parameters: Kinds, seconds: Kinds) -> float:
    return parameters.dense * seconds.dense + parameters.experts * seconds.experts


@remembered(
    "world_size", "tp_size", "cp_size", "pp_size", "ep_size", "expert_tp_size", "zero_stage", "gradient_bytes"
)  # fmt: skip
def _seconds_per_parameter(plan: Plan, hardware: Hardware, shard_size: int | None, first: bool) -> list[Kinds]:
    """Return how long a parameter travels, for each field of `Sent`, in the first micro-batch or in a later one."""
    of_kinds = [collectives(plan, shard_size, experts) for experts in (False, True)]
    return [
        Kinds(*(sum(each.seconds(plan, hardware) for each in ways if first or each.times > 1) for ways in pair))
        for pair in zip(*of_kinds)
    ]


def _computing_seconds(plan: Plan, hardware: Hardware, has_experts: bool) -> float:
    parts = layer_seconds(plan, hardware, has_experts)
    return sum(parts.values()) - parts["expert_parallel"]


@lru_cache(maxsize=4096)
def _neighbours(model: GPT, pp_size: int, num_layers: int, num_moe_layers: int) -> Counter[tuple[bool, bool, bool]]:
    """Count the first stage's layers by whether the one before, this one and the one after have experts."""
    found = [model.has_experts(number) for number in range(num_layers)]
    if pp_size > 1:  # its stages are not told apart here
        found = [False] * (num_layers - num_moe_layers) + [True] * num_moe_layers
    return Counter(zip(found[-1:] + found[:-1], found, found[1:] + found[:1]))


def unit_parameters(plan: Plan) -> list[Kinds]:
    """Return the parameters of each unit, as `labtrain.model.ParallelGPT` has them.

    A unit is a layer, the embedding, or the output matrix. Tied, the last two are in use from start to end: not units.
    """
    words = [] if plan.model.tied else [Kinds(plan.vocab_size * plan.model.hidden_size / plan.tp_size, 0.0)]
    kinds = [layer_parameters(plan, has_experts) for has_experts in (False, True)]
    layers = [kinds[plan.model.has_experts(number)] for number in range(plan.model.num_layers)]
    return [*words, *layers, *words]


def _check_no_pipeline(plan: Plan) -> None:
    if plan.pp_size > 1:
        raise ValueError(f"pp_size={plan.pp_size}: sharding is modelled without a pipeline, use pp_size=1")


def _sharing(plan: Plan, shard_size: int | None, experts: bool) -> tuple[int, int, int]:
    """Return how many ranks have the same parameters, how many of these divide a copy, and how far apart they are."""
    if shard_size is not None:
        plan.layout.check_shard_size(shard_size)
    size, f = plan.dp_cp_size, shard_size or plan.dp_cp_size
    if not experts:
        return size, f, plan.tp_size
    return plan.expert_dp_size, plan.expert_dp_size * f // size, plan.etp_size * plan.ep_size
