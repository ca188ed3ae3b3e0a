"""Runs a script on ranks under torchrun, and looks at it every two seconds.

A job stands still if two looks, one after the other, show the same: the same lines, the same number of collectives, and
no new word in any log. A look counts only if every rank that still runs has answered: on a busy machine that takes a
while, and silence says nothing. Whatever happens, no process and no file is left.
"""

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

WATCHED = Path(__file__).with_name("watched.py")
PATIENCE = 2.0  # seconds from when all ranks have begun to the first look, and from look to look
ANSWER = 20.0  # seconds that ranks may take to answer
LONGEST = 180.0  # seconds that ranks may take to begin, and then a job that is slow, and does not stand still
SORTED = """
import os
from torch.distributed.flight_recorder.components.types import MatchInfo
from torch.distributed.flight_recorder.fr_trace import main
walk = os.walk
os.walk = lambda path: [(root, folders, sorted(files)) for root, folders, files in walk(path)]
MatchInfo.__hash__ = lambda self: 0
main()
"""
"""torchfrtrace, but for two orders. It takes the first file for right, and a folder has any order. It prints a set of
(rank, MatchInfo), and a MatchInfo's own hash is its address."""
ENDS = {
    "ended": "It ended by itself.",
    "failed": "It failed: at least one rank ended with an error.",
    "stuck": "It stood still: two looks, at least two seconds apart, showed the same. We ended it.",
}
OURS = re.compile(r'^(\[rank\d+\]: )?  File "[^"]*(watched\.py"|<frozen runpy>").*\n(\1    .*\n)*', re.MULTILINE)


@dataclass(frozen=True)
class Look:
    """What one look at a job shows, by rank: its stack, how many calls Flight Recorder has noted, letters printed.

    A rank that has ended has no stack and no calls.
    """

    stacks: Mapping[int, str]
    num_calls: Mapping[int, int]
    num_printed: Mapping[int, int]
    traces: Path = field(compare=False)


@dataclass(frozen=True)
class Job:
    """What is left of a job: how it ended, what its ranks printed, what each look showed, and the last one's analysis.

    Its status is "ended", "failed", or "stuck", where we had to end it.
    """

    status: str
    seconds: float
    logs: Mapping[int, str]
    torchrun: str
    looks: tuple[Look, ...]
    analysis: str

    def __str__(self) -> str:
        lines = [ENDS[self.status]]
        for rank, log in self.logs.items():
            lines += [f"rank {rank} | {line}" for line in log.splitlines()] or [f"rank {rank} |"]
        return "\n".join(lines)

    def evidence(self) -> str:
        """Return all that there is to read: the logs, where ranks stand, how many calls they made, and the analysis."""
        calls = [list(look.num_calls.values()) for look in self.looks[-2:]]
        parts = (str(self), self.where(), f"calls by rank, at the last two looks: {calls}", self.analysis.strip())
        return "\n\n".join(filter(None, parts))

    def where(self) -> str:
        """Return, for each rank, the lines of the script that it was in at the last look, the innermost first."""
        lines = []
        for rank in self.logs if self.looks else ():
            stack = self.looks[-1].stacks.get(rank, "")
            frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)
            own = [f"{name}:{line} in {function}" for name, line, function in frames if "/" not in name]
            called = [function for name, _, function in frames if name.endswith("distributed_c10d.py")]
            lines.append(f"rank {rank}  {', '.join(own) or 'has ended'}{': ' + called[-1] if called else ''}")
        return "\n".join(lines)


def run(name: str, source: str, num_ranks: int, detail: bool = False) -> Job:
    """Run the ``source`` of a script on ``num_ranks`` ranks.

    With ``detail`` PyTorch compares what ranks call, and waits ten seconds for each, not half an hour.
    """
    with tempfile.TemporaryDirectory(prefix="standstill_") as name_of_folder:
        folder = Path(name_of_folder)
        script = folder / f"{name}.py"
        script.write_text(source)
        start = time.monotonic()
        process = _start(script, num_ranks, detail)
        try:
            status, looks = _watch(process, folder, num_ranks)
            seconds = time.monotonic() - start
            printed = (folder / "torchrun").read_text()
            logs = {rank: _tidy(_log(folder, rank), folder) for rank in range(num_ranks)}
        finally:
            _end(process, folder)
        analysis = _tidy(_analysis(looks[-1].traces), folder) if looks else ""
    return Job(status, seconds, logs, printed, looks, analysis)


def _start(script: Path, num_ranks: int, detail: bool) -> subprocess.Popen:
    folder = script.parent
    options = ["--standalone", "--nproc-per-node", num_ranks, "--redirects", 3, "--log-dir", folder / "logs"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, WATCHED, folder, script]
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    if detail:
        variables |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "STANDSTILL_TIMEOUT": "10"}
    with (folder / "torchrun").open("w") as said:
        return subprocess.Popen(
            list(map(str, command)), stdout=said, stderr=said, env=os.environ | variables, start_new_session=True
        )


def _watch(process: subprocess.Popen, folder: Path, num_ranks: int) -> tuple[str, tuple[Look, ...]]:
    began = [folder / f"pid_{rank}" for rank in range(num_ranks)]
    _wait(process, LONGEST, lambda: all(path.exists() for path in began))
    looks: list[Look] = []
    end = time.monotonic() + LONGEST
    pause = PATIENCE
    for number in itertools.count(1):
        if _wait(process, pause):
            break
        start = time.monotonic()
        look = _look(folder, number)
        pause = max(PATIENCE, 2 * (time.monotonic() - start))  # where answers take long, so does a step
        looks += [look] if look else []
        # where a rank has ended, torchrun may be about to end the others, which takes a while on a busy machine
        needed = 2 if look and len(look.stacks) == num_ranks else 5
        stands_still = look and looks[-needed:] == [look] * needed
        if process.poll() is None and (stands_still or time.monotonic() > end):
            return "stuck", tuple(looks)
    return "failed" if process.returncode else "ended", tuple(looks)


def _wait(process: subprocess.Popen, seconds: float, is_there: Callable[[], bool] = lambda: False) -> bool:
    """Return whether a job has ended; wait at most so long, and no longer than until something ``is_there``."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end and not is_there():
        time.sleep(0.05)
    return process.poll() is not None


def _look(folder: Path, number: int) -> Look | None:
    """Return what all ranks that run answer, or None if one of them ends or says nothing."""
    ranks = {rank: pid for rank, pid in _pids(folder).items() if _runs(pid)}
    files = {rank: folder / f"stack_{rank}" for rank in ranks}
    before = {rank: path.stat().st_size for rank, path in files.items()}
    for pid in ranks.values():
        _send(pid, signal.SIGUSR1)
    traces = folder / f"traces_{number}"
    traces.mkdir()

    def has_answered(rank: int) -> bool:
        """The outermost frame comes last; a rank that is just ending has none."""
        return (traces / f"rank_{rank}").exists() and "watched.py" in files[rank].read_text()[before[rank] :]

    end = time.monotonic() + ANSWER
    while not all(map(has_answered, ranks)):
        if time.monotonic() > end or not all(map(_runs, ranks.values())):
            return None
        time.sleep(0.05)
    stacks = {rank: _tidy(path.read_text()[before[rank] :], folder) for rank, path in files.items()}
    calls = {rank: _num_calls(traces / f"rank_{rank}") for rank in ranks}
    return Look(stacks, calls, {rank: len(_log(folder, rank)) for rank in _pids(folder)}, traces)


def _num_calls(trace: Path) -> int:
    return len(pickle.loads(trace.read_bytes())["entries"])


def _analysis(traces: Path) -> str:
    options = ["--allow-incomplete-ranks", "--print_stack_trace", "--prefix", "rank_"]
    done = subprocess.run([sys.executable, "-c", SORTED, traces, *options], capture_output=True, text=True)
    return (done.stdout + done.stderr).replace("tabulate is not installed. Proceeding without it.\n", "")


def _log(folder: Path, rank: int) -> str:
    logs = sorted((folder / "logs").glob(f"*/attempt_0/{rank}/std*.log"))
    return "".join(path.read_text() for path in reversed(logs))  # what it printed, then its errors


def _tidy(text: str, folder: Path) -> str:
    """Return a text without the frames of what started the script, and with short names of files."""
    text = OURS.sub("", text).replace(f"{folder}/", "")
    text = re.sub(r"^\S+ at (<frozen runpy>|\S*watched\.py):\d+\n", "", text, flags=re.MULTILINE)
    return re.sub(r"[^\s\"]*/site-packages/", "", text)


def _pids(folder: Path) -> dict[int, int]:
    """Return the PIDs of all ranks that have begun, by rank."""
    said = {int(path.name.removeprefix("pid_")): path.read_text() for path in sorted(folder.glob("pid_*"))}
    return {rank: int(text) for rank, text in said.items() if text}


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end(process: subprocess.Popen, folder: Path) -> None:
    process.kill()  # first, or it would report the ranks that we end
    process.wait()
    for pid in _pids(folder).values():
        _send(pid, signal.SIGKILL)
