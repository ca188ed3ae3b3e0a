"""What went wrong on the ranks, in words: one report, the first cause first, with the learner's own lines."""

import linecache
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from labkit.launch.probe import Collective, Frame, Snapshot
from labkit.launch.rank import RankError
from labkit.launch.watchdog import Silence

_CONSEQUENCES = re.compile(  # what a rank raises when its peer has gone
    "Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Timed out waiting|"
    "monitoredBarrier|NCCL error|Socket Timeout|Application timeout caused pair closure"
)
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "usually the machine ran out of memory, or somebody killed it",
    signal.SIGSEGV: "a crash in C code; the stack is below if Python could write it",
    signal.SIGABRT: "C++ code gave up: ranks that call one collective with different shapes, dtypes or "
    "operations do that. Run it again with strict=True, which names both sides",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGBUS: "usually shared memory (/dev/shm) is full",
    signal.SIGXCPU: "over its limit of CPU time",
}
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python3\.\d+/|/labkit/launch/|^<frozen")
_NOISE = re.compile(
    r"^Extension modules: |^frame #\d+: |^(Current t|T)hread 0x|File \".*(/lib/python3\.\d+/|/labkit/launch/|<frozen)"
)
_CELL_FILE = re.compile(r'"([^"\n]*ipykernel_[^"\n]*\.py)"')
_FAULTHANDLER_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_lab_folders = (os.path.dirname(os.path.dirname(__file__)) + os.sep,)


def add_lab_package(init_file: str) -> None:
    """Count a package's code as the lab's, which a report tells from the learner's; pass the package's ``__file__``."""
    global _lab_folders
    _lab_folders += (os.path.dirname(init_file) + os.sep,)


class RankFailed(RuntimeError):
    """A rank raised or died. The message is the whole report.

    ``rank`` is the rank that failed first; ``cause`` is the exception that it raised, if it could be sent;
    ``tracebacks`` has each failed rank's own traceback as text, for those who want to read more.
    """

    def __init__(self, report: str, rank: int | None = None, cause=None, tracebacks: Mapping[int, str] | None = None):
        super().__init__(report)
        self.rank, self.cause, self.tracebacks = rank, cause, dict(tracebacks or {})

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the report alone. The frames of the launcher help nobody."""
        return f"{type(self).__name__}: {self}".splitlines()


class Deadlock(RankFailed):
    """The ranks wait for each other, or for one that has left, and none can go on."""


@dataclass(frozen=True)
class Death:
    """A rank's process ended without returning."""

    status: int  # as os.wait gives it
    last_words: tuple[str, ...]  # what it wrote to stderr
    seconds: float

    def __str__(self) -> str:
        if not os.WIFSIGNALED(self.status):
            return f"left with exit code {os.waitstatus_to_exitcode(self.status)} without returning (os._exit?)"
        number = os.WTERMSIG(self.status)
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        hint = _SIGNAL_HINTS.get(number)
        if any("collective operation timeout" in line for line in self.last_words):  # NCCL's watchdog
            hint = "its GPU waited timeout_seconds in an operation, named below, that some rank never entered"
        return f"was killed by {name}" + (f": {hint}" if hint else "")


Failure = RankError | Death


def is_consequence(failure: Failure) -> bool:
    """Did this rank fail only because a different rank had left it alone?"""
    return isinstance(failure, RankError) and bool(_CONSEQUENCES.search(failure.text))


def failure_report(failures: Mapping[int, Failure], others: Silence) -> tuple[int, str]:
    """Return the rank that failed first, and the report: its error, and where every other rank was."""
    causes = {rank: failure for rank, failure in failures.items() if not is_consequence(failure)} or failures
    first = min(causes, key=lambda rank: causes[rank].seconds)
    lines = [f"rank {first} of {others.num_ranks} {_what_happened(failures[first])}"]
    for rank in sorted(set(range(others.num_ranks)) - {first}):
        if rank not in failures:
            lines.append(_line_of(rank, others))
        elif rank in causes:
            lines.append(f"  rank {rank}: also {_what_happened(failures[rank]).splitlines()[0]}")
        else:
            lines.append(f"  rank {rank}: lost its connection, a consequence")
    return first, "\n".join(lines)


def deadlock_report(silence: Silence) -> str:
    """Say who waits in which operation, who never came, and the line of each rank."""
    lines = ["no rank can go on."]
    lines += [_missing_at(silence, views) for _, views in sorted(silence.calls().items())]
    lines += _lines(silence)
    if len({(number, group) for group, number, _ in silence.calls()}) < len(silence.calls()):
        lines.append("Different operations meet: every member of a group must call the same ones in the same order.")
    return "\n".join(lines)


def slow_note(silence: Silence, seconds: float) -> str:
    """Say who waits for whom, while a slow rank is left to work."""
    first = f"No news for {seconds:.0f} s; nothing is wrong yet, some ranks wait for others:"
    return "\n".join([first, *_lines(silence)])


def interrupt_report(silence: Silence) -> str:
    """Say where each rank was when the learner stopped it."""
    return "\n".join(["Stopped all ranks. They were:", *_lines(silence)])


def busy_stack(faulthandler_text: str) -> str:
    """Say where a rank is that holds the GIL, from what faulthandler wrote."""
    main = re.split("(?:Current t|T)hread 0x", faulthandler_text)[-1]
    frames = [(file, int(line), function) for file, line, function in re.findall(_FAULTHANDLER_FRAME, main)]
    return "runs C code that holds the GIL, " + _place(frames[::-1]) if frames else "gives no answer"


def _what_happened(failure: Failure) -> str:
    if isinstance(failure, Death):
        words = [line for line in failure.last_words if line and not _NOISE.search(line)][-12:]
        words = [re.sub(_CELL_FILE, lambda match: _file_name(match[1]), line) for line in words]
        return "\n    | ".join([str(failure), *words])
    is_exit = failure.kind == "SystemExit"
    call = f"called sys.exit({failure.text})" if is_exit else f"raised {failure.kind}: {failure.text}"
    learners, labs = _own_frames(failure.frames)
    stack = (learners + labs[-1:])[-8:] or failure.frames[-1:]
    return "\n".join([call, *(f"    at {_describe(frame)}" for frame in stack)])


def _lines(silence: Silence) -> list[str]:
    return [_line_of(rank, silence) for rank in range(silence.num_ranks)]


def _line_of(rank: int, silence: Silence) -> str:
    if rank in silence.returned:
        return f"  rank {rank}: has returned"
    snapshot = silence.snapshots.get(rank)
    if snapshot is None:
        return f"  rank {rank}: {silence.busy_stacks.get(rank, 'gave no answer')}"
    if not silence.is_waiting(rank):
        return f"  rank {rank}: runs {_place(snapshot.stack)}"
    wait = f"  rank {rank}: waits in {_wait_text(snapshot, silence)}"
    if snapshot.purpose:  # which says more than the place inside labkit
        learners, labs = _own_frames(snapshot.stack)
        return f"{wait}\n    {_place(learners or labs)}"
    return f"{wait}, {_place(snapshot.stack)}"


def _wait_text(snapshot: Snapshot, silence: Silence) -> str:
    if call := snapshot.point_to_point:
        way = "to" if call.operation == "send" else "from"
        peer = f"rank {call.peer}" if call.peer is not None else "any rank"
        tag = f", tag {call.tag}" if call.tag and not snapshot.purpose else ""  # labkit's tags say nothing
        purpose = f" for {snapshot.purpose}" if snapshot.purpose else ""
        return f"{call.operation} {way} {peer} ({call.dtype} {list(call.shape)}{tag}){purpose}"
    if snapshot.collectives:
        return " and ".join(_call_text(silence, call) for call in snapshot.collectives[:3])
    if snapshot.set_up:
        ranks = f" of ranks {list(snapshot.set_up.ranks)}" if snapshot.set_up.ranks else ""
        return f"{snapshot.set_up.operation}{ranks}"
    inside = (name for file, _, name in snapshot.stack if "torch/distributed/" in file and name != "wrapper")
    return next(inside, "communication")


def _missing_at(silence: Silence, views: Mapping[int, Collective]) -> str:
    """Say which ranks wait in a collective, and which members of its group are not there."""
    call = next(iter(views.values()))
    missing = [rank for rank in silence.members(call.group) if rank not in views]
    returned = [rank for rank in missing if rank in silence.returned]
    never = [rank for rank in missing if rank not in silence.returned]
    text = f"  {_call_text(silence, call)}: {_ranks(sorted(views), 'waits', 'wait')}"
    if never:
        text += f"; {_ranks(never, 'never came', 'never came')}"
    if returned:
        text += f"; {_ranks(returned, 'has returned', 'have returned')} without it"
    return text


def _call_text(silence: Silence, call: Collective) -> str:
    tensors = f" ({call.dtypes} {call.shapes})" if call.shapes else ""
    description, ranks = silence.groups.get(call.group, ("", ()))
    if description in ("", "default_pg", "undefined"):
        description = "a group" if description == "undefined" else "the world"
    members = str(list(ranks)) if len(ranks) <= 16 else f"{len(ranks)} ranks"
    group = description if members in description else f"{description} {members}"
    return f"{call.operation} number {call.number}{tensors} of {group}"


def _ranks(ranks: list[int], one: str, many: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks[:16]))}{', ...' if len(ranks) > 16 else ''} {many}"


def _own_frames(frames: Iterable[Frame]) -> tuple[list[Frame], list[Frame]]:
    """Return the frames of the learner's code, and those of the lab further in, without torch's and Python's."""
    own = [frame for frame in frames if is_cell(frame[0]) or not _LIBRARY.search(frame[0])]
    learners = [frame for frame in own if not frame[0].startswith(_lab_folders)]
    return learners, own[len(own) - own[::-1].index(learners[-1]) :] if learners else own


def _place(frames: Iterable[Frame]) -> str:
    """Say the learner's innermost line and, if it calls a function of the lab's, where in there."""
    learners, labs = _own_frames(frames)
    places = [f"at {_describe(frame)}" for frame in learners[-1:]]
    places += [f"in {_describe(frame, source=not learners)}" for frame in labs[-1:]]
    return ", ".join(places) or "outside your code"


def _describe(frame: Frame, source: bool = True) -> str:
    filename, line, function = frame
    text = linecache.getline(filename, line).strip() if source else ""
    where = f"{_file_name(filename)}, line {line}" + ("" if function == "<module>" else f", in {function}")
    return f"{where}:  {text}" if text else where


def is_cell(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith("<ipython-input")


def _file_name(filename: str) -> str:
    """Return ``Cell In[3]`` for a cell, a short path for a file."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    compiler = getattr(get_ipython(), "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(filename)
    if number is not None:
        return f"Cell In[{number}]"
    here = os.path.relpath(filename)
    return here if not here.startswith("..") else filename
