"""What ranks print, brought into the launching cell: grouped by rank in rank order, or live; and the progress bar.

Grouped is the default because lines of different ranks interleave differently in every run, which neither a reader nor
a notebook test can follow.
"""

import contextlib
import io
import math
import sys
from collections import deque
from dataclasses import dataclass, field

_HEAD_LINES, _TAIL_LINES, _LINE_CHARACTERS = 900, 100, 4000


@dataclass
class _Stream:
    """The lines of one stream of one rank: the first and the last are kept, those between are counted."""

    head: list[str] = field(default_factory=list)
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    num_lines: int = 0
    rest: bytes = b""  # a line that has not ended yet

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes. Return the lines that are new at the head."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > 1 << 20:  # a line without end: do not let it fill the memory
            lines, self.rest = [*lines, self.rest], b""
        fits = max(0, _HEAD_LINES - len(self.head))
        new = [_text(line) for line in lines[:fits]]
        self.head += new
        self.num_lines += len(lines)
        self.tail.extend(lines[fits:][-_TAIL_LINES:])
        return new

    def lines(self, skip_head: bool = False) -> list[str]:
        """Return what is kept: the head, a word on what was cut, the tail."""
        shown = len(self.head) if skip_head else 0
        if self.rest:  # a last line without newline
            self.feed(b"\n")
        cut = self.num_lines - len(self.head) - len(self.tail)
        note = f"... {cut:,} lines left out: the first {_HEAD_LINES} and the last {_TAIL_LINES} of a rank are shown ..."
        return self.head[shown:] + [note] * (cut > 0) + [_text(line) for line in self.tail]


class _Place(io.TextIOBase):
    """A place in the cell for one text, which the next one replaces; an empty one leaves nothing to store.

    nbval compares what a cell displays and not its updates: so nothing is displayed, and the text is an update.
    """

    encoding, _handle = "utf-8", None

    def write(self, text: str) -> None:
        from IPython.display import display

        text = text.strip("\r\n")
        if text and self._handle is None:
            self._handle = display({}, raw=True, display_id=True)
        if self._handle is not None:
            self._handle.update({"text/plain": text} if text else {}, raw=True)


class Output:
    """Collects what each rank prints during one call, and shows it."""

    def __init__(self, num_ranks: int, live: bool):
        self.live = live
        self._notes = _place()
        self._streams = {(rank, name): _Stream() for rank in range(num_ranks) for name in ("stdout", "stderr")}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        new = self._streams[rank, stream].feed(data)
        if self.live:
            _show(rank, stream, new)

    def note(self, text: str) -> None:
        """Say what is true only now; in a notebook it goes when the call ends."""
        self._notes.write(f"{text}\n")

    def finish(self) -> None:
        """Show what has not been shown, rank by rank."""
        self._notes.write("")
        for (rank, name), stream in self._streams.items():
            _show(rank, name, stream.lines(skip_head=self.live))

    def last_words(self, rank: int) -> list[str]:
        """Take out the end of what the rank wrote to stderr; it is then shown only once."""
        stream, self._streams[rank, "stderr"] = self._streams[rank, "stderr"], _Stream()
        return stream.lines(skip_head=self.live)[-60:]


class ProgressBar:
    """A tqdm bar that follows the lowest rank that reports progress."""

    def __init__(self):
        self._bar, self._rank = None, math.inf

    def update(self, rank: int, done: float, total: float, text: str) -> None:
        self._rank = min(rank, self._rank)
        if rank != self._rank:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, leave=False, file=_place())
        self._bar.total, self._bar.n = total, done
        self._bar.set_description_str(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _place():
    """Return a file for what will not stay: a place in the notebook's cell, or else stderr."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return _Place() if hasattr(get_ipython(), "kernel") else sys.stderr


def say(text: str) -> None:
    """Print a line, if there is somewhere to print it: a full disk behind stdout is no reason not to launch."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _show(rank: int, stream: str, lines: list[str]) -> None:
    if lines:
        text, file = "".join(f"[rank {rank}] {line}\n" for line in lines), getattr(sys, stream)
        encoding = getattr(file, "encoding", None) or "utf-8"  # a terminal's may lack letters that a rank prints
        print(text.encode(encoding, "replace").decode(encoding), end="", file=file, flush=True)


def _text(line: bytes) -> str:
    text = line.decode("utf-8", "replace").removesuffix("\r")
    cut = len(text) - _LINE_CHARACTERS
    return text if cut <= 0 else f"{text[:_LINE_CHARACTERS]} ... {cut:,} more characters"
