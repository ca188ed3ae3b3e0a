"""Ends a run before its last step: after SIGTERM, SIGUSR1 or a given time, once the step in flight
is finished.
"""

import math
import signal
import threading
import time
from contextlib import AbstractContextManager

# Kubernetes and torchrun send the first, Slurm either, before they kill
_SIGNALS = signal.SIGTERM, signal.SIGUSR1


class ExitSignal(AbstractContextManager["ExitSignal"]):
    """Inside the block, a signal no longer ends this rank: ``reason`` says that it came.

    All ranks must then agree.

    Args:
        minutes: after this time there is a reason too; None for never.
    """

    def __init__(self, minutes: float | None = None):
        self.minutes = math.inf if minutes is None else minutes
        self._signal = ""
        self._deadline = time.monotonic() + 60 * self.minutes
        self._before: dict = {}

    @property
    def reason(self) -> str:
        """Why this rank wants to end; empty if it does not."""
        if self._signal:
            return self._signal
        return f"{self.minutes:g} minutes" if time.monotonic() >= self._deadline else ""

    def __enter__(self) -> "ExitSignal":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def _note(self, number: int, _) -> None:
        self._signal = signal.Signals(number).name

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
