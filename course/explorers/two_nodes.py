"""A run on two "nodes" of this machine, each a torchrun with its ranks, and a button that kills one of them."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from threading import Timer
from typing import Any

import ipywidgets as widgets
from IPython.display import display
from torch._C._distributed_c10d import TCPStore

import labkit.train
from course.explorers.live_losses import LiveLosses
from labkit.launch.client import will_train

MOST_SECONDS = 240
START = "import torch._dynamo, labkit.train; from torch.distributed.run import main; main()"
"""Torchrun, which forks its ranks from a process that has imported what they need: that saves seconds for each."""
MEETING = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=6"
"""The ranks' addresses are kept elsewhere, so either node may die. It counts as dead after 2 s without a sign of life,
and after 6 s more nobody waits for a second node."""

will_train()


class TwoNodes:
    """A finished run of `labkit.train`, with ``num_ranks`` on each of two nodes until one has died.

    ``losses`` has a list of (step, loss) for each start of the ranks, ``said`` each line that announced one, and
    ``exit_codes`` those of the two nodes.

    The cell shows the losses as they come, and a button that kills the second node: its torchrun and its ranks. If
    nobody has clicked by step ``dies_after``, the cell does so itself. Whatever happens, neither a process nor the
    folder of the checkpoints is left.
    """

    def __init__(self, options: str, dies_after: int, num_ranks: int = 4):
        self.losses: list[list[tuple[int, float]]] = []
        self.said: list[str] = []
        self._nodes: list[subprocess.Popen] = []
        button = widgets.Button(description="Kill node 1", icon="bolt", button_style="danger")
        button.on_click(lambda _: self._kill(1))
        lines: list[str] = []
        with ExitStack() as stack:
            stack.callback(button.close)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            read = stack.enter_context(self._started(f"{options} --resume --checkpoint-dir {folder}", num_ranks))
            timer = Timer(MOST_SECONDS, self._end)
            timer.start()
            stack.callback(timer.cancel)
            display(button, exclude=["text/plain"])
            picture = stack.enter_context(LiveLosses(int(re.findall(r"--steps (\d+)", options)[-1])))
            for line in read:
                lines.append(line)
                self._note(line, picture)
                if self.losses and self.losses[-1] and self.losses[-1][-1][0] >= dies_after:
                    self._kill(1)
        self.exit_codes = [node.returncode for node in self._nodes]
        if self.exit_codes[0]:
            raise RuntimeError("the run ended before its last step:\n" + "".join(lines[-30:]))

    def __repr__(self) -> str:
        steps = " and ".join(f"{each[0][0]} to {each[-1][0]}" for each in self.losses if each)
        return f"a run of steps {steps}"

    @contextmanager
    def _started(self, options: str, num_ranks: int) -> Iterator[Iterator[str]]:
        """Start both nodes, and yield the lines that they print; in the end, end all that is left of them."""
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        meeting = f"--rdzv-backend c10d --rdzv-id lab --rdzv-endpoint localhost:{store.port} --rdzv-conf {MEETING}"
        meeting += f" --local-addr localhost --nnodes 1:2 --nproc-per-node {num_ranks} --max-restarts 2"
        train = Path(labkit.train.__file__).with_name("__main__.py")
        command = f"{meeting} --run-path --start-method fork {train} {options} --log-interval 1"
        command = [sys.executable, "-c", START, *command.split()]
        outside = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC")
        environment = {name: value for name, value in os.environ.items() if not outside.match(name)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        end, start = os.pipe()
        try:
            for _ in range(2):  # in sessions of their own: the stop button is meant for the cell
                look = dict[str, Any](stdout=start, stderr=start, env=environment, start_new_session=True)
                self._nodes.append(subprocess.Popen(command, **look))
            os.close(start)
            with os.fdopen(end, errors="replace") as lines:
                yield lines
        finally:
            self._end()

    def _note(self, line: str, picture: LiveLosses) -> None:
        if re.match(r"\d+ ranks? \(", line):
            self.said.append(line.split(";")[0])
            done = dict(pair for each in self.losses for pair in each)
            self.losses.append([])
            self._known = [done[step] for step in sorted(done)]
        elif found := re.match(r"step (\d+)/\d+: loss ([\d.]+)", line):
            step, loss = int(found[1]), float(found[2])
            before = [] if self.losses[-1] else self._known[: step - 1]  # that the checkpoint stands for
            self.losses[-1].append((step, loss))
            picture.add(self.said[-1], *before, loss)

    def _kill(self, number: int) -> None:
        """Kill a node at once, as if its power had gone."""
        node = self._nodes[number]
        for process in (node.pid, *_children(node.pid)) if node.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(process, SIGKILL)

    def _end(self) -> None:
        for number, node in enumerate(self._nodes):
            self._kill(number)
            node.wait()


def _children(process: int) -> list[int]:
    """Return the processes that this one has started, and those that they have."""
    with suppress(OSError):
        own = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        return [each for child in own for each in (child, *_children(child))]
    return []
