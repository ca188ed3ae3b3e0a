"""Profiles some steps: writes the trace of torch's profiler for each rank, for ui.perfetto.dev."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, record_function
from tqdm import tqdm

from labkit.groups import ProcessGroups
from labkit.schedules import Op
from labkit.timeline.trace import Trace


class ProfilerLabels(Trace):
    """Lets torch's profiler show a rank's ops by their labels, such as F0; keeps no spans."""

    @contextmanager
    def span(self, kind: str, label: str, op: Op | None = None) -> Iterator[None]:
        with record_function(label):
            yield


@contextmanager
def profiling(folder: str, groups: ProcessGroups) -> Iterator[ProfilerLabels]:
    """Profile the block; then write this rank's file."""
    # Each rank would say on stderr that it starts and stops
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    path = Path(folder, f"rank{groups.rank}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        fault = f"profile_dir={folder} cannot be written ({error.strerror})"
        raise ValueError(f"{fault}: name a folder") from error
    # There is one cycle of events only: to accumulate them keeps torch 2.11 from warning of more.
    with profile(acc_events=True) as profiler:
        yield ProfilerLabels(groups.rank)
    profiler.export_chrome_trace(str(path))
    if groups.rank == 0:
        tqdm.write(f"Traces are in {folder}", file=sys.stderr)
