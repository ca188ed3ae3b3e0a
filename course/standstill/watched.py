"""Runs a script with two instruments at hand: ``torchrun course/standstill/watched.py FOLDER script.py``.

- On SIGUSR1, faulthandler writes where each thread of this rank stands to ``stack_RANK``. It does so in the handler
  itself, so it also works while Python waits in C++.
- When it finds the folder ``traces_N``, a thread writes there what Flight Recorder has noted so far. A handler written
  in Python could not: Python calls it when the main thread is back from C++, which is never.

No line of the script changes. With GPUs no thread is needed: a time-out of NCCL dumps by itself.
"""

import faulthandler
import itertools
import os
import pickle
import runpy
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # pyright: ignore[reportAttributeAccessIssue]


def record(folder: Path, rank: str) -> None:
    """Write a dump of Flight Recorder in the form that `torchfrtrace` reads, each time that one is asked for."""
    for number in itertools.count(1):
        traces = folder / f"traces_{number}"
        while not traces.exists():
            time.sleep(0.05)
        dump = pickle.loads(_dump_fr_trace())
        # gloo says "" for the name of its groups and [] for their ranks: torchfrtrace stops with KeyError: '0'
        groups = dist.distributed_c10d._world.pg_names.items()
        ranks = {name: str(dist.get_process_group_ranks(group)) for group, name in groups}
        dump["pg_config"] = {name: {"name": name, "desc": "", "ranks": ranks[name]} for name in ranks}
        for entry in dump["entries"]:
            entry["process_group"] = (entry["process_group"][0], "")
        written = folder / f"trace_{rank}"
        written.write_bytes(pickle.dumps(dump))
        written.rename(traces / f"rank_{rank}")  # at once, so that nobody reads half of it


def main(folder: Path, script: str) -> None:
    """Get the instruments ready, then run the script as if it had been started itself."""
    rank = os.environ["RANK"]
    # A dump asks torch for the frames of compiled code, which would first import 800 modules, for seconds
    torch._inductor = None  # pyright: ignore[reportAttributeAccessIssue]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what holds again when Python ends, after faulthandler
    stack = (folder / f"stack_{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    threading.Thread(target=record, args=(folder, rank), daemon=True).start()
    if seconds := os.environ.get("STANDSTILL_TIMEOUT"):  # instead of half an hour, where a script says nothing
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=float(seconds))
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
