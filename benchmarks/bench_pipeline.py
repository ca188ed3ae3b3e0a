"""A training step of a pipeline, labkit.pipeline against torch.distributed.pipelining.

Paced stages sleep 20 or 80 ms forward and twice as long backward, so that the result is about the runtime and not about
the cores: what a runtime adds to each op counts for less in longer ops. Computing stages really compute. Rounds of the
two alternate in one world; the result is the median round of the slowest rank. The text also gives both as multiples of
the makespan that the schedule allows, by simulation.

Where stages compute, one more round of ours is traced, and simulated with the times that its ops took. The distance
between the simulated makespan and the measured one is what messages cost, and waiting for a core.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as peer

from course.measure.paced import PacedStage
from course.sizing import simulate
from course.timeline import Timeline, measured
from labkit import pipeline, schedules
from labkit.groups import init_groups
from labkit.launch import launch
from labkit.layout import ParallelLayout
from labkit.schedules import Schedule
from labkit.timeline.spans import Span
from labkit.timeline.trace import Trace

PACES = {"20 + 40 ms": 0.020, "80 + 160 ms": 0.080}  # seconds of a stage's forward; its backward takes twice as long
WIDTH, ROWS = 512, 64  # of a computing stage's layers, and of a micro-batch
SCHEDULES = {
    "1F1B": (schedules.one_f_one_b, peer.Schedule1F1B),
    "interleaved, v = 2": (partial(schedules.interleaved, num_chunks=2), peer.ScheduleInterleaved1F1B),
    "GPipe": (schedules.gpipe, peer.ScheduleGPipe),
    "ZB-V": (schedules.zero_bubble_v, peer.ScheduleZBVZeroBubble),
    "DualPipeV": (schedules.dualpipe_v, peer.ScheduleDualPipeV),
}
NUM_ROUNDS = 5


def rows(p: int = 4, m: int = 8) -> Iterator[tuple[str, float, float]]:
    for (pace, seconds), (name, (make, peer_schedule)) in itertools.product(PACES.items(), SCHEDULES.items()):
        ours, theirs, _ = run_both(schedule := make(p, m), peer_schedule, partial(paced, seconds))
        ideal = simulate(schedule, seconds, 2 * seconds).makespan_seconds
        yield f"{name} paced {pace}, {ours / ideal:.3f} of ideal, pipelining {theirs / ideal:.3f}", ours, theirs
    for name, (make, peer_schedule) in SCHEDULES.items():
        ours, theirs, timeline = run_both(schedule := make(p, m), peer_schedule, computing)
        error = simulated_like(timeline, schedule).makespan_seconds / timeline.makespan_seconds - 1
        yield f"computing {name}, {p} ranks, simulated {error:+.0%}; pipelining", ours, theirs


def run_both(schedule: Schedule, peer_schedule: Callable, make_chunk: Callable) -> tuple[float, float, Timeline]:
    options: dict = dict(world_size=schedule.pp_size, backend="gloo", timeout_seconds=300)
    ranks = launch(compare, schedule, peer_schedule, make_chunk, **options)
    ours, theirs, _ = ranks[0]
    return ours, theirs, measured([spans for _, _, spans in ranks])


def simulated_like(timeline: Timeline, schedule: Schedule) -> Timeline:
    """Return a simulation in which each model chunk's ops take what they took on average."""
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in schedule.kinds:
            taken[span.kind, schedule.stage_of(span.rank, span.op.chunk)].append(span.seconds)
    forward, *halves = (
        [statistics.mean(taken[kind, stage]) for stage in range(schedule.num_stages)] for kind in schedule.kinds
    )
    backward = [sum(parts) for parts in zip(*halves)]
    return simulate(schedule, forward, backward, weight_gradient_share=sum(halves[-1]) / sum(backward))


def paced(forward_seconds: float, num_chunks: int) -> nn.Module:
    return PacedStage(forward_seconds / num_chunks, 2 * forward_seconds / num_chunks)


def computing(num_chunks: int) -> nn.Module:
    layers = [layer for _ in range(8 // num_chunks) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def compare(schedule: Schedule, peer_schedule: Callable, make_chunk: Callable) -> tuple[float, float, list[Span]]:
    """Return the median seconds of a step of ours and of torch's on the slowest rank, and the spans of one of ours."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    p, m = schedule.pp_size, schedule.num_micro_batches
    groups, rank = init_groups(ParallelLayout(p, pp_size=p)), dist.get_rank()
    x = torch.randn(m * ROWS, WIDTH)
    chunks = [make_chunk(schedule.num_chunks) for _ in range(schedule.num_chunks)]
    theirs = [make_chunk(schedule.num_chunks) for _ in range(schedule.num_chunks)]
    stages = [
        peer.PipelineStage(chunk, schedule.stage_of(rank, number), schedule.num_stages, torch.device("cpu"))
        for number, chunk in enumerate(theirs)
    ]
    peers_loss = {"loss_fn": lambda output, target: output.square().mean()}
    runtime = peer_schedule(stages if schedule.num_chunks > 1 else stages[0], m, **peers_loss)
    target = {"target": x} if rank == schedule.rank_of_stage(schedule.num_stages - 1) else {}
    options = {"loss": lambda output, _: output.square().mean()}
    options["activation_spec"] = x.dtype, x.chunk(m)[0].shape

    def our_step(trace: Trace | None = None):
        pipeline.run(schedule, chunks, groups, x.chunk(m), **options, trace=trace)

    def their_step():
        runtime.step(*([x] if rank == 0 else []), **target)

    seconds: dict[Callable, list[float]] = {our_step: [], their_step: []}
    for _ in range(2 + NUM_ROUNDS):
        for step, taken in seconds.items():
            taken.append(timed(step))
    medians = torch.tensor([statistics.median(taken[2:]) for taken in seconds.values()])  # the first two warm up
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    trace = Trace(rank)
    timed(lambda: our_step(trace))
    return medians[0].item(), medians[1].item(), trace.spans()


def timed(step: Callable) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
