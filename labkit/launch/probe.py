"""Takes snapshots of what a rank is doing: the evidence from which the kernel judges a silent
world.

The probe runs in the rank's control thread. It reads the Python stacks of the others, torch's
flight recorder (collectives), its own notes of sends and receives (gloo's are not in the recorder),
and /proc: has anything run?
"""

import contextlib
import functools
import glob
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

from labkit.launch import linux
from labkit.launch.frames import LAUNCHER, Frame, stack_of, user_frames


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has started and not finished."""

    group: str  # the backend, and torch's name for the group: gloo and NCCL count on their own
    ranks: tuple[int, ...]
    number: int  # in its group
    operation: str
    text: str  # all of this, for the report


@dataclass(frozen=True)
class Standing:
    """A call of torch.distributed that may have no time-out: NCCL waits for ever for a group's
    members to come.
    """

    # How many calls this rank had begun, and its last record: it changes when the rank goes on
    calls: tuple
    limit_seconds: float  # of the group
    text: str  # the call and its group, for the report
    ranks: tuple[int, ...]  # of the group; () if unknown


@dataclass(frozen=True)
class Thread:
    """A thread that runs Python code: the main one, or one that the learner's code has started."""

    stack: tuple[Frame, ...]  # innermost last
    # "waits" in communication, for ever; is "locked" until a thread of its rank wakes it; else
    # "runs"
    state: str
    call: str = ""  # a send, a receive or a call that makes groups, in words
    purpose: str = ""  # of its wait, as `waiting_for` was told
    standing: Standing | None = None


@dataclass(frozen=True)
class Snapshot:
    threads: tuple[Thread, ...]  # the main thread first
    collectives: tuple[Collective, ...]
    started: dict[str, int]  # group -> the number of the last collective that this rank has started
    # What changes while a rank goes on: bytes received, how far set-up has come, how often threads
    # and gloo's workers have run
    ran: tuple[int, ...]
    busy: bool  # at every moment of the look a thread could run
    # A request nobody has waited for, or a wait that failed: the next calls may not match
    unsettled: bool = False

    def has_left(self, call: Collective) -> bool:
        """Has this rank finished a collective, or given up on it?"""
        unfinished = {(collective.group, collective.number) for collective in self.collectives}
        has_started = self.started.get(call.group, 0) >= call.number
        return has_started and (call.group, call.number) not in unfinished


@dataclass
class _Message:
    operation: str  # "send" or "recv"
    peer: int | None  # a global rank, or None for a receive from any
    tag: int
    tensor: str  # dtype and shape
    timeout: timedelta | None
    is_gloo: bool = False
    stack: tuple[Frame, ...] = ()  # of the isend or irecv

    def text(self, with_tag: bool = True) -> str:
        direction = "to" if self.operation == "send" else "from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = f", tag {self.tag}" if self.tag and with_tag else ""
        return f"{self.operation} {direction} {peer} ({self.tensor}{tag})"


_IN_GROUPS = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_RECORDER = "labkit-recorder"  # the thread that asks NCCL's,
_RECORDER_SECONDS = 0.3  # and for how long
_SET_UP_CALLS = ("init_process_group", "new_group", "new_subgroups_by_enumeration", "split_group")
_purposes: dict[int, object] = {}  # what each thread waits for at this moment, by its identifier
_messages: dict[int, _Message] = {}
_timeouts: dict[int, timedelta] = {}


def waiting_for(purpose: object) -> contextlib.AbstractContextManager[None]:
    """Name what a wait is for, in about a microsecond: should it never end, the report of the
    launch says so.

    >>> with waiting_for("F3"):  # the forward of micro-batch 3
    ...     pass  # work.wait()
    """
    return _noted(_purposes, purpose)  # made into text only when somebody asks


@contextlib.contextmanager
def _noted(table: dict[int, Any], value) -> Iterator[None]:
    """Note a value for this thread inside the block; None leaves what an outer block has noted."""
    thread = threading.get_ident()
    outer = table.get(thread)
    try:  # from here on: a stop may come at any line
        table[thread] = outer if value is None else value
        yield
    finally:
        table[thread] = outer


class Probe:
    """Notes this rank's sends and receives, and takes snapshots."""

    def __init__(self, timeout_seconds: float, directory: str):
        self.timeout = timedelta(seconds=timeout_seconds)
        self.directory = directory
        self.requests: dict[Any, _Message] = {}  # of isend and irecv, until somebody has waited
        self.num_calls = 0  # of messages and waits, as they begin
        self.broken = False  # a communication failed, so that the next may fail too
        self.first_record = 0  # in the flight recorder, of the connections that there are now

    def forget(self) -> None:
        """Leave out what was before: this rank is about to be connected anew."""
        self.requests = {}
        self.broken = False
        self.first_record = max((entry["record_id"] for entry in _records()), default=-1) + 1

    def watch(self) -> None:
        """Wrap the wait of torch.distributed, for all backends, and its four point-to-point
        functions.
        """
        import torch.distributed as dist

        dist.Work.wait = self._watched_wait(dist.Work.wait)  # pyright: ignore - pinned by a test
        for name in ("send", "recv", "isend", "irecv"):
            wrapper = self._watched(getattr(dist, name))
            # batch_isend_irecv looks them up in the second module.
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, wrapper)

    def _watched_wait(self, wait):
        @functools.wraps(wait)
        def watched_wait(work, timeout=timedelta(0)):
            self.num_calls += 1
            try:
                with _noted(_messages, self.requests.get(work)), _noted(_timeouts, timeout or None):
                    return wait(work, timeout)
            except Exception:
                self.broken = True
                raise
            finally:
                self.requests.pop(work, None)

        return watched_wait

    def _watched(self, function):
        name = function.__name__

        @functools.wraps(function)
        def watched(tensor, *args, **kwargs):
            self.num_calls += 1
            message = _describe(name.removeprefix("i"), tensor, args, kwargs)
            with _noted(_messages, message):
                work = function(tensor, *args, **kwargs)
            # On a rank outside the group there is no work.
            if name.startswith("i") and work and not tensor.is_cuda:
                message.stack = stack_of(sys._getframe(1))
                # The key keeps the work alive: where one is dropped, gloo blocks with the GIL held.
                self.requests[work] = message
            return work

        return watched

    def lost_request(self) -> _Message | None:
        """Return an isend or irecv whose request nobody has waited for or kept."""
        for work, message in list(self.requests.items()):
            if sys.getrefcount(work) <= 4:  # the dict, the list, the variable and the argument
                return message
        return None

    def snapshot(self) -> Snapshot:
        """Look at this rank's threads. A library's own thread is left out: it brings no message,
        and most go on for ever.
        """
        busy = linux.is_busy()
        recorded = _flight_recorders(self.timeout, self.first_record)
        frames = sys._current_frames()
        stores = sorted(glob.glob(f"{self.directory}/store*"))
        ran = [linux.bytes_received(), *map(os.path.getsize, stores)]
        main = threading.main_thread()
        this = threading.current_thread()
        others = [thread for thread in threading.enumerate() if thread not in (main, this)]
        threads = []
        of_libraries = []
        for thread in [main, *others]:
            frame = frames.get(thread.ident or 0)
            if frame is None:  # it has started just now
                continue
            if thread.name == _RECORDER:  # it is our own
                continue
            task = os.getpid() if thread is main else thread.native_id
            seen = self._thread(thread.ident or 0, task, frame, recorded)
            if thread is not main and seen.state != "waits" and _is_librarys(seen):
                of_libraries.append(seen)
                continue
            threads.append(seen)
            if not seen.call.startswith(_SET_UP_CALLS):  # these poll the store
                ran.append(linux.switches(task))
        if any(thread.state == "locked" and any(user_frames(thread.stack)) for thread in threads):
            threads += of_libraries  # it may wait for one of them, as for a pool's
        # They hold this frame, and it holds them: the learner's tensors would live on.
        frames.clear()
        for task in linux.tasks():
            if linux.name(task).startswith("pt_gloo_runloop"):
                ran.append(linux.switches(task))
        unsettled = recorded.unsettled or self.broken or bool(self.requests)
        collectives = recorded.collectives
        return Snapshot(tuple(threads), collectives, recorded.started, tuple(ran), busy, unsettled)

    def _thread(
        self, thread: int, task: int | None, frame: FrameType, recorded: "_Recorded"
    ) -> Thread:
        """Say what a thread does."""
        stack = stack_of(frame)
        innermost, _, _ = stack[-1]
        message = _messages.get(thread)
        purpose = str(_purposes.get(thread) or "")
        set_up, timeouts = _calls_of_torch(frame)
        timeouts += [_timeouts.get(thread), message and message.timeout]
        # A wait with a shorter time-out than the world's ends by itself.
        expires = any(timeout < self.timeout for timeout in timeouts if timeout)
        if recorded.expires and not message:
            expires = True
        folder = "/torch/" if recorded.collectives else "/torch/distributed/"
        in_torch = innermost == __file__ or folder in innermost
        state = "runs"
        if any(function == "_join" and file.startswith(LAUNCHER) for file, _, function in stack):
            set_up = ""  # the launcher's own, which is sure to end
        elif set_up or (in_torch and linux.may_wait_for_a_thread(task)):  # as gloo does
            state = "runs" if expires else "waits"
        elif "/torch/" not in innermost and linux.waits_for_a_python_thread(task):
            state = "locked"
        # Tags are left out where labkit has named the purpose: its tags say nothing to a learner.
        call = message.text(with_tag=not purpose) if message else set_up
        # A rank in one of gloo's collectives gives up by itself.
        is_in_gloo = any(collective.group.startswith("gloo") for collective in recorded.collectives)
        standing = None if is_in_gloo else self._standing(thread, frame, recorded.last)
        return Thread(stack, state, call, purpose, standing)

    def _standing(self, thread: int, frame: FrameType, last_records: tuple) -> Standing | None:
        """Return the call of NCCL's that a thread is inside.

        Gloo's calls and set-up have time-outs of their own.
        """
        import torch.distributed as dist

        if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
            return None
        calls = []
        for caller, _ in traceback.walk_stack(frame):
            if _IN_GROUPS.search(caller.f_code.co_filename):
                calls.append(caller)
        innermost = frame.f_code.co_filename
        in_probe = innermost == __file__  # which wraps waits and messages
        in_groups = bool(_IN_GROUPS.search(innermost)) or innermost.endswith("/torch/_ops.py")
        if not in_probe and not (in_groups and calls):
            return None
        if any(call.f_code.co_name in _SET_UP_CALLS for call in calls):
            return None
        message = _messages.get(thread)
        if message and message.is_gloo:
            return None
        call = next((call for call in calls if "group" in call.f_locals), None)
        group = _group_of(call.f_locals.get("group")) if call else None
        ranks = ()
        if message:
            text = message.text(with_tag=False)
        elif call and group:
            group_text, ranks = _group_text(group)
            text = f"{call.f_code.co_name} of {group_text}"
        else:
            text = frame.f_code.co_name.removeprefix("watched_")
        limit = max(self.timeout, _timeout_of(group) or self.timeout).total_seconds()
        return Standing((self.num_calls, last_records), limit, text, ranks)


def _is_librarys(thread: Thread) -> bool:
    """Was a thread started by a library, with no code of the learner's or the lab's in it?"""
    if any(user_frames(thread.stack)):
        return False
    return any("-packages/" in file for file, _, _ in thread.stack)


def _group_of(given: Any) -> Any:
    """Return the group that a function of torch's was given, by whatever name; None if it cannot be
    told.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if given is None:
        return dist.group.WORLD
    if isinstance(given, str):
        for group, name in distributed_c10d._world.pg_names.items():
            if name == given:
                return group
        return None
    return given if isinstance(given, dist.ProcessGroup) else None


def _timeout_of(group) -> timedelta | None:
    """Return the time-out of a group's works on this rank's device."""
    with contextlib.suppress(Exception):  # a group may be on its way out
        return group._get_backend(group._device_types[-1]).options._timeout
    return None


def _group_text(group) -> tuple[str, tuple[int, ...]]:
    """Return a group in words, and its ranks."""
    from torch.distributed import distributed_c10d

    ranks = sorted(distributed_c10d._world.pg_group_ranks.get(group, ()))
    description = "the world" if group is distributed_c10d.group.WORLD else group.group_desc
    if description in ("", "undefined"):
        description = "a group"
    if str(ranks) not in description:
        description = f"{description} {ranks}"
    return description, tuple(ranks)


def _calls_of_torch(frame: FrameType) -> tuple[str, list[timedelta | None]]:
    """Return the call that makes groups, if the stack has one, and the time-outs given to
    torch.distributed.
    """
    set_up = ""
    timeouts = []
    for caller, _ in traceback.walk_stack(frame):
        if "/torch/distributed/" in caller.f_code.co_filename:
            function = caller.f_code.co_name
            arguments = caller.f_locals
            if isinstance(timeout := arguments.get("timeout"), timedelta):
                timeouts.append(timeout)
            if function in _SET_UP_CALLS:
                ranks = arguments.get("ranks")
                set_up = f"{function} of ranks {list(ranks)}" if ranks else function
    return set_up, timeouts


def _describe(operation: str, tensor, args: tuple, kwargs: dict) -> _Message:
    """Parse ``(tensor, dst, group, tag, group_dst)`` as torch.distributed does."""
    import torch
    import torch.distributed as dist

    to = "dst" if operation == "send" else "src"
    given = dict(zip((to, "group", "tag", f"group_{to}"), args)) | kwargs
    group = given.get("group") or dist.group.WORLD
    peer = given.get(to)
    if peer is None and given.get(f"group_{to}") is not None:
        group_rank = given[f"group_{to}"]
        peer = dist.get_global_rank(group, group_rank)  # pyright: ignore[reportArgumentType]
    num_ranks = dist.get_world_size()
    if peer is not None and not 0 <= peer < num_ranks:  # gloo would wait for it
        rule = f"ranks run from 0 to {num_ranks - 1}; in a ring use % {num_ranks}"
        raise ValueError(f"{to}={peer} is not a rank: {rule}")
    # What is not a tensor has none of these: torch will refuse it.
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    shape = [*getattr(tensor, "shape", ())]
    device = getattr(tensor, "device", torch.device("cpu"))
    timeout = None
    is_gloo = False
    if isinstance(group, dist.ProcessGroup):  # and not torch's mark for a non-member
        backend = group._get_backend(device)
        is_gloo = isinstance(backend, dist.ProcessGroupGloo)  # pyright: ignore - private
        timeout = backend.options._timeout  # pyright: ignore[reportAttributeAccessIssue]
    tag = given.get("tag") or 0
    return _Message(operation, peer, tag, f"{dtype} {shape}", timeout, is_gloo)


def _records() -> list[dict]:
    """Return what the flight recorder of gloo has noted, from the start of this process."""
    # Private, and pinned by a test.
    from torch._C._distributed_c10d import _dump_fr_trace_json  # pyright: ignore

    return json.loads(_dump_fr_trace_json()).get("entries", [])


def _records_of_nccl() -> list[dict] | None:
    """Return what NCCL's flight recorder has noted; None if it does not answer: it asks the GPU,
    which may be lost.
    """
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # in a build without NCCL
        return []
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(dump()), daemon=True, name=_RECORDER)
    thread.start()
    thread.join(_RECORDER_SECONDS)
    return json.loads(answers[0]).get("entries", []) if answers else None


class _Recorded(NamedTuple):
    """What torch's recorders know of this rank's works."""

    collectives: tuple[Collective, ...]  # which are not finished
    started: dict[str, int]  # group -> the number of its last collective
    expires: bool  # is a time-out of theirs shorter than the world's?
    unsettled: bool  # is more unfinished: a message, or what a recorder does not tell?
    last: tuple  # the last entries: they change when a work begins


def _flight_recorders(timeout: timedelta, first: int) -> _Recorded:
    """Read the recorders of gloo and NCCL.

    Records of gloo before the ``first`` are of connections that are no more: numbers began again
    from 1.
    """
    of_gloo = [entry for entry in _records() if entry["record_id"] >= first]
    answer_of_nccl = _records_of_nccl()
    of_nccl = answer_of_nccl or []
    entries = of_gloo + of_nccl
    retired = {_number(entry) for entry in entries if entry["retired"]}
    # Messages of a batch have its number, and only its own entry ever retires.
    unfinished = [entry for entry in entries if _number(entry) not in retired]
    collectives = [entry for entry in unfinished if not entry["is_p2p"]]
    started = {}
    for entry in entries:  # in order, so that the last one of a group stays
        if not entry["is_p2p"]:
            started[_group(entry)] = entry["collective_seq_id"]
    expires = any(timedelta(milliseconds=entry["timeout_ms"]) < timeout for entry in collectives)
    unsettled = answer_of_nccl is None or len(unfinished) > len(collectives)
    last = tuple(_number(part[-1]) for part in (of_gloo, of_nccl) if part)
    return _Recorded(tuple(map(_collective, collectives)), started, expires, unsettled, last)


def _group(entry: dict) -> str:
    return f"{entry['profiling_name'].partition(':')[0]} {entry['process_group'][0]}"


def _number(entry: dict) -> tuple:
    return _group(entry), entry["collective_seq_id"], entry["p2p_seq_id"]


def _collective(entry: dict) -> Collective:
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    name = entry["process_group"][0]
    groups = {}
    for group, group_name in list(world.pg_names.items()):  # they may become more meanwhile
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        groups[group_name] = (group.group_desc, ranks)
    description, ranks = groups.get(name, ("", []))
    members = str(ranks) if len(ranks) <= 16 else f"{len(ranks)} ranks"
    if description in ("", "default_pg"):
        description = "the world"
    elif description == "undefined":
        num_alike = list(groups.values()).count(groups[name])
        description = "a group" if num_alike == 1 else f'a group "{name}"'
    if members not in description:
        description = f"{description} {members}"
    tensors = ""
    if entry["input_sizes"]:
        dtypes = " ".join(dict.fromkeys(dtype.lower() for dtype in entry["input_dtypes"]))
        tensors = f" ({dtypes} {' '.join(map(str, entry['input_sizes']))})"
    operation = entry["profiling_name"].partition(":")[2]
    number = entry["collective_seq_id"]
    text = f"{operation} number {number}{tensors} of {description}"
    return Collective(_group(entry), tuple(ranks), number, operation, text)
