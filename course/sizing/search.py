"""Searches all ways to lay a model over a cluster: which fit the memory, which is fastest, why the others are out.

A candidate is one choice for each axis. Axes are decided one after the other, and as soon as sizes do not fit together,
all candidates that share them are out for the same reason. What is left is weighed and timed by the parts that differ.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from course.sizing.flops import RECOMPUTE
from course.sizing.folded import is_known
from course.sizing.hardware import Hardware
from course.sizing.plan import NotModelled, Plan, uneven_stages
from course.sizing.stage_memory import MemoryEstimate, full_stages, fullest, stage_activation_bytes, states
from course.sizing.step_seconds import Shared, StepTime, passes_seconds, shared_parameters, step_time, update_seconds
from labkit.parallel_config import V_SHAPED
from labkit.shape import GPT
from labkit.sizes import Misfit, divisors, either

AXES = (
    "tp_size", "cp_size", "pp_size", "ep_size", "expert_tp_size", "num_chunks", "schedule", "micro_batch_size",
    "recompute", "zero_stage",
)  # fmt: skip
"""What a search decides, in this order."""
DECIDED = "model", "world_size", "batch_size"
FOLLOWS = "stage_layers", "recompute_layers", "recompute_modules", "offload_layers"  # depend on the candidate
LETTERS: dict[str, str] = dict(zip(AXES, ("t", "c", "p", "ep", "etp", "v", "schedule", "b", "recompute", "zero")))
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Plan)}
TOO_LARGE = "the fullest GPU must have the memory that it needs"


@dataclass(frozen=True)
class Candidate:
    """One choice with its memory and its time; or, if it is out, ``rejected`` says why."""

    choice: Mapping[str, Any]
    """The fields of `Plan` that the search decided."""
    hardware: Hardware
    plan: Plan | None = None
    memory_bytes: float | None = None
    seconds: float | None = None
    rejected: Misfit | None = None

    @cached_property
    def estimate(self) -> StepTime | None:
        """The step by its parts; None if the candidate is out."""
        return None if self.plan is None or self.rejected else step_time(self.plan, self.hardware)

    def __str__(self) -> str:
        words = []
        for name, value in self.choice.items():
            always = ("tp_size", "pp_size", "micro_batch_size", "num_chunks", "recompute")
            if name in always or value not in (DEFAULTS[name], 1):
                words.append(f"{LETTERS.get(name, name)}={value}")
        if self.seconds is None or self.memory_bytes is None:
            return f"{' '.join(words)}: {self.rejected}"
        return f"{' '.join(words)}: {self.seconds:.3g} s a step, {self.memory_bytes / 1e9:.3g} GB"


def search(
    model: GPT,
    world_size: int,
    batch_size: int,
    hardware: Hardware,
    *,
    memory_share: float = 0.9,
    uneven: bool = False,
    **choices: Any,
) -> "Found":
    """Weigh and time every candidate.

    ``choices`` are fields of `Plan`: one value, or a list of those to try. What is not given has those of `usual`, or
    Plan's default. ``memory_share`` of a GPU may be planned; the rest is for what `memory` does not count. Where p v
    does not divide the layers, ``uneven`` gives the stages about as many, and the embedding and the loss count as one.
    What fits together, each plan's `ParallelConfig` says.

    Raises:
        ValueError: something that no choice could mend, such as a model without attention heads.

    >>> from course.sizing import DGX_A100
    >>> gpt = GPT(96, 12288, 2048, 51200, 96)
    >>> print(search(gpt, 512, 1536, DGX_A100, zero_stage=1, schedule=None).best)
    t=4 p=16 v=1 b=1 recompute=selective: 42.6 s a step, 60.8 GB
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} must be in (0, 1]")
    lists: dict[str, Sequence[Any]] = {}
    fixed: dict[str, Any] = dict(zip(DECIDED, (model, world_size, batch_size)))
    for name, given in choices.items():
        if name not in DEFAULTS or name in fixed or name in FOLLOWS:
            known = [name for name in DEFAULTS if name not in (*fixed, *FOLLOWS)]
            raise ValueError(f"{name}={given!r} is not a choice of a search: use {', '.join(known)}")
        several = isinstance(given, Iterable) and not isinstance(given, str)
        if several or name in AXES:
            values = given if several else [given]
            lists[name] = [_partial_plan(fixed | {name: value}).__dict__[name] for value in values]
            if not lists[name]:
                raise ValueError(f"{name}=[] leaves nothing to try: give one value or more")
        else:
            fixed[name] = given
    options: dict[str, Any] = {name: value for name, value in fixed.items() if name not in DECIDED}
    options |= {name: values[0] for name, values in lists.items() if name not in AXES}
    step_time(Plan(model, 1, batch_size, **options), hardware)  # what is wrong with every choice raises here
    return Found(fixed, lists, hardware, hardware.memory_bytes * memory_share, uneven)


def usual(name: str, fixed: Mapping[str, Any], fused_attention: bool, tp_size: int) -> Sequence[Any]:
    """Return what a search tries for an axis for which nothing is given."""
    sizes, experts = divisors(fixed["world_size"]), fixed["model"].num_experts
    return {
        "tp_size": sizes,
        "cp_size": sizes if fused_attention else (1,),
        "pp_size": sizes,
        "ep_size": [size for size in divisors(experts) if size in sizes] if experts else (1,),
        "expert_tp_size": (None,) if not experts else (1,) if tp_size == 1 else (1, tp_size),
        "num_chunks": (1, 2, 3, 4),
        "schedule": (None, *V_SHAPED),
        "micro_batch_size": (1, 2, 4, 8, 16),
        "recompute": RECOMPUTE,
        "zero_stage": (0, 1, 2, 3),
    }[name]


def _partial_plan(given: Mapping[str, Any]) -> Plan:
    """Return a plan whose values are right on their own, whether or not they fit together."""
    plan = object.__new__(Plan)
    plan.__dict__.update(DEFAULTS | dict(given))
    plan.check_values()
    return plan


def _check_shards(plan: Plan) -> None:
    plan.parallel.check_shards(plan.model)
    plan.parallel.check_sequence(plan.model.seq_length)


def _check_grid(plan: Plan) -> None:
    plan.parallel.grids(plan.world_size)
    plan.check_attention()


def _check_experts(plan: Plan) -> None:
    plan.parallel.check_experts(plan.model)
    plan.__dict__["layout"] = plan.parallel.grids(plan.world_size)  # no later axis changes it


def _check_stages(plan: Plan) -> None:
    plan.check_chunks()
    plan.parallel.check_stages(plan.model.num_layers)


def _check_batch(plan: Plan) -> None:
    plan.parallel.check_batch(plan.layout)
    plan.parallel.check_num_micro_batches(plan.num_micro_batches)
    plan.check_rounds()
    _check_known(plan)


def _check_known(plan: Plan) -> None:
    m = plan.num_micro_batches
    if plan.schedule and not is_known(plan.schedule, plan.pp_size, m):
        raise NotModelled(
            "a search tries a V with 2 * pp_size micro-batches or more, on up to 32 ranks",
            f"schedule={plan.schedule!r} has {m} micro-batches for pp_size={plan.pp_size}",
            "use schedule=None, or ask step_time",
        )


_CHECKS: dict[str, Callable[[Plan], None]] = {
    "cp_size": _check_shards,
    "pp_size": _check_grid,
    "expert_tp_size": _check_experts,
    "num_chunks": _check_stages,
    "schedule": Plan.check_folds,
    "micro_batch_size": _check_batch,
    "recompute": Plan.check_recompute,
    "zero_stage": lambda plan: plan.parallel.check_zero(),
}
"""What is asked of a plan as soon as an axis is decided, too. Later ones have their defaults then, which fit."""


class Found:
    """What a search tried: those that fit, the fastest first, and how many of the others break which rule first."""

    def __init__(self, fixed: dict, lists: dict, hardware: Hardware, limit: float, uneven: bool):
        self.hardware, self.limit, self.uneven = hardware, limit, uneven
        self._fixed, self._lists = fixed, lists
        self._axes = [*(name for name in lists if name not in AXES), *AXES]
        self._choices: dict[str, Sequence[Any]] = {}
        self._left: list[int] = []  # at each axis: the candidates that one of its choices stands for
        self._plan = _partial_plan(fixed)  # as far as it is decided
        self._undecided = {name: {after: DEFAULTS[after] for after in self._axes[place + 1 :]}
                           for place, name in enumerate(self._axes)}  # fmt: skip
        self._held: dict[tuple[int, int], float] = {}
        self._shared: Shared | None = None
        self._least = math.inf  # bytes of the candidates that are too large
        self._counts, self.fitting = Counter[str](), list[Candidate]()
        self._list_choices(1)
        self._decide(0)
        self.fitting.sort(key=lambda each: each.seconds or 0.0)
        self.reasons = dict(self._counts.most_common())

    def __len__(self) -> int:
        return len(self.fitting) + sum(self.reasons.values())

    @property
    def best(self) -> Candidate:
        """The fastest that fits.

        Raises:
            ValueError: nothing fits.
        """
        if not self.fitting:
            raise ValueError(f"none of {len(self):,} candidates fits: {self._reason()}")
        return self.fitting[0]

    def _reason(self) -> str:
        """Say why nothing fits: memory, if some candidates break no other rule; else the rule that most break."""
        if count := self.reasons.get(TOO_LARGE):
            needed = f"the smallest needs {self._least / 1e9:.0f} GB of the {self.limit / 1e9:.0f} to plan with"
            return f"{count:,} need more memory than there is, {needed}; use more GPUs"
        rule, count = next(iter(self.reasons.items()))
        return f"most often, {rule} ({count:,})"

    def ask(self, **choice: Any) -> Candidate:
        """Return one of the candidates with what is said about it; a field left out has Plan's default, or its first.

        Raises:
            ValueError: a choice that was not tried.
        """
        asked, fused = {}, choice.get("fused_attention", self._fixed.get("fused_attention", False))
        for name in choice:
            if name not in self._axes:
                raise ValueError(f"{name} was not searched: use {either(self._axes)}")
        for name in self._axes:
            tried = self._lists.get(name) or usual(name, self._fixed, fused, asked.get("tp_size", 1))
            value = choice.get(name, DEFAULTS[name] if DEFAULTS[name] in tried else tried[0])
            if value not in tried:
                raise ValueError(f"{name}={value!r} was not tried: use {either(tried)}")
            asked[name] = value
        split = self._stage_layers(asked["pp_size"], asked["num_chunks"])
        try:
            plan = Plan(**self._fixed, **asked, stage_layers=split)
            _check_known(plan)
        except Misfit as misfit:
            return Candidate(asked, self.hardware, rejected=misfit.with_traceback(None))
        needed = fullest(plan)
        rejected = _too_large(plan, needed, self.limit) if needed.total > self.limit else None
        seconds = None if rejected else step_time(plan, self.hardware).total
        return Candidate(asked, self.hardware, plan, needed.total, seconds, rejected)

    def _decide(self, depth: int) -> None:
        """Go through all candidates that share what is decided before this axis."""
        name = self._axes[depth]
        if name == "zero_stage":
            return self._weigh()
        for value in self._choices[name]:
            if name == "tp_size":
                self._list_choices(value)
            try:
                self._fix(name, value)
            except Misfit as misfit:
                self._counts[misfit.rule] += self._left[depth]
            else:
                self._decide(depth + 1)

    def _list_choices(self, tp_size: int) -> None:
        fused = self._plan.fused_attention
        self._choices = {name: self._lists.get(name) or usual(name, self._fixed, fused, tp_size) for name in self._axes}
        sizes = [len(self._choices[name]) for name in self._axes]
        self._left = [math.prod(sizes[after:]) for after in range(1, len(sizes) + 1)]

    def _fix(self, name: str, value: Any) -> None:
        """Decide an axis; raise Misfit if what is decided so far does not fit together."""
        plan = self._plan
        for each in (plan, plan.parallel):
            each.__dict__.update(self._undecided[name])
            each.__dict__[name] = value
        plan.parallel.__dict__["schedule"] = plan.schedule_name
        if name == "num_chunks":
            split = self._stage_layers(plan.pp_size, plan.num_chunks)
            for each in (plan, plan.parallel):
                each.__dict__["stage_layers"] = split
        elif name == "schedule":
            self._held, self._shared = {}, None
        if name in _CHECKS:
            _CHECKS[name](plan)

    def _fix_zero(self, zero_stage: int) -> None:
        """Decide the last axis: as `_fix`, without what only others need."""
        plan = self._plan
        plan.__dict__["zero_stage"] = plan.parallel.__dict__["zero_stage"] = zero_stage
        _CHECKS["zero_stage"](plan)

    def _stage_layers(self, pp_size: int, num_chunks: int) -> Sequence[int] | None:
        return uneven_stages(self._fixed["model"].num_layers, pp_size * num_chunks) if self.uneven else None

    def _weigh(self) -> None:
        """Weigh and time the candidates that differ in ZeRO's stage only, which activations and passes do not."""
        plan, passes = self._plan, None
        kept = {stage: stage_activation_bytes(plan, stage) for stage in full_stages(plan)}
        for zero_stage in self._choices["zero_stage"]:
            try:
                self._fix_zero(zero_stage)
            except Misfit as misfit:
                self._counts[misfit.rule] += 1
                continue
            needed = max(self._states(zero_stage, stage) + activations for stage, activations in kept.items())
            if needed > self.limit:
                self._counts[TOO_LARGE] += 1
                self._least = min(self._least, needed)
                continue
            passes = passes or passes_seconds(plan, self.hardware)
            self._shared = self._shared or shared_parameters(plan, self.hardware)
            update = update_seconds(plan, self.hardware, passes[1], self._shared)
            seconds = sum(passes[0].values()) + sum(update)
            found = object.__new__(Plan)
            found.__dict__.update(plan.__dict__)
            del found.__dict__["parallel"]  # which goes on changing: it makes its own
            choice = {name: plan.__dict__[name] for name in self._axes}
            self.fitting.append(Candidate(choice, self.hardware, found, needed, seconds))

    def _states(self, zero_stage: int, stage: int) -> float:
        if (zero_stage, stage) not in self._held:
            weights, gradients, optimizer = states(self._plan, stage)
            self._held[zero_stage, stage] = weights + gradients + optimizer
        return self._held[zero_stage, stage]


def _too_large(plan: Plan, needed: MemoryEstimate, limit: float) -> Misfit:
    """Say how far the plan is from fitting, what takes most of the memory, and which single change would help."""
    states = needed.total - needed.activations
    most, what = max((needed.activations, "activations"), (states, "weights, gradients and optimizer"))
    found = {change: fullest(other).total for change, other in _single_changes(plan)}
    best = min(found, key=lambda change: found[change], default="")
    if fitting := [change for change, total in found.items() if total <= limit]:
        way_out = f"it fits with {' or '.join(fitting)}"
    elif not best or found[best] >= needed.total or (plan.dp_size == 1 and states > limit):  # one replica on all GPUs
        way_out = "use more GPUs"
    else:
        way_out = f"best is {best}: {found[best] / 1e9:.0f} GB, still too much"
    return Misfit(
        TOO_LARGE,
        f"needs {needed.total / 1e9:.0f} GB of the {limit / 1e9:.0f} to plan with",
        f"{most / 1e9:.0f} GB are {what}; {way_out}",
    )


def _single_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield changes that may need less memory, in words, and the plans that they make."""
    t, p = plan.tp_size, plan.pp_size
    changes: list[dict] = [{"micro_batch_size": 1}, {"num_chunks": 1}]
    changes += [{"recompute": more} for more in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :]]
    changes += [{"sequence_parallel": True}, {"zero_stage": 1}, {"tp_size": 2 * t}, {"pp_size": 2 * p}]
    if plan.fused_attention:
        changes.append({"cp_size": 2 * plan.cp_size})
    if plan.dp_size == 1 and p > 1:
        changes.append({"tp_size": 2 * t, "pp_size": p // 2})
    for change in changes:
        with suppress(Misfit):
            other = replace(plan, **change)
            yield " and ".join(f"{name}={value!r}" for name, value in change.items()), other
