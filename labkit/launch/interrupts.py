"""Defers SIGINT until the launcher's state is consistent.

KeyboardInterrupt can strike between any two lines, even in a launch that is half set up. Blocking the signal does not
help in a kernel with several threads. So a handler of our own notes the request, and the launcher acts on it.
"""

import signal
import threading


def stopped(text: str = "Stopped.") -> KeyboardInterrupt:
    """Return an interrupt of which IPython shows the text alone. The frames of the launcher help nobody."""
    interrupt = KeyboardInterrupt(text)
    interrupt._render_traceback_ = lambda: f"KeyboardInterrupt: {text}".splitlines()  # pyright: ignore
    return interrupt


class DeferredInterrupt:
    """While open, SIGINT sets `requested`; on leaving it is raised, unless a different error is on its way."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "DeferredInterrupt":
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:  # the only thread that receives signals, or may set handlers
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_):
        self.requested = True

    def __exit__(self, kind, *_):
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)
        if self.requested and kind is None:
            raise stopped()
