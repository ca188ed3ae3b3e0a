"""Every way to lay a model over a cluster: which fit the memory, which is fastest, and why the others are out."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from labkit.sizing.hardware import Hardware
from labkit.sizing.memory import fullest
from labkit.sizing.plan import Plan
from labkit.sizing.shape import GPT, RECOMPUTE
from labkit.sizing.step_time import StepTime, step_time


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
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    limit, found = hardware.memory_bytes * memory_share, []
    grid = product([(t, p) for t in sizes for p in sizes if world_size % (t * p) == 0], micro_batch_sizes, num_chunks)
    choices = [(t, p, b, v, how) for (t, p), b, v in grid for how in recompute]
    for t, p, b, v, how in choices:
        try:
            plan = Plan(model, world_size, batch_size, t, p, b, v, how, **options)
        except ValueError as error:
            found.append(Candidate(t, p, b, v, how, rejected=str(error)))
            continue
        needed = fullest(plan)
        if needed.total > limit:
            parts = {"activations": needed.activations, "weights and optimizer": needed.total - needed.activations}
            most = max(parts, key=lambda part: parts[part])
            why = f"needs {needed.total / 1e9:.0f} GB of {limit / 1e9:.0f}, {parts[most] / 1e9:.0f} of them for {most}"
            found.append(Candidate(t, p, b, v, how, plan, needed.total, rejected=why))
        else:
            found.append(Candidate(t, p, b, v, how, plan, needed.total, step_time(plan, hardware)))
    return sorted(found, key=lambda each: (each.estimate is None, each.estimate.total if each.estimate else 0.0))
