"""Says what went wrong on the ranks: one report, the first cause first, with the learner's own
lines.
"""

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence

from labkit.launch.frames import LAUNCHER, describe, frames_of, location, short_name, user_frames
from labkit.launch.probe import Collective, Snapshot, Standing, Thread
from labkit.launch.rank import Failure
from labkit.launch.watchdog import Look
from labkit.waiting import NO_RANK_CAN_GO_ON, SOME_HAVE_LEFT, who_is_where, with_states

# Gloo, and the store where groups are made
_GAVE_UP = "Timed out waiting|Timeout waiting for key|Wait timeout"
_CONSEQUENCES = re.compile(  # what a rank raises when its peer has gone
    "Connection closed by peer|Connection reset by peer|Connection refused|"
    "Broken pipe|Connection was likely closed|"
    "monitoredBarrier|NCCL error|is setting up NCCL communicator|Socket Timeout|"
    f"Application timeout caused pair closure|{_GAVE_UP}"
)
_LABKIT = os.path.dirname(LAUNCHER.rstrip(os.sep)) + os.sep
_MOST_LINES = 8
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "usually the machine ran out of memory, or somebody killed it",
    signal.SIGSEGV: "a crash in C code; the stack is below if Python could write it",
    signal.SIGABRT: "C++ code gave up: ranks that call one collective with different shapes, "
    "dtypes or operations do that. Run it again with strict=True, which names both sides",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGBUS: "usually shared memory (/dev/shm) is full",
    signal.SIGXCPU: "over its limit of CPU time",
}
_NOISE = re.compile(
    r"^Extension modules: |^frame #\d+: |^(Current t|T)hread 0x|"
    r"File \".*(/lib/python3\.\d+/|/labkit/launch/|<frozen)"
)
_CELL_FILE = re.compile(r'"([^"\n]*ipykernel_[^"\n]*\.py)"')


class RankFailed(RuntimeError):
    """A rank raised or died. The message is the whole report.

    ``rank`` failed first; ``cause`` is the exception that it raised, if it could be sent;
    ``tracebacks`` has the text of each failed rank's own traceback.
    """

    def __init__(
        self,
        report: str,
        rank: int | None = None,
        cause=None,
        tracebacks: Mapping[int, str] | None = None,
    ):
        super().__init__(report)
        self.rank = rank
        self.cause = cause
        self.tracebacks = dict(tracebacks or {})

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the report alone, without the launcher's frames."""
        return f"{type(self).__name__}: {self}".splitlines()


class Deadlock(RankFailed):
    """The ranks wait for each other, or for one that has left, and none can go on."""


def death(status: int, last_words: Sequence[str]) -> Failure:
    """Describe the end of a process that has not returned: its status from os.wait, and what it
    wrote to stderr.
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        hint = _SIGNAL_HINTS.get(number)
        if any("collective operation timeout" in line for line in last_words):  # NCCL's watchdog
            hint = (
                "its GPU waited timeout_seconds in an operation, named below, that some rank "
                "never entered"
            )
        text = f"was killed by {name}"
        if hint:
            text += f": {hint}"
    else:
        code = os.waitstatus_to_exitcode(status)
        text = f"left with exit code {code} without returning (os._exit?)"
    words = [line for line in last_words if line and not _NOISE.search(line)][-12:]
    text = _CELL_FILE.sub(lambda match: short_name(match[1]), "\n    | ".join([text, *words]))
    return Failure("", text, (), "", time.monotonic(), b"")


def is_consequence(failure: Failure) -> bool:
    """Did this rank fail only because a different rank had left it alone?"""
    if not failure.kind or not _CONSEQUENCES.search(failure.text):
        return False
    if failure.kind.startswith("Dist"):
        return True
    innermost = failure.frames[-1][0] if failure.frames else ""
    # It is labkit's where labkit itself waits for a message.
    return "/torch/" in innermost or innermost.startswith(_LABKIT)


def failure_report(failures: Mapping[int, Failure], others: Look) -> tuple[int, str]:
    """Return the rank to blame, and the report: its error, and where every other rank was.

    To blame is the lowest of those that failed as the first did, so that a report is the same each
    time. Where all gave up waiting, it is one that never came.
    """
    causes = {rank: failure for rank, failure in failures.items() if not is_consequence(failure)}
    everybody = set(range(others.num_ranks))
    waiting = set(filter(others.is_waiting, everybody))
    missing = everybody - waiting - failures.keys() - others.returned
    answered = missing & others.snapshots.keys()
    if answered:  # one that gives no answer may have come: perhaps it waits for a core
        missing = answered
    if causes or not missing:
        causes = causes or dict(failures)
        happened = _what_happened(min(causes.values(), key=lambda failure: failure.seconds))
        first = min(rank for rank, failure in causes.items() if _what_happened(failure) == happened)
    else:
        first = min(missing)
        happened = f"did not come where others waited: it {_state(first, others)}"
    lines = [f"rank {first} of {others.num_ranks} {happened}"]
    for rank in sorted(everybody - {first}):
        if rank not in failures:
            text = _state(rank, others)
        elif rank in causes:
            said = _what_happened(failures[rank]).splitlines()[0]
            text = "the same" if f" {said}\n" in lines[0] else f"also {said[:200]}"
        elif first in missing and re.search(_GAVE_UP, failures[rank].text):
            text = f"gave up after timeout_seconds, {location(failures[rank].frames)}"
        else:
            text = "lost its connection, a consequence"
        lines.append(f"  rank {rank}: {text}")
    return first, "\n".join(lines)


def deadlock_report(look: Look) -> str:
    """Say who waits in which operation, who never came, and the line of each rank."""
    calls = look.calls()
    why = [NO_RANK_CAN_GO_ON, *(_missing_at(look, calls[key]) for key in sorted(calls))]
    why += _missing_at_first_use(look.standing(), look)
    lines = [locations_report("\n".join(why), look)]
    if len({(number, group) for group, number, _ in calls}) < len(calls):
        rule = "every member of a group must call the same ones in the same order"
        lines.append(f"Different operations meet: {rule}.")
    elif any(look.left(call) for views in calls.values() for call in views.values()):
        lines.append(SOME_HAVE_LEFT)
    return "\n".join(lines)


def overdue_report(overdue: Sequence[tuple[int, Standing]], look: Look) -> str:
    """Say which ranks stood in a call of NCCL's for too long, and which members of its group are
    not there.
    """
    seconds = min(call.limit_seconds for _, call in overdue)
    why = (
        f"the launcher ended this call: ranks stood in it for {seconds:g} s (timeout_seconds), "
        "which NCCL lets them do."
    )
    return locations_report("\n".join([why, *_missing_at_first_use(overdue, look)]), look)


def _missing_at_first_use(standing: Sequence[tuple[int, Standing]], look: Look) -> list[str]:
    """Say who waits in calls that no recorder has: before it notes one, NCCL waits for all members
    of a group.
    """
    lines = []
    unrecorded = [call for rank, call in standing if not look.snapshots[rank].collectives]
    for text, ranks in dict.fromkeys((call.text, call.ranks) for call in unrecorded if call.ranks):
        there = sorted(rank for rank, call in look.standing() if call.text == text)
        returned = [rank for rank in ranks if rank in look.returned]
        never = [rank for rank in ranks if rank not in there and rank not in returned]
        lines.append(who_is_where(text, there, never=never, returned=returned))
    return lines


def locations_report(why: str, look: Look) -> str:
    """Say where the ranks are, each location once, and first why that is said."""
    return with_states(why, [_state(rank, look) for rank in range(look.num_ranks)])


def _what_happened(failure: Failure) -> str:
    if not failure.kind:
        return failure.text
    call = f"raised {failure.kind}: {failure.text}"
    if failure.kind == "SystemExit":
        call = f"called sys.exit({failure.text})"
    learners, labs = user_frames(failure.frames)
    frames = learners + labs[-1:] or failure.frames[-1:]
    stack = [f"    at {describe(frame)}" for frame in frames]
    if len(stack) > _MOST_LINES:  # a recursion, say
        stack[2 : 4 - _MOST_LINES] = [f"    ... {len(stack) - _MOST_LINES + 2} calls more"]
    return "\n".join([call, *stack])


def _state(rank: int, look: Look) -> str:
    """Say where a rank is: its main thread, and the threads that the learner's code has started."""
    snapshot = look.snapshots.get(rank)
    if snapshot is None and rank in look.returned:
        return "has returned"
    if snapshot is None:
        frames = frames_of(look.stacks.get(rank, ""))
        if not frames:
            return "gives no answer"
        return f"holds the GIL in C code, or waits for a core, {location(frames)}"
    main, *others = (_thread_text(thread, snapshot) for thread in snapshot.threads)
    if rank in look.returned:
        main = "has returned"
    return "\n    and a thread of it ".join([main, *others])


def _thread_text(thread: Thread, snapshot: Snapshot) -> str:
    if thread.state == "runs" and thread.standing:  # NCCL may spin while it waits
        return f"waits in {thread.standing.text}, {location(thread.stack)}"
    if thread.state == "runs":
        return f"runs {location(thread.stack)}"
    if thread.state == "locked":
        return f"waits for a thread of its own, {location(thread.stack)}"
    calls = [thread.call] if thread.call else [call.text for call in snapshot.collectives[:3]]
    if not calls and thread.standing:
        calls = [thread.standing.text]
    if not calls:  # nothing was noted: name the function of torch.distributed, if there is one
        inside = [name for file, _, name in thread.stack if "torch/distributed/" in file]
        calls = [name for name in inside if name != "wrapper"][:1] or ["communication"]
    wait = f"waits in {' and '.join(calls)}"
    if thread.purpose:  # it says more than the line inside labkit
        learners, labs = user_frames(thread.stack)
        return f"{wait} for {thread.purpose}\n    {location(learners or labs)}"
    return f"{wait}, {location(thread.stack)}"


def _missing_at(look: Look, views: Mapping[int, Collective]) -> str:
    """Say which ranks wait in a collective, and which members of its group are not there."""
    call = next(iter(views.values()))
    left = look.left(call)
    never = [rank for rank in call.ranks if rank not in {*views, *left, *look.returned}]
    returned = [rank for rank in call.ranks if rank in look.returned and rank not in left]
    return who_is_where(call.text, sorted(views), left, never, returned)
