"""Counts what each stage of ZeRO holds, sends and hides on one GPU, and what hybrid sharding changes.

The d c ranks with the same weights divide 12 bytes a parameter (stage 1: optimizer), 4 (stage 2: float32 gradients)
and 2 (stage 3: weights). Hybrid sharding divides them over ``shard_size`` neighbours only: each such group has a
copy of the model. The formulas are those of `labkit.data_parallel.FullyShardedDataParallel`, which fetches one unit
ahead. Sources: arXiv 1910.02054, sections 5 and 7; arXiv 2304.11277, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from course.sizing.hardware import Hardware
from course.sizing.layer_seconds import PASSES, group_rate, layer_seconds
from course.sizing.plan import Plan
from course.sizing.ring import bus_factor
from course.sizing.stage_memory import OPTIMIZER_BYTES, WEIGHT_BYTES, Memory, stage_activation_bytes, stage_parameters
from labkit.partition import check_divides


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


def collectives(plan: Plan, shard_size: int | None = None) -> tuple[list[Collective], list[Collective]]:
    """Return what the plan's ZeRO stage sends in forward and in backward.

    - 0: one all-reduce of the gradients, in the last backward.
    - 1: one reduce-scatter there, and an all-gather of the weights in the next forward: as many numbers as stage 0.
    - 2: a reduce-scatter in each backward.
    - 3: an all-gather in each forward, one more in each backward: 3 (d-1)/d numbers a parameter, not 2.

    Hybrid sharding also all-reduces each GPU's shard of the gradients over the d/f copies, in the last backward.

    Raises:
        ValueError: ``shard_size`` does not divide the ranks with the same weights, or the plan has a pipeline.
    """
    d, t, m, f = plan.dp_cp_size, plan.tp_size, plan.num_micro_batches, _shard_size(plan, shard_size)
    if plan.zero_stage == 0:
        return [], [Collective("all_reduce", plan.gradient_bytes, d, t, 1)]
    gather = Collective("all_gather", WEIGHT_BYTES, f, t, m if plan.zero_stage == 3 else 1)
    scatter = Collective("reduce_scatter", plan.gradient_bytes, f, t, 1 if plan.zero_stage == 1 else m)
    copies = [Collective("all_reduce", plan.gradient_bytes / f, d // f, t * f, 1)] * (f < d)
    return [gather], [*[gather] * (plan.zero_stage == 3), scatter, *copies]


def sharded_memory(plan: Plan, shard_size: int | None = None) -> Memory:
    """Return what a GPU holds when it is fullest.

    `memory` counts what the ZeRO paper counts. This function adds what is whole for a moment:

    - stages 1 and 2 have a shard of the weights beside all of them;
    - stage 3 has the root (what is in no unit), and two neighbours of the units whole: one computes, one is fetched;
    - gradients of a unit exist twice while they are put side by side to be sent; stage 1 adds them all up whole.
    """
    f, g, units, stage = _shard_size(plan, shard_size), plan.gradient_bytes, unit_parameters(plan), plan.zero_stage
    total = stage_parameters(plan, 0)
    root, twice = total - sum(units), 2 * max(units)
    neighbours = max(map(sum, zip(units, [*units[1:], 0])))
    weights = [total, total + total / f, total + total / f, total / f + root + neighbours][stage]
    gradients = [total, total + twice / 2, total / f + root + twice, total / f + root + twice][stage]
    optimizer = OPTIMIZER_BYTES * total / (f if stage else 1)
    return Memory(WEIGHT_BYTES * weights, g * gradients, optimizer, stage_activation_bytes(plan, 0))


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

    memory: Memory
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

    A layer's messages travel while its neighbour computes. What the embedding and the output layer send, when a pass
    begins and when it ends, has nothing to travel beside. Like `step_time`, it leaves out the time to start a message,
    so rings of hundreds of ranks take longer.
    """
    ways, layer = collectives(plan, shard_size), layer_parameters(plan)
    total, num_layers = stage_parameters(plan, 0), plan.model.num_layers
    ends, computing = total - num_layers * layer, sum(layer_seconds(plan, hardware).values())
    forward, waiting, hides = computing / PASSES[plan.recompute], 0.0, True
    for seconds, sent in zip((forward, computing - forward), ways):
        for number in range(plan.num_micro_batches):
            in_flight = sum(each.seconds(plan, hardware) for each in sent if number < each.times)
            too_long = max(0.0, layer * in_flight - seconds)
            waiting += num_layers * too_long + ends * in_flight
            hides = hides and not too_long
    sent = [(each, each.times * total) for way in ways for each in way]
    leaving = sum(n * each.sent_bytes * each.leaving_share(plan, hardware.gpus_per_node) for each, n in sent)
    return Sharding(
        sharded_memory(plan, shard_size),
        sum(n * each.sent_bytes for each, n in sent),
        leaving,
        sum(n * each.seconds(plan, hardware) for each, n in sent),
        waiting,
        hides,
    )


def layer_parameters(plan: Plan) -> float:
    """Return the parameters of a layer on a GPU."""
    one, two = (replace(plan, model=replace(plan.model, num_layers=number)) for number in (1, 2))
    return stage_parameters(two, 0) - stage_parameters(one, 0)


def unit_parameters(plan: Plan) -> list[float]:
    """Return the parameters of each unit, as `labkit.model.ParallelGPT` has them.

    A unit is a layer, the embedding, or the output matrix. Tied, the last two are in use from start to end: not units.
    """
    words = [] if plan.model.tied else [plan.model.vocab_size * plan.model.hidden_size / plan.tp_size]
    return [*words, *[layer_parameters(plan)] * plan.model.num_layers, *words]


def _shard_size(plan: Plan, shard_size: int | None) -> int:
    if plan.pp_size > 1:
        raise ValueError(f"pp_size={plan.pp_size}: sharding is modelled without a pipeline, use pp_size=1")
    if plan.model.num_experts:
        raise ValueError(f"num_experts={plan.model.num_experts}: sharding is modelled without experts, use `memory`")
    f = plan.dp_cp_size if shard_size is None else shard_size
    check_divides(f, "dp_size * cp_size", plan.dp_cp_size, parts_name="shard_size")
    return f
