"""Searches all ways to lay a model over a cluster: which fit the memory, which is fastest, why the others are out."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from course.sizing.flops import RECOMPUTE
from course.sizing.hardware import Hardware
from course.sizing.plan import Misfit, Plan
from course.sizing.stage_memory import Memory, fullest
from course.sizing.step_seconds import StepTime, step_time
from labkit.shape import GPT
from labkit.sizes import divisors


@dataclass(frozen=True)
class Candidate:
    """One choice with its estimate; or, if it is out, ``rejected`` says why."""

    tp_size: int
    pp_size: int
    micro_batch_size: int
    num_chunks: int
    recompute: str
    cp_size: int = 1
    plan: Plan | None = None
    memory_bytes: float | None = None
    estimate: StepTime | None = None
    rejected: Misfit | None = None

    def __str__(self) -> str:
        context = f"c={self.cp_size} " if self.cp_size > 1 else ""
        choice = f"t={self.tp_size} {context}p={self.pp_size} b={self.micro_batch_size} v={self.num_chunks}"
        choice += f" {self.recompute}"
        if self.estimate is None or self.memory_bytes is None:
            return f"{choice}: {self.rejected}"
        return f"{choice}: {self.estimate.total:.3g} s a step, {self.memory_bytes / 1e9:.3g} GB"


def search(
    model: GPT,
    world_size: int,
    batch_size: int,
    hardware: Hardware,
    *,
    micro_batch_sizes: Iterable[int] = (1, 2, 4, 8, 16),
    num_chunks: Iterable[int] = (1, 2, 3, 4),
    recompute: Iterable[str] = RECOMPUTE,
    cp_sizes: Iterable[int] = (1,),
    memory_share: float = 0.9,
    **options,
) -> list[Candidate]:
    """Return all choices of t, p, micro-batch, v, recomputation and c: first those that fit, fastest first.

    Context parallelism is only tried if ``cp_sizes`` offers it, and needs ``fused_attention=True``. ``memory_share`` of
    a GPU may be planned; the rest is for what `memory` does not count. ``options`` go to `Plan`: sequence_parallel,
    zero_stage, gradient_bytes, fused_attention, context_parallel, ep_size, expert_tp_size.

    Raises:
        ValueError: something that no choice could mend, such as a model without attention heads.
    """
    alone = {name: value for name, value in options.items() if name not in ("ep_size", "expert_tp_size")}
    step_time(Plan(model, 1, batch_size, **alone), hardware)  # what is wrong with every choice raises here
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} must be in (0, 1]")
    sizes = [(t, p) for t in divisors(world_size) for p in divisors(world_size // t)]
    limit, found = hardware.memory_bytes * memory_share, []
    for (t, p), b, v, how, c in product(sizes, micro_batch_sizes, num_chunks, recompute, cp_sizes):
        try:
            plan = Plan(model, world_size, batch_size, t, p, b, v, how, cp_size=c, **options)
        except Misfit as misfit:
            found.append(Candidate(t, p, b, v, how, c, rejected=misfit.with_traceback(None)))
            continue
        needed = fullest(plan)
        rejected = _too_large(plan, needed, limit) if needed.total > limit else None
        estimate = None if rejected else step_time(plan, hardware)
        found.append(Candidate(t, p, b, v, how, c, plan, needed.total, estimate, rejected))
    return sorted(found, key=lambda each: each.estimate.total if each.estimate else math.inf)


def reasons(candidates: Iterable[Candidate]) -> dict[str, int]:
    """Return how many candidates break each rule, the rule that most of them break first."""
    return dict(Counter(each.rejected.rule for each in candidates if each.rejected).most_common())


def _too_large(plan: Plan, needed: Memory, limit: float) -> Misfit:
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
        "the fullest GPU must have the memory that it needs",
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
