"""One training step of a plan, predicted or measured on real ranks, and its shares: computing, communication, idle."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course.measure.utilisation.work import Pace, computing_work, paced_work
from course.sizing import Plan, memory, simulate
from course.timeline import Timeline, measured
from labkit import pipeline
from labkit.collectives import trace_communication
from labkit.groups import ProcessGroups, init_groups, local_device
from labkit.launch import World, launch, progress
from labkit.layout import ParallelLayout
from labkit.schedules import FORWARD, Schedule, interleaved
from labkit.timeline.spans import COMPUTING, WAIT, Span
from labkit.timeline.trace import Trace


class Shares(NamedTuple):
    """What a rank did with a step's time, as shares of it."""

    computing: float
    communication: float
    idle: float


@dataclass(frozen=True)
class TimedStep:
    """A step, and who did what in it when. ``timeline.source`` says whether it was simulated, paced or measured."""

    plan: Plan
    schedule: Schedule
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last one's end."""
        return self.timeline.makespan_seconds

    @property
    def sequences_per_second(self) -> float:
        """The speed that all this is about."""
        return self.plan.batch_size / self.seconds

    @cached_property
    def shares(self) -> list[Shares]:
        """The shares of each rank; communication is the waits of `waits_for_messages`."""
        found = []
        for rank in self.timeline.ranks:
            waits = sum(span.seconds for span in self.waits_for_messages if span.rank == rank)
            computing, communication = self.timeline.utilisation(rank), waits / self.seconds
            found.append(Shares(computing, communication, max(0.0, 1 - computing - communication)))
        return found

    @property
    def mean_shares(self) -> Shares:
        """The mean over all ranks."""
        return Shares(*(sum(column) / len(self.shares) for column in zip(*self.shares)))

    @cached_property
    def waits_for_messages(self) -> list[Span]:
        """When ranks stood still for a message that was under way.

        As long as what a rank waits for has not been computed, the rank is idle: no faster link would help. In a
        collective the whole wait counts, including the wait for the last rank.
        """
        ended = {(span.rank, span.op): span.end for span in self.timeline.spans if span.kind in COMPUTING}
        found, layout = [], self.plan.layout
        for wait in (span for span in self.timeline.spans if span.kind == WAIT):
            sent = wait.start
            if wait.op:  # not a collective
                place = layout.coords(wait.rank)
                stage, needed = self.schedule.needs(place.pp, wait.op)[0]
                sent = ended[layout.rank_at(**place._replace(pp=stage)._asdict()), needed]
            found.append(replace(wait, start=max(wait.start, min(wait.end, sent))))
        return found

    def __str__(self) -> str:
        """Return one row per rank."""
        lines = [f"{'rank':>4}{'computing':>12}{'communication':>16}{'idle':>8}    {self.timeline.source}"]
        for rank, (computing, communication, idle) in enumerate(self.shares):
            lines.append(f"{rank:>4}{computing:>12.0%}{communication:>16.0%}{idle:>8.0%}")
        return "\n".join(lines)


def table(steps: Mapping[str, TimedStep]) -> str:
    """Return one row per step: its time, its speed, its mean shares, and the memory that its plan needs."""
    width = max([*map(len, steps), 4])
    lines = [f"{'':<{width}}{'ms':>7}{'seq/s':>7}{'computing':>11}{'communication':>15}{'idle':>6}{'GB':>5}"]
    for name, step in steps.items():
        computing, communication, idle = step.mean_shares
        times = f"{step.seconds * 1e3:>7.0f}{step.sequences_per_second:>7.1f}"
        held = memory_bytes(step.plan, step.schedule) / 1e9
        lines.append(f"{name:<{width}}{times}{computing:>11.0%}{communication:>15.0%}{idle:>6.0%}{held:>5.0f}")
    return "\n".join(lines)


def memory_bytes(plan: Plan, schedule: Schedule) -> float:
    """Return what the fullest GPU holds: the first or the last stage, with what it has in flight in this schedule."""
    usual = default_schedule(plan)

    def held(stage: int) -> float:
        of_stage, times = memory(plan, stage), schedule.peak_in_flight(stage) / usual.peak_in_flight(stage)
        return of_stage.total + of_stage.activations * (times - 1)

    return max(held(0), held(plan.pp_size - 1))


def default_schedule(plan: Plan) -> Schedule:
    """Return 1F1B, interleaved if ranks have several chunks."""
    return interleaved(plan.pp_size, plan.num_micro_batches, plan.num_chunks)


def predict_step(plan: Plan, schedule: Schedule | None = None, pace: Pace | None = None) -> TimedStep:
    """Return what the step would be if messages took no time."""
    schedule, pace = schedule or default_schedule(plan), pace or Pace()
    v = schedule.num_chunks
    of_stage = simulate(schedule, v * pace.forward_seconds(plan), v * pace.backward_seconds(plan))
    spans = [
        replace(span, rank=rank) for rank in range(plan.world_size) for span in of_stage.of(plan.layout.coords(rank).pp)
    ]
    return TimedStep(plan, schedule, Timeline(spans, of_stage.source))


def measure_step(
    plan: Plan,
    schedule: Schedule | None = None,
    pace: Pace | None = None,
    *,
    world: World | None = None,
    num_steps: int = 2,
) -> TimedStep:
    """Run the plan on as many real ranks, and return the fastest of a few steps, after one to warm up.

    On GPUs the ranks compute: a GPT as deep, but narrower (`computed_shape`). On the CPU they are paced: each layer
    sleeps as ``pace`` says, and the messages between ranks are real. Optimizer steps are left out. Given a ``world`` of
    that size, the ranks need not start again for each plan.
    """
    schedule, pace = schedule or default_schedule(plan), pace or Pace()
    run = world.run if world else partial(launch, world_size=plan.world_size, timeout_seconds=300)
    ranks = run(_run_steps, plan, schedule, pace, num_steps)
    paced = ranks[0][0]
    source = f"paced: {pace.layer_seconds * 1e3:g} ms a layer" if paced else "measured"
    timelines = [measured([spans[number] for _, spans in ranks], source) for number in range(num_steps)]
    return TimedStep(plan, schedule, min(timelines, key=lambda timeline: timeline.makespan_seconds))


def pace_here(plan: Plan, world: World) -> Pace:
    """Return the pace at which to predict runs in this world.

    On GPUs it is that of a step of ``plan``, measured now. On the CPU layers are paced: it is the pace they are given.
    """
    return _pace_of(measure_step(plan, world=world, num_steps=1)) if world.backend == "nccl" else Pace()


def _pace_of(step: TimedStep) -> Pace:
    """Return the median pace at which the layers of a step went forward."""
    seconds = median(span.seconds for span in step.timeline.spans if span.kind == FORWARD)
    return Pace(seconds / Pace(1.0).forward_seconds(step.plan))


def _run_steps(plan: Plan, schedule: Schedule, pace: Pace, num_steps: int) -> tuple[bool, list[list[Span]]]:
    """Run the steps on a rank; return whether it was paced, and its spans in each step but the first."""
    groups = _groups_of(plan.layout)
    is_paced = local_device().type == "cpu"
    if is_paced:  # messages have to warm up, sleep does not
        warm_up, timed = (paced_work(plan, schedule, groups, each) for each in (Pace(0.0), pace))
    else:
        warm_up = timed = computing_work(plan, schedule, groups)
    spans = []
    for done in range(1 + num_steps):
        work = timed if done else warm_up
        progress(done, 1 + num_steps, "steps, the first to warm up")
        for chunk in work.chunks:
            chunk.zero_grad()
        dist.barrier()
        trace, messages = (Trace(groups.rank, local_device()) for _ in range(2))
        with trace_communication(messages):
            pipeline.run(
                schedule,
                work.chunks,
                groups,
                work.inputs,
                loss=work.loss,
                targets=work.targets,
                trace=trace,
                activation_spec=work.activation_spec,
            )
            if plan.dp_size > 1:
                dist.all_reduce(work.gradients(), group=groups.dp)
        collectives = [span for span in messages.spans() if span.label not in ("send", "recv")]  # those are in trace
        spans.append(trace.spans() + collectives)
    progress(1 + num_steps, 1 + num_steps, "steps")
    return is_paced, spans[1:]


_kept_groups: dict[ParallelLayout, ProcessGroups] = {}  # of this rank, until its world ends


def _groups_of(layout: ParallelLayout) -> ProcessGroups:
    """Return the layout's groups, those of an earlier call if every rank still has them: making them takes time."""
    kept = _kept_groups[layout].made() if layout in _kept_groups else []  # none after they were closed
    is_usable = bool(kept) and set(kept) <= distributed_c10d._world.pg_map.keys()
    usable_on_all = torch.tensor(int(is_usable), device=local_device())
    dist.all_reduce(usable_on_all, op=dist.ReduceOp.MIN)
    if not usable_on_all:
        _kept_groups[layout] = init_groups(layout)
    return _kept_groups[layout]
