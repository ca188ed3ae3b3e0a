"""Profiles some steps: writes a trace of torch's profiler for each rank, and names slow ranks.

Ranks wait for each other, so a step takes equally long on all. A slow rank shows in its own time, without its waits.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch.distributed as dist
from torch.profiler import profile, record_function
from tqdm import tqdm

from labkit.collectives import trace_communication
from labkit.groups import ProcessGroups, local_device
from labkit.schedules import Op
from labkit.timeline.spans import Span, computing_seconds
from labkit.timeline.trace import Trace

STEP = "optimizer"
"""The kind of the span around a whole step; the ops and waits of the step lie inside it."""
SLOW, FEWEST_STEPS = 1.3, 10
"""A rank is slow if its own time is this multiple of its peers' in all steps but one, of this many or more."""


class NamedTrace(Trace):
    """A stopwatch whose spans torch's profiler shows too, by their labels."""

    @contextmanager
    def span(self, kind: str, label: str, op: Op | None = None) -> Iterator[None]:
        with record_function(label), super().span(kind, label, op):
            yield


@contextmanager
def profiling(folder: str, groups: ProcessGroups) -> Iterator[NamedTrace]:
    """Profile steps, each in a span of the kind `STEP`; then write this rank's file, and say which ranks are slow."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each rank would say on stderr that it starts and stops
    rank, path = groups.rank, Path(folder, f"rank{groups.rank}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ValueError(f"profile_dir={folder} cannot be written ({error.strerror}): name a folder") from error
    trace = NamedTrace(rank, local_device())
    # There is one cycle of events only: to accumulate them keeps torch 2.11 from warning of more.
    with trace_communication(trace), profile(acc_events=True) as profiler:
        yield trace
    spans = trace.spans()
    profiler.export_chrome_trace(str(path))
    path.write_text(json.dumps(of_rank(rank, json.loads(path.read_text()))))
    seconds: list = [None] * groups.layout.world_size
    dist.all_gather_object(seconds, own_seconds(spans))
    if rank == 0:
        stages = [groups.layout.coords(each).pp for each in range(len(seconds))]
        tqdm.write(f"Traces are in {folder}. {describe_slow_ranks(seconds, stages)}", file=sys.stderr)


def of_rank(rank: int, content: dict) -> dict:
    """Return a trace of torch's profiler, changed so that Perfetto can show it together with those of other ranks.

    Processes are named, and no other rank has the same process numbers and ids. The times stay.
    """
    first_id, first_pid = rank << 32, 100 * rank + 1
    numbers, events = {os.getpid(): first_pid}, []  # all other processes are GPUs
    for event in content["traceEvents"]:
        if not isinstance(event["pid"], int):
            continue  # what the profiler says of itself
        event["pid"] = numbers.setdefault(event["pid"], first_pid + len(numbers))
        if event["name"] == "process_name":
            event["args"]["name"] = f"rank {rank}"
        if event["name"] == "process_sort_index":
            event["args"]["sort_index"] = event["pid"]
        if "id" in event:
            event["id"] += first_id
        events.append(event)
        if event["name"].startswith("gloo:"):  # a message overlaps what its thread does: only async events may
            end = {"ph": "e", "ts": event["ts"] + event.pop("dur")}
            event |= {"ph": "b", "id": first_id + len(events)}
            events.append(event | end)
    return content | {"traceEvents": events}


def own_seconds(spans: Sequence[Span]) -> list[float]:
    """Return for each step how long this rank did not wait."""
    steps = [span for span in spans if span.kind == STEP]
    return [computing_seconds([each for each in spans if step.start <= each.start < step.end]) for step in steps]


def describe_slow_ranks(seconds: Sequence[Sequence[float]], stages: Sequence[int]) -> str:
    """Return who is slow, from the own seconds of each rank and step, and the pipeline stage of each rank.

    The peers of a rank are the others of its stage, which have as much to do; of a rank alone there, all others.
    """
    if len(seconds) < 2 or len(seconds[0]) < FEWEST_STEPS:
        return f"To see which ranks are slow takes at least 2 ranks and {FEWEST_STEPS} steps."
    said, most = [], 0.0
    for rank, mine in enumerate(seconds):
        others = [other for other in range(len(seconds)) if other != rank]
        peers = [other for other in others if stages[other] == stages[rank]]
        times = [own / median(seconds[peer][step] for peer in peers or others) for step, own in enumerate(mine)]
        nearly_always = sorted(times)[1]  # noise spares every rank now and then, and hits its peers instead
        most = max(most, nearly_always)
        if nearly_always >= SLOW:
            why = "it is slow" if peers else "it is slow, or its stage, which no other rank has, is more work"
            said.append(f"Rank {rank} computes {median(times):.1f} times as long as its peers: {why}.")
    rule = f"none computes {SLOW} times as long as its peers in all steps but one"
    return " ".join(said) or f"No rank is slow: {rule} (at most {most:.2f} times)."
