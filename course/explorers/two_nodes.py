"""A run on two "nodes" of this machine, each a torchrun with its ranks, and a button that kills one of them."""

import atexit
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from threading import Thread, Timer
from typing import Any

import ipywidgets as widgets
from torch._C._distributed_c10d import TCPStore

import labtrain
from course.explorers.live_losses import SECONDS_BETWEEN_DRAWINGS
from course.pictures.curves import draw_losses
from course.pictures.painter import Plot
from labkit.launch.client import will_train

MOST_SECONDS = 240
START = "import torch._dynamo, labtrain; from torch.distributed.run import main; main()"
"""Torchrun, which forks its ranks from a process that has imported what they need: that saves seconds for each."""
MEETING = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=6"
"""The ranks' addresses are kept elsewhere, so either node may die. It counts as dead after 2 s without a sign of life,
and after 6 s more nobody waits for a second node."""

will_train()


class TwoNodes(widgets.VBox):
    """A run of `labtrain`, with ``num_ranks`` on each of two nodes until one has died: its losses, and a button.

    The button kills the second node: its torchrun and its ranks. If nobody has clicked by step ``dies_after``, it dies
    all the same. When the run is over, ``losses`` has a list of (step, loss) for each start of the ranks, ``said`` the
    line that announced it, and ``exit_codes`` those of the two nodes. Whatever happens, neither a process nor the
    folder of the checkpoints is left.
    """

    _last: "TwoNodes | None" = None

    def __init__(self, options: str, dies_after: int, num_ranks: int = 4):
        if TwoNodes._last is not None:  # the cell runs once more
            TwoNodes._last.close()
        TwoNodes._last = self
        self.losses: list[list[tuple[int, float]]] = []
        self.said: list[str] = []
        self._nodes: list[subprocess.Popen] = []
        self._lines: list[str] = []
        self._is_closed = False
        self._num_steps, self._dies_after = int(re.findall(r"--steps (\d+)", options)[-1]), dies_after
        self.button = widgets.Button(description="Kill node 1", icon="bolt", button_style="danger")
        self.button.on_click(lambda _: self._kill(1))
        self.curves = widgets.HTML("Starting two torchruns, and with them eight ranks ...")
        super().__init__([self.button, self.curves])
        atexit.register(self.close)
        # In its own thread: the kernel stays free for the click.
        self._thread = Thread(target=self._run, args=(options, num_ranks), daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"two torchruns, one of which dies after step {self._dies_after} at the latest"

    def finished(self) -> Plot:
        """Wait for the end of the run, and return its curves; if interrupted meanwhile, end it.

        Raises:
            RuntimeError: the run ended before its last step; says what it printed last.
        """
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.close()
            raise
        if any(self.exit_codes[:1]):
            raise RuntimeError("the run ended before its last step:\n" + "".join(self._lines[-30:]))
        return self._plot()

    @property
    def exit_codes(self) -> list[int | None]:
        return [node.returncode for node in self._nodes]

    def close(self) -> None:
        """End what is left of the run."""
        self._is_closed = True
        self._end()
        self._thread.join()
        super().close()

    def _run(self, options: str, num_ranks: int) -> None:
        drawn = 0.0
        with tempfile.TemporaryDirectory() as folder, self._started(options, folder, num_ranks) as lines:
            for line in lines:
                self._lines.append(line)
                self._note(line)
                if self.losses and self.losses[-1] and self.losses[-1][-1][0] >= self._dies_after:
                    self._kill(1)
                if self.losses and time.monotonic() - drawn > SECONDS_BETWEEN_DRAWINGS:
                    self.curves.value, drawn = self._plot().html(), time.monotonic()
        self.curves.value, self.button.disabled = self._plot().html(), True
        atexit.unregister(self.close)

    @contextmanager
    def _started(self, options: str, folder: str, num_ranks: int) -> Iterator[Iterator[str]]:
        """Start both nodes, and yield the lines that they print; in the end, end all that is left of them."""
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        meeting = f"--rdzv-backend c10d --rdzv-id lab --rdzv-endpoint localhost:{store.port} --rdzv-conf {MEETING}"
        meeting += f" --local-addr localhost --nnodes 1:2 --nproc-per-node {num_ranks} --max-restarts 2"
        train = Path(labtrain.__file__).with_name("__main__.py")
        command = f"{meeting} --run-path --start-method fork {train} {options} --log-interval 1 --resume"
        command = [sys.executable, "-c", START, *command.split(), "--checkpoint-dir", folder]
        outside = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|TORCHELASTIC")
        environment = {name: value for name, value in os.environ.items() if not outside.match(name)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        end, start = os.pipe()
        timer = Timer(MOST_SECONDS, self._end)
        timer.start()
        try:
            for _ in range(2):  # in sessions of their own: the stop button is meant for the cell
                look = dict[str, Any](stdout=start, stderr=start, env=environment, start_new_session=True)
                self._nodes.append(subprocess.Popen(command, **look))
            if self._is_closed:
                self._end()
            os.close(start)
            with os.fdopen(end, errors="replace") as lines:
                yield lines
        finally:
            timer.cancel()
            self._end()

    def _note(self, line: str) -> None:
        if re.match(r"\d+ ranks? \(", line):
            said = line.split(";")[0]
            if self.losses[-1:] != [[]] or said != self.said[-1]:  # not the other node's line on the same start
                self.said.append(said)
                self.losses.append([])
        elif found := re.match(r"step (\d+)/\d+: loss ([\d.]+)", line):
            self.losses[-1].append((int(found[1]), float(found[2])))

    def _plot(self) -> Plot:
        """Draw each start's losses, from the step that it began with."""
        curves = {}
        for name, losses in zip(self.said, self.losses):
            num_before = losses[0][0] - 1 if losses else 0
            curves[name] = [math.nan] * num_before + [loss for _, loss in losses]
        return draw_losses(curves, num_steps=self._num_steps)

    def _kill(self, number: int) -> None:
        """Kill a node at once, as if its power had gone."""
        node = self._nodes[number]
        if node.poll() is None:
            node.send_signal(SIGSTOP)  # it starts no more ranks while we look for them
            for process in (*_children(node.pid), node.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, SIGKILL)

    def _end(self) -> None:
        for number, node in enumerate(self._nodes):
            self._kill(number)
            node.wait()


def _children(process: int) -> list[int]:
    """Return the processes that this one has started, and those that they have."""
    own = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == process:
                own.append(int(stat.parent.name))
    return [each for child in own for each in (child, *_children(child))]
