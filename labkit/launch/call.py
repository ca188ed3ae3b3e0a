"""Follows one call of a function on all ranks: sends it, and returns the results or raises what
went wrong.
"""

import contextlib
import pickle
import time
from collections.abc import Callable
from dataclasses import replace

from labkit.launch import report
from labkit.launch.client import DeferredInterrupt, stopped
from labkit.launch.linux import main_thread, read_text
from labkit.launch.output import Output
from labkit.launch.payload import Payload, discard, load
from labkit.launch.probe import Snapshot
from labkit.launch.rank import Failure
from labkit.launch.ranks import Ranks
from labkit.launch.watchdog import Look, Watchdog

_GATHER_SECONDS = 0.3  # after a first failure, for others
_CAUSE_SECONDS = 0.9  # after that, while all failures so far are consequences
_ANSWER_SECONDS = 1.0
# A rank that has run for so long without an answer is in C code: ten times as long as Python keeps
# the GIL from a thread that wants it.
_IN_C_SECONDS = 0.05
# The ways to stop ranks, with the seconds that each is given. Python can be stopped at once; C++
# that waits can only be freed.
_WAYS_TO_STOP = {"now": 0.4, "freed": 2.0}
_RENEWAL_SECONDS = 20.0  # for new connections; four ranks need a tenth of a second


class Call:
    """Sends a call, passes on what ranks print and report, and asks where they are when they fall
    silent.
    """

    def __init__(self, ranks: Ranks, output: Output, interrupt: DeferredInterrupt):
        self.ranks = ranks
        self.output = output
        self.interrupt = interrupt
        self.watchdog = Watchdog(time.monotonic())
        self.results: dict[int, Payload] = {}
        self.failures: dict[int, Failure] = {}
        self.snapshots: dict[int, Snapshot] = {}  # answers since the latest look
        self.at_rest = False  # after a failure: can the ranks take the next call?
        self.renewed: dict[int, bool] = {}  # rank -> has it new connections?
        # The ranks that still owe an answer: for how long its main thread had run when asked
        self.asked: dict[int, float] = {}

    def run(self, payload: Payload, keep: bool = True) -> list:
        """Return the results in rank order, or raise.

        ``keep``: first make the ranks ready for a next call.
        """
        try:
            self.ranks.send(None, "call", payload)
            self._wait()
            return [self._result(rank) for rank in range(self.ranks.num_ranks)]
        except (report.RankFailed, KeyboardInterrupt):
            self.at_rest = keep and self._comes_to_rest()
            raise
        finally:
            # What a rank prints has arrived before its result
            for kind, *fields in self.ranks.events(0):
                if kind == "output":
                    self.output.feed(*fields)
            self.output.finish()
            for result in self.results.values():
                discard(result)

    def _result(self, rank: int):
        try:
            return load(self.results[rank])
        except Exception as error:
            text = f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
            raise report.RankFailed(text, rank, error) from None

    def _wait(self) -> None:
        while self._unfinished() or self.failures:
            self._pump(0.1)
            if self.failures:
                self._raise_failure()
            if self.interrupt.requested:
                look = self._with_stacks(self._ask(0.5))
                raise stopped(report.locations_report("Stopped all ranks. They were:", look))
            if self._unfinished() and self.watchdog.is_due(time.monotonic()):
                self._look()

    def _unfinished(self) -> set[int]:
        return set(range(self.ranks.num_ranks)) - self.results.keys() - self.failures.keys()

    def _pump_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Pass on what arrives. What has arrived at the end is read, too, however late we are."""
        deadline = time.monotonic() + seconds
        while not is_done():
            is_late = time.monotonic() >= deadline
            self._pump(0 if is_late else 0.05)
            if is_late:
                return

    def _pump(self, seconds: float) -> None:
        for event in self.ranks.events(seconds):
            match event:
                case ("output", rank, stream, data):
                    self.output.feed(rank, stream, data)
                case ("progress", *report_of_rank):
                    self.output.progress(*report_of_rank)
                case ("result", rank, result):
                    self.results[rank] = result
                case ("error", rank, error):
                    self.failures[rank] = error
                case ("renewed", rank, done):
                    self.renewed[rank] = done
                case ("where", rank, snapshot):
                    self.asked.pop(rank, None)
                    self.snapshots |= {rank: snapshot} if snapshot else {}
                    continue  # the answer to our own question is not a sign of life
            self.watchdog.sign_of_life(time.monotonic())
        self.output.refresh()
        for rank in self.ranks.exits.keys() & self._unfinished():  # also between two calls
            self.failures[rank] = report.death(self.ranks.exits[rank], self.output.last_words(rank))
        if not self.ranks.server.connection.is_open:
            raise report.RankFailed(
                "the launch server was killed, and its ranks with it: run the cell again"
            )

    def _ask(self, seconds: float) -> Look:
        """Ask the ranks where they are, and wait for the answers.

        Those that have returned may still be sending.
        """
        self.snapshots = {}
        everybody = set(range(self.ranks.num_ranks))
        # A rank that still owes an answer is not asked again: sending could block us.
        for rank in everybody - self.ranks.exits.keys() - self.asked.keys():
            _, self.asked[rank] = main_thread(self.ranks.pids[rank])
            self.ranks.send(rank, "where")

        def all_have_answered() -> bool:
            return everybody == self.snapshots.keys() | self.ranks.exits.keys()

        self._pump_until(all_have_answered, seconds)
        return Look(self.ranks.num_ranks, dict(self.snapshots), frozenset(self.results))

    def _with_stacks(self, look: Look) -> Look:
        """Add what ranks that hold the GIL are doing: faulthandler answers a signal without it."""
        ranks = {rank for rank in self._unfinished() - look.snapshots.keys() if self._is_in_c(rank)}
        before = {rank: self._stacks_of(rank) for rank in ranks}
        for rank in ranks:
            self.ranks.ask_for_stack(rank)  # not at every look: it cuts a sleep in C code short
        self._pump_until(lambda: all(self._stacks_of(rank) != before[rank] for rank in ranks), 0.5)
        # Only the new one: an older one may be of a call before.
        stacks = {rank: self._stacks_of(rank).removeprefix(before[rank]) for rank in ranks}
        return replace(look, stacks=stacks)

    def _stacks_of(self, rank: int) -> str:
        """Return what a rank's faulthandler has written, whenever it was asked."""
        return read_text(f"{self.ranks.directory}/stack{rank}")

    def _is_in_c(self, rank: int) -> bool:
        """Is a rank that does not answer in C code, and not in Python that lacks a core?

        Only then are its frames whole: to read one that Python makes or leaves at this moment can
        end the process.
        """
        state, seconds = main_thread(self.ranks.pids[rank])
        return state == "S" or seconds - self.asked.get(rank, seconds) > _IN_C_SECONDS

    def _look(self) -> None:
        look = self._ask(_ANSWER_SECONDS)
        if self.failures or not self._unfinished():
            return
        now = time.monotonic()
        match self.watchdog.judge(now, look):
            case "deadlock":
                raise report.Deadlock(report.deadlock_report(look))
            case "overdue":
                overdue = self.watchdog.overdue(now)
                first_rank, _ = overdue[0]
                text = report.overdue_report(overdue, self._with_stacks(look))
                raise report.RankFailed(text, first_rank)
            case "note":
                why = f"No news for {now - self.watchdog.last_sign:.0f} s; nothing is wrong yet:"
                self.output.note(report.locations_report(why, self._with_stacks(look)))

    def _comes_to_rest(self) -> bool:
        """Stop the ranks that still run, and connect them anew if need be.

        Return whether all can take a next call.
        """
        used = ""
        for way, seconds in _WAYS_TO_STOP.items():
            if self._unfinished() and not self.ranks.exits:
                used = way
                self.ranks.send(None, "stop", way)
                self._pump_until(lambda: not self._unfinished(), seconds)
        if self._unfinished() or self.ranks.exits:
            return False
        look = self._ask(_ANSWER_SECONDS)
        lost_connections = any(map(report.is_consequence, self.failures.values()))
        if look.is_at_rest() and not lost_connections and used != "freed":
            return True
        for snapshot in look.snapshots.values():
            if any(thread.state != "locked" for thread in snapshot.threads[1:]):
                return False  # the thread may send at any moment
        self.ranks.send(None, "renew")
        self._pump_until(lambda: len(self.renewed) == self.ranks.num_ranks, _RENEWAL_SECONDS)
        return list(self.renewed.values()) == [True] * self.ranks.num_ranks

    def _raise_failure(self) -> None:
        """Report the first failure, after a moment for those of other ranks and, if they have it,
        for the cause.
        """

        def has_a_cause() -> bool:
            return not all(map(report.is_consequence, self.failures.values()))

        self._pump_until(lambda: not self._unfinished(), _GATHER_SECONDS)
        self._pump_until(lambda: not self._unfinished() or has_a_cause(), _CAUSE_SECONDS)
        look = self._with_stacks(self._ask(0.5))
        first, text = report.failure_report(self.failures, look)
        cause = None
        with contextlib.suppress(Exception):  # it died or waits, or its exception cannot be pickled
            cause = pickle.loads(self.failures[first].exception)
        tracebacks = {}
        for rank, failure in self.failures.items():
            if failure.kind:  # and not the end of its process
                tracebacks[rank] = failure.traceback
        raise report.RankFailed(text, first, cause, tracebacks)
