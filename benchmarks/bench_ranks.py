"""Cells on four ranks in a real kernel, and what is left after a fault: `%%ranks` against others that do it.

The peers are measured where they are installed: `PEERS_PYTHON=/somewhere/bin/python make bench` names the Python of an
environment that has them beside torch and ipykernel. A row tells of labkit and of the peer whether the names of earlier
cells were kept, and whether the next cell worked, if need be after the stop button. A peer's time is missing where its
cell had not ended after 20 seconds.
"""

import contextlib
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tools.kernel import Kernel

PATIENCE_SECONDS = 20.0
JOIN = "import torch, torch.distributed as dist\ndist.init_process_group('gloo'{how})\nrank = dist.get_rank()"


@dataclass(frozen=True)
class Tool:
    name: str
    needs: str  # the module of it
    start: tuple[str, ...]  # cells that make four ranks, which have joined
    magic: str = ""  # first line of a cell that runs on all of them
    module: str = "ipykernel_launcher"  # of the kernel
    environment: tuple[tuple[str, str], ...] = ()
    interrupt_mode: str = "signal"


LABKIT = Tool("labkit", "course.ranks", ("from course.ranks import ranks", "%%ranks 4\nrank"), "%%ranks\n")
PEERS = (
    Tool(
        "jupyter-distributed",
        "jupyter_distributed",
        (JOIN.format(how=""),),
        module="jupyter_distributed.kernel",
        environment=(("JUPYTER_DISTRIBUTED_BASE_KERNEL", "python3"), ("JUPYTER_DISTRIBUTED_WORLD_SIZE", "4")),
        interrupt_mode="message",
    ),
    Tool(
        "ipyparallel",
        "ipyparallel",
        (
            "import ipyparallel; every = ipyparallel.Cluster(n=4, log_level=40).start_and_connect_sync()[:]",
            "every.scatter('place', range(4), flatten=True); every['file'] = __import__('tempfile').mktemp()",
            "%%px\n" + JOIN.format(how=", init_method=f'file://{file}', rank=place, world_size=4"),
        ),
        "%%px\n",
    ),
    Tool("nbdistributed", "nbdistributed", ("%load_ext nbdistributed", "%dist_init -n 4"), "%%distributed\n"),
)
FAULTS = {
    "a typo on all": "x + mistyped",
    "rank 2 raises beside a collective": "if rank == 2: 1 / 0\ndist.barrier()",
    "rank 1 is killed": "import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
    "a rank skips a collective": "if rank != 3: dist.barrier()",
    "each rank receives from the next": "dist.recv(torch.ones(1), (rank + 1) % 4)",
    "the stop button": "import time\ntime.sleep(600)",
    "the stop button, beside a barrier": "import time\nif rank == 0: time.sleep(600)\ndist.barrier()",
}


MARK = "LABKIT_BENCH_RANKS"  # in the environment of all that a notebook starts


class Notebook(Kernel):
    """A kernel in which a tool's four ranks live."""

    def __init__(self, tool: Tool, python: str, folder: str):
        self.tool, kernel_folder = tool, Path(folder, "kernels", "python3")
        kernel_folder.mkdir(parents=True, exist_ok=True)
        argv = [python, "-m", tool.module, "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": tool.name, "language": "python", "interrupt_mode": tool.interrupt_mode}
        (kernel_folder / "kernel.json").write_text(json.dumps(spec))
        self.mark = folder
        environment = {MARK: folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()}
        environment["PATH"] = f"{Path(python).parent}:{os.environ['PATH']}"  # nbdistributed starts "python"
        specs = KernelSpecManager(kernel_dirs=[str(kernel_folder.parent)])
        self.manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs)
        self.manager.start_kernel(env={**os.environ, **environment, **dict(tool.environment)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def starts(self) -> bool:
        """Start the ranks. Return whether a first cell works, at the third attempt at the latest."""
        for cell in self.tool.start:
            ran = self.run(cell)
            assert not ran.error, ran
        cell = "dist.barrier(); print(f'works {rank}')"
        return any("works 3" in self.on_ranks(cell, patience=60)[1] for _ in range(3))

    def close(self) -> None:
        """End the kernel, and the ranks that it leaves behind: some tools' have left its process group."""
        super().close()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    process.kill()

    def on_ranks(self, code: str, press_stop: bool = False, patience: float = PATIENCE_SECONDS) -> tuple[float, str]:
        """Run a cell on the ranks. Return its seconds, nan if it does not end, and what it showed."""
        message, start = self.start(f"{self.tool.magic}{code}"), time.monotonic()
        if press_stop:
            time.sleep(2)
            start = time.monotonic()
            self.manager.interrupt_kernel()
        shown = ""
        while time.monotonic() - start < patience:
            with contextlib.suppress(queue.Empty):
                answer = self.client.get_iopub_msg(timeout=0.1)
                if answer["parent_header"].get("msg_id") == message:
                    shown += json.dumps(answer["content"], default=str)  # each tool shows it in its own way
                    if answer["content"].get("execution_state") == "idle":
                        return time.monotonic() - start, shown
        self.manager.interrupt_kernel()
        return math.nan, shown

    def after(self, fault: str) -> tuple[float, bool, bool]:
        """Return the seconds until a fault is reported, and whether names were kept and the next cell works."""
        self.on_ranks("x = 6 * 7")
        seconds, _ = self.on_ranks(FAULTS[fault], press_stop=fault.startswith("the stop button"))
        self.on_ranks("0")  # where the cell did not end, or all ranks are new
        _, shown = self.on_ranks("dist.barrier(); print(f'works {globals().get(\"x\")}')")
        return seconds, "works 42" in shown, "works 42" in shown or "works None" in shown


def rows() -> Iterator[tuple[str, float, float]]:
    python = os.environ.get("PEERS_PYTHON", sys.executable)
    is_there = [
        subprocess.run([python, "-c", f"import {peer.needs}"], capture_output=True).returncode for peer in PEERS
    ]
    peers = [peer for peer, missing in zip(PEERS, is_there) if not missing]
    ours = _measured(LABKIT, sys.executable)
    for peer in peers or [None]:
        theirs = _measured(peer, python) if peer else {}
        for what, (seconds, kept, works) in ours.items():
            their_seconds, they_kept, their_next = theirs.get(what, (math.nan, None, None))
            said = f"{what}, against {peer.name if peer else 'nobody: no peer is installed'}"
            if what in FAULTS:
                said += f"; names {_yes(kept)}{_yes(they_kept)}, next cell {_yes(works)}{_yes(their_next)}"
            yield said, seconds, their_seconds


def _yes(value: bool | None) -> str:
    return {True: "+", False: "-", None: ""}[value]


def _measured(tool: Tool, python: str) -> dict[str, tuple[float, bool, bool]]:
    """Return what was measured -> seconds, names kept, next cell works. Each fault meets a kernel of its own."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            start = time.monotonic()
            notebook = Notebook(tool, python, folder)
            try:
                if not notebook.starts():
                    continue  # a peer may need luck on a slow machine
                measured.setdefault("kernel, 4 ranks, first cell", (time.monotonic() - start, True, True))
                if "a cell, warm" not in measured:
                    warm = [notebook.on_ranks("dist.barrier()")[0] for _ in range(6)][1:]
                    measured["a cell, warm"] = statistics.median(warm), True, True
                measured[fault] = notebook.after(fault)
            finally:
                notebook.close()
    return measured
