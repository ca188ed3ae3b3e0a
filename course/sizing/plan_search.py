"""Every way to lay a model over a cluster: which fit the memory, which is fastest, and why the others are out."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from course.sizing.hardware import Hardware
from course.sizing.plan import Plan
from course.sizing.stage_memory import Memory, fullest
from course.sizing.step_seconds import StepTime, step_time
from labkit.shape import GPT, RECOMPUTE
from labkit.sizes import divisors


@dataclass(frozen=True)
class Candidate:
    """One choice, and its estimate; or why it is out, when ``rejected`` says so."""

    tp_size: int
    pp_size: int
    micro_batch_size: int
    num_chunks: int
    recompute: str
    plan: Plan | None = None
    memory_bytes: float | None = None
    estimate: StepTime | None = None
    rejected: str | None = None

    def __str__(self) -> str:
        choice = f"t={self.tp_size} p={self.pp_size} b={self.micro_batch_size} v={self.num_chunks} {self.recompute}"
        if self.estimate is None or self.memory_bytes is None:
            return f"{choice}: {self.rejected}"
        text = f"{self.estimate.total:.3g} s a step, {self.memory_bytes / 1e9:.3g} GB"
        return f"{choice}: {self.rejected or text}"


def search(
    model: GPT,
    world_size: int,
    batch_size: int,
    hardware: Hardware,
    *,
    micro_batch_sizes: Iterable[int] = (1, 2, 4, 8, 16),
    num_chunks: Iterable[int] = (1, 2, 3, 4),
    recompute: Iterable[str] = RECOMPUTE,
    memory_share: float = 0.9,
    **options,
) -> list[Candidate]:
    """All choices of (t, p, micro-batch, v, recomputation): those that fit by time, the fastest first, then the others.

    ``memory_share`` of a GPU may be planned; the rest is for what `memory` does not count. ``options`` go to `Plan`:
    sequence_parallel, zero_stage, gradient_bytes.

    Raises:
        ValueError: what no choice could mend, as a model without attention heads or a share above 1.
    """
    step_time(Plan(model, 1, batch_size, **options), hardware)  # what is wrong with every choice raises here
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share} is no share of the memory: use a number above 0, up to 1")
    sizes = [(t, p) for t in divisors(world_size) for p in divisors(world_size // t)]
    limit, found = hardware.memory_bytes * memory_share, []
    for (t, p), b, v, how in product(sizes, micro_batch_sizes, num_chunks, recompute):
        try:
            plan = Plan(model, world_size, batch_size, t, p, b, v, how, **options)
        except ValueError as error:
            found.append(Candidate(t, p, b, v, how, rejected=str(error)))
            continue
        needed = fullest(plan)
        if needed.total > limit:
            why = _too_large(plan, needed, limit)
            found.append(Candidate(t, p, b, v, how, plan, needed.total, rejected=why))
        else:
            found.append(Candidate(t, p, b, v, how, plan, needed.total, step_time(plan, hardware)))
    return sorted(found, key=lambda each: (each.estimate is None, each.estimate.total if each.estimate else 0.0))


def reasons(candidates: Iterable[Candidate]) -> dict[str, int]:
    """How many are out by each rule, its numbers left out; the rule that most fail comes first.

    >>> reasons([Candidate(1, 1, 1, 1, "full", rejected=f"needs {size} GB of 72: more GPUs") for size in (90, 120)])
    {'needs # GB of #': 2}
    """
    rules = (re.sub(r"\d[\d.]*", "#", each.rejected).partition(":")[0] for each in candidates if each.rejected)
    return dict(Counter(rules).most_common())


def _too_large(plan: Plan, needed: Memory, limit: float) -> str:
    """How far it is from fitting, what takes most, and which single change would help."""
    states = needed.total - needed.activations
    most, what = max((needed.activations, "activations"), (states, "weights, gradients and optimizer"))
    text = f"needs {needed.total / 1e9:.0f} GB of the {limit / 1e9:.0f} to plan with: {most / 1e9:.0f} GB are {what}"
    found = {change: fullest(other).total for change, other in _single_changes(plan)}
    if fitting := [change for change, total in found.items() if total <= limit]:
        return f"{text}; it fits with {' or '.join(fitting)}"
    best = min(found, key=lambda change: found[change], default="")
    if not best or found[best] >= needed.total or (plan.dp_size == 1 and states > limit):  # one replica, on all GPUs
        return f"{text}; use more GPUs"
    return f"{text}; best is {best}: {found[best] / 1e9:.0f} GB, still too much"


def _single_changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes that may need less memory, in words, and the plans that they make."""
    t, p, changes = plan.tp_size, plan.pp_size, []
    if plan.micro_batch_size > 1:
        changes.append({"micro_batch_size": 1})
    if plan.num_chunks > 1:
        changes.append({"num_chunks": 1})
    changes += [{"recompute": more} for more in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :]]
    if t > 1 and not plan.sequence_parallel:
        changes.append({"sequence_parallel": True})
    if plan.dp_size > 1:
        changes += [{"zero_stage": 1}] if plan.zero_stage == 0 else []
        changes += [{"tp_size": 2 * t}, {"pp_size": 2 * p}]
    elif p > 1:
        changes.append({"tp_size": 2 * t, "pp_size": p // 2})
    for change in changes:
        with suppress(ValueError):  # sizes that do not fit together
            other = replace(plan, **change)
            yield " and ".join(f"{name}={value!r}" for name, value in change.items()), other
