"""What a rank is doing at this moment: the evidence from which the kernel judges a silent world.

The probe runs in the rank's control thread while its main thread computes, waits in communication, or hangs. It looks
at the main thread's Python stack, torch's flight recorder (collectives), our own notes of sends and receives (gloo's
are not in the recorder), and /proc (has anything run, and can anything still?).
"""

import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

Frame = tuple[str, int, str]
"""File name, line, function."""


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has started and not finished."""

    group: str
    number: int
    operation: str
    shapes: str
    dtypes: str


@dataclass(frozen=True)
class PointToPoint:
    """A send or receive that this rank waits in. ``peer`` is a global rank, or None for a receive from any rank."""

    operation: str  # "send" or "recv"
    peer: int | None
    tag: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class SetUp:
    """A call that makes process groups: all ranks must make the same ones in the same order."""

    operation: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class Snapshot:
    stack: tuple[Frame, ...]  # of the main thread, innermost last
    collectives: tuple[Collective, ...]
    point_to_point: PointToPoint | None
    set_up: SetUp | None
    in_torch_distributed: bool  # and not in a function of the learner's that torch.distributed has called
    groups: dict[str, tuple[str, tuple[int, ...]]]  # name -> description, ranks
    ran: tuple[int, ...]  # how often the main thread and gloo's workers have run
    busy: bool  # at every moment of the look a thread could run, or bytes were on their way
    elsewhere: bool  # the main thread sleeps, or waits for a file, a process or a thread
    purpose: str = ""  # of the main thread's wait, as `waiting_for` was told


_purposes: dict[int, object] = {}  # thread -> what it waits for


@contextlib.contextmanager
def waiting_for(purpose: object) -> Iterator[None]:
    """Name what a wait is for: should it never end, the report of the launch says so.

    It costs about a microsecond; on ranks that torchrun started, nobody reads it.

    >>> with waiting_for("F3"):  # the forward of micro-batch 3
    ...     pass  # work.wait()
    """
    thread = threading.get_ident()
    outer = _purposes.get(thread, "")
    _purposes[thread] = purpose  # made into text only when somebody asks
    try:
        yield
    finally:
        _purposes[thread] = outer


class Probe:
    """Counts this rank's sends and receives, and takes snapshots."""

    def __init__(self):
        self.waiting: PointToPoint | None = None

    def watch_point_to_point(self) -> None:
        """Wrap torch.distributed's four point-to-point functions, to note what a rank waits for."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        for name in ("send", "recv", "isend", "irecv"):
            wrapper = self._noted(getattr(dist, name))
            for module in (dist, distributed_c10d):  # batch_isend_irecv looks them up in the second
                setattr(module, name, wrapper)

    def _noted(self, function):
        to = "dst" if "send" in function.__name__ else "src"

        @functools.wraps(function)
        def noted(tensor, *args, **kwargs):
            call = _describe(function.__name__.removeprefix("i"), to, tensor, args, kwargs)
            if not function.__name__.startswith("i"):
                return self.wait(call, function, tensor, *args, **kwargs)
            work = function(tensor, *args, **kwargs)
            return work and _Work(self, work, call)  # None on a rank outside the group

        return noted

    def wait(self, call: PointToPoint, function, *args, **kwargs):
        """Run a blocking function, with a note of what it waits for."""
        self.waiting = call
        try:
            return function(*args, **kwargs)
        finally:
            self.waiting = None

    def snapshot(self) -> Snapshot:
        main = threading.main_thread()
        frame = sys._current_frames()[main.ident]  # pyright: ignore[reportArgumentType]
        stack, set_up, in_torch, in_distributed, is_joining = [], None, True, False, False
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            in_torch = in_torch and "/torch/" in code.co_filename
            is_joining = is_joining or (code.co_name == "_join" and code.co_filename.startswith(_HERE))
            if "torch/distributed/" in code.co_filename:
                in_distributed = in_distributed or in_torch
                if code.co_name in _SET_UP_CALLS:
                    ranks = frame.f_locals.get("ranks")
                    set_up = SetUp(code.co_name, tuple(ranks) if ranks else None)
            frame = frame.f_back
        return Snapshot(
            stack=tuple(stack[::-1][-60:]),
            collectives=_flight_recorder(),
            point_to_point=self.waiting,
            set_up=None if is_joining else set_up,  # only the launcher's own set-up is sure to end
            in_torch_distributed=in_distributed and not is_joining,
            groups=_groups(),
            ran=_ran(set_up is not None),
            busy=_is_busy(),
            elsewhere=_is_elsewhere(stack[0][0]),
            purpose=str(_purposes.get(main.ident or 0, "")),
        )


_HERE = os.path.dirname(__file__) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_SET_UP_CALLS = ("init_process_group", "new_group", "new_subgroups_by_enumeration", "split_group")


class _Work:
    """The handle of an isend or irecv, whose wait() can be seen from outside."""

    def __init__(self, probe: Probe, work, call: PointToPoint):
        self._probe, self._work, self._call = probe, work, call

    def wait(self, *args, **kwargs):
        return self._probe.wait(self._call, self._work.wait, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._work, name)


def _describe(operation: str, to: str, tensor, args: tuple, kwargs: dict) -> PointToPoint:
    """Parse ``(tensor, dst, group, tag, group_dst)`` as torch.distributed does."""
    import torch.distributed as dist

    given = dict(zip((to, "group", "tag", f"group_{to}"), args)) | kwargs
    group = given.get("group") or dist.group.WORLD
    peer = given.get(to)
    if peer is None and given.get(f"group_{to}") is not None:
        peer = dist.get_global_rank(group, given[f"group_{to}"])  # pyright: ignore[reportArgumentType]
    if peer is not None and not 0 <= peer < (num_ranks := dist.get_world_size()):  # gloo would wait for it
        raise ValueError(f"{to}={peer} is not a rank: ranks run from 0 to {num_ranks - 1}; in a ring use % {num_ranks}")
    shape, dtype = getattr(tensor, "shape", ()), str(getattr(tensor, "dtype", ""))  # torch refuses what is not a tensor
    return PointToPoint(operation, peer, given.get("tag") or 0, tuple(shape), dtype.removeprefix("torch."))


def _flight_recorder() -> tuple[Collective, ...]:
    """Return the unfinished collectives. A private reader of torch's: pinned by a test."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]

    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    return tuple(
        Collective(
            group=entry["process_group"][0],
            number=entry["collective_seq_id"],
            operation=entry["profiling_name"].partition(":")[2],
            shapes=" ".join(map(str, entry["input_sizes"])),
            dtypes=" ".join(dict.fromkeys(dtype.lower() for dtype in entry["input_dtypes"])),
        )
        for entry in entries
        if not entry["retired"] and not entry["is_p2p"]
    )


def _groups() -> dict[str, tuple[str, tuple[int, ...]]]:
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    ranks = {group: tuple(sorted(ranks)) for group, ranks in list(world.pg_group_ranks.items())}
    names = list(world.pg_names.items())
    return {str(name): (getattr(group, "group_desc", ""), ranks.get(group, ())) for group, name in names}


def _is_elsewhere(innermost_file: str) -> bool:
    """Is the main thread blocked, but not in communication? Torch waits on futexes, and so do Python's own locks."""
    blocked_in = read_text(f"/proc/self/task/{os.getpid()}/wchan")  # "0" while it runs
    if blocked_in not in ("", "0") and "futex" not in blocked_in:
        return True
    return innermost_file.startswith(_STANDARD_LIBRARY) and "-packages/" not in innermost_file


def _ran(in_set_up: bool) -> tuple[int, ...]:
    """Count how often gloo's workers have run, and the main thread, but in set-up, where that polls a file."""
    task_ids = os.listdir("/proc/self/task")
    tasks = [task for task in task_ids if read_text(f"/proc/self/task/{task}/comm").startswith("pt_gloo_runloop")]
    tasks += [] if in_set_up else [str(os.getpid())]
    found = [re.findall(r"ctxt_switches:\s*(\d+)", read_text(f"/proc/self/task/{task}/status")) for task in tasks]
    return tuple(sum(map(int, switches)) for switches in found)


def _is_busy() -> bool:
    """At each of some moments, could a different thread of this rank run, or were bytes on their way to or from it?

    A thread that waits for a core can run. One moment is not enough: gloo's loops wake up a hundred times a second.
    """
    for _ in range(20):
        tasks = set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}
        states = [read_text(f"/proc/self/task/{task}/stat").rpartition(")")[2][1:2] for task in tasks]
        if not {"R", "D"} & set(states) and not _bytes_on_their_way():
            return False
        time.sleep(0.003)
    return True


def _bytes_on_their_way() -> bool:
    rows = [line.split() for line in read_text("/proc/self/net/tcp").splitlines()[1:]]
    filled = {f"socket:[{row[9]}]" for row in rows if row[4] != "00000000:00000000"}  # bytes to send, bytes to read
    for descriptor in os.listdir("/proc/self/fd") if filled else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}") in filled:
                return True
    return False


def read_text(path: str) -> str:
    """Read a file of /proc; return "" if it is gone, or hidden."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
