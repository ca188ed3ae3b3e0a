"""One call of a function on all ranks, from sending it to the results or the report of what went wrong."""

import contextlib
import pickle
import signal
import time

from labkit.launch.interrupts import DeferredInterrupt
from labkit.launch.output import Output, ProgressBar, note
from labkit.launch.probe import Snapshot
from labkit.launch.ranks import Ranks
from labkit.launch.report import (
    Deadlock,
    Death,
    Failure,
    RankFailed,
    busy_stack,
    deadlock_report,
    failure_report,
    interrupt_report,
    is_consequence,
    slow_note,
)
from labkit.launch.watchdog import Silence, Watchdog

_GATHER_SECONDS = 0.3  # after a first failure: who else failed by then?
_GATHER_CAUSE_SECONDS = 1.2  # and while only consequences have been heard of: the cause is still to come
_ANSWER_SECONDS = 1.0


class Call:
    """Sends a call, pumps what ranks print and report, and watches over a silence."""

    def __init__(self, ranks: Ranks, output: Output, interrupt: DeferredInterrupt):
        self.ranks, self.output, self.interrupt = ranks, output, interrupt
        self.progress_bar = ProgressBar()
        self.started = self.last_sign = time.monotonic()
        self.watchdog = Watchdog(self.started)
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.snapshots: dict[int, Snapshot] = {}  # answers since the latest look
        self.asked: set[int] = set()  # who still owes an answer: asking on would fill its socket, and block us

    def run(self, payload: bytes | str) -> list:
        """The results in rank order. Raises RankFailed, Deadlock or KeyboardInterrupt, with its report."""
        try:
            for rank in range(self.ranks.num_ranks):
                self.ranks.send(rank, "call", payload)
            for rank, status in self.ranks.exits.items():  # between two calls
                self._note_exit(rank, status)
            self._wait()
        finally:
            self._show_output()
        return [pickle.loads(self.results[rank]) for rank in range(self.ranks.num_ranks)]

    def _wait(self) -> None:
        while self._unfinished():
            self._pump(0.1)
            if self.failures:
                self._raise_failure()
            if self.interrupt.requested:
                self._raise_interrupt()
            if self._unfinished() and self.watchdog.is_due(time.monotonic()):
                self._look()
        if self.failures:  # the last ranks failed during a look
            self._raise_failure()

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(self.ranks.num_ranks) if rank not in self.results and rank not in self.failures]

    # -- events -------------------------------------------------------------------------------------------

    def _pump(self, seconds: float) -> None:
        for event in self.ranks.events(seconds):
            match event:
                case ("output", rank, stream, data):
                    self.output.feed(rank, stream, data)
                case ("progress", rank, done, total, text):
                    self.progress_bar.update(rank, done, total, text)
                case ("result", rank, result):
                    self.results[rank] = result
                case ("error", rank, error):
                    self.failures[rank] = error
                case ("exit", rank, status):
                    self._note_exit(rank, status)
                case ("where", rank, snapshot):
                    self.asked.discard(rank)
                    self.snapshots[rank] = snapshot
                    continue  # our own question is no sign of life
            self.last_sign = time.monotonic()
            self.watchdog.sign_of_life(self.last_sign)
        if self.ranks.server.dead:
            raise RankFailed(
                "the launch server was killed, and its ranks with it: run the cell again to start a new one"
            )

    def _note_exit(self, rank: int, status: int) -> None:
        if rank not in self.results and rank not in self.failures:
            self.failures[rank] = Death(status, tuple(self.output.last_words(rank)), time.monotonic())

    def _show_output(self) -> None:
        if not self.ranks.server.dead:
            for rank, stream, data in self.ranks.remaining_output():
                self.output.feed(rank, stream, data)
        self.progress_bar.close()
        self.output.finish()

    # -- looking at silent ranks --------------------------------------------------------------------------

    def _ask(self, seconds: float) -> Silence:
        """Ask every unfinished rank where it is, and wait for the answers."""
        self.snapshots = {}
        for rank in set(self._unfinished()) - self.asked:
            self.asked.add(rank)
            self.ranks.send(rank, "where")
        deadline = time.monotonic() + seconds
        while set(self._unfinished()) - self.snapshots.keys() and time.monotonic() < deadline:
            self._pump(0.05)
        silent = [rank for rank in self._unfinished() if rank not in self.snapshots]
        return Silence(self.ranks.num_ranks, dict(self.snapshots), frozenset(self.results), self._c_stacks(silent))

    def _c_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where ranks are whose GIL is held: faulthandler answers a signal without it."""
        for rank in ranks:
            self.ranks.signal(signal.SIGUSR1, rank)
        if ranks:
            self._pump(0.1)
        stacks = {}
        for rank in ranks:
            with contextlib.suppress(OSError), open(f"{self.ranks.directory}/stack{rank}") as file:
                stacks[rank] = busy_stack(file.read())
        return stacks

    def _look(self) -> None:
        silence = self._ask(_ANSWER_SECONDS)
        if self.failures or not self._unfinished():
            return
        now = time.monotonic()
        match self.watchdog.judge(now, silence):
            case "deadlock":
                raise Deadlock(deadlock_report(silence))
            case "note":
                note(slow_note(silence, now - self.last_sign))

    # -- bad ends -----------------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        start = time.monotonic()
        while self._unfinished():
            heard_cause = not all(is_consequence(failure) for failure in self.failures.values())
            if time.monotonic() - start > (_GATHER_SECONDS if heard_cause else _GATHER_CAUSE_SECONDS):
                break
            self._pump(0.05)
        silence = self._ask(0.5)
        first, report = failure_report(self.failures, silence)
        failure, cause = self.failures[first], None
        if not isinstance(failure, Death) and failure.exception:
            with contextlib.suppress(Exception):
                cause = pickle.loads(failure.exception)
        tracebacks = {rank: error.traceback for rank, error in self.failures.items() if not isinstance(error, Death)}
        raise RankFailed(report, first, cause, tracebacks)

    def _raise_interrupt(self) -> None:
        report = interrupt_report(self._ask(0.5))
        interrupt = KeyboardInterrupt(report)
        interrupt._render_traceback_ = lambda: f"KeyboardInterrupt: {report}".splitlines()  # pyright: ignore
        raise interrupt
