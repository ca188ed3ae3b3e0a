"""Brings what ranks print and report into the launching cell: live, or grouped by rank, which is
the same each time.
"""

import contextlib
import re
import sys
import time
from collections import deque
from itertools import product

from labkit.launch.frames import shell

# The pairwise communicators that it announces are wanted: receives are posted ahead in them.
_EXPECTED = re.compile(
    rb"Warning: .*An unbatched P2P op \(send/recv\) was called on this ProcessGroup"
)
_BAR = re.compile(r"\[\d+:\d\d(:\d\d)?[<,]")  # of tqdm: the time that passed
_VIEW_LINES = 20  # per rank
_SOON_SECONDS = 0.5  # until the first view
_VIEW_SECONDS = 0.2  # between views
# How many lines are shown, the first and the last ones, and characters of each line. There are
# fewer in a notebook, where one scrolls past them.
_IN_TERMINAL = (900, 100, 4000)
_IN_NOTEBOOK = (80, 20, 2000)


class _Stream:
    """The lines of one stream of one rank: the first and the last are kept, those between are
    counted.
    """

    def __init__(self, most: tuple[int, int, int]):
        self.most_head, self.most_tail, self.most_characters = most
        self.head: list[str] = []
        self.tail: deque[bytes] = deque(maxlen=self.most_tail)
        self.num_lines = 0
        self.rest = b""  # a line that has not ended yet

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes. Return the lines that are new at the head."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        # A bar that moves returns to the line's start: only its latest form is kept.
        self.rest = self.rest[max(0, self.rest.rfind(b"\r", 0, -1)) :]
        lines = [line for line in lines if not _EXPECTED.search(line)]
        if len(self.rest) > 1 << 20:  # a line without end: do not let it fill the memory
            lines.append(self.rest)
            self.rest = b""
        fits = self.most_head - len(self.head)
        new = [self._text(line) for line in lines[:fits]]
        self.head += new
        self.num_lines += len(lines)
        self.tail.extend(lines[fits:])
        return new

    def lines(self, skip_head: bool = False) -> list[str]:
        """Return what is kept: the head, a word on what was cut, the tail."""
        shown = len(self.head) if skip_head else 0
        # End a last line without a newline, but not the blanks that a bar leaves behind.
        if self._text(self.rest).strip():
            self.feed(b"\n")
        lines = self.head[shown:]
        cut = self.num_lines - len(self.head) - len(self.tail)
        if cut > 0:
            kept = f"the first {self.most_head} and the last {self.most_tail} of a rank are shown"
            lines.append(f"... {cut:,} lines left out: {kept} ...")
        return lines + [self._text(line) for line in self.tail]

    def latest(self) -> list[str]:
        """Return the last lines so far, and the one that has not ended."""
        lines = [*self.head[-_VIEW_LINES:], *map(self._text, self.tail), self._text(self.rest)]
        latest = lines[-_VIEW_LINES:]
        return latest if latest[-1].strip() else latest[:-1]

    def _text(self, line: bytes) -> str:
        """Decode a line as a terminal shows it: what follows a carriage return replaces what came
        before.
        """
        text = line.decode("utf-8", "replace").removesuffix("\r").rpartition("\r")[2]
        cut = len(text) - self.most_characters
        return text if cut <= 0 else f"{text[: self.most_characters]} ... {cut:,} more characters"


class Output:
    """Collects what each rank prints during one call, and shows it."""

    def __init__(self, num_ranks: int, live: bool):
        self._is_notebook = hasattr(shell(), "kernel")
        self._handle = None  # of the display in the cell that shows what passes
        self._shown = ""  # by it now
        self.live = live
        self._note = ""
        self._bar = ""
        self._bar_rank = num_ranks
        self._start = time.monotonic()
        self._next_view = self._start + _SOON_SECONDS
        self._most = _IN_NOTEBOOK if self._is_notebook else _IN_TERMINAL
        self._streams: dict[tuple[int, str], _Stream] = {}
        for rank, name in product(range(num_ranks), ["stdout", "stderr"]):
            self._streams[rank, name] = _Stream(self._most)

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        new = self._streams[rank, stream].feed(data)
        if self.live:
            self._show(rank, stream, new)

    def progress(self, rank: int, done: float, total: float, text: str) -> None:
        """Move the bar, which follows the lowest rank that reports progress."""
        if rank <= self._bar_rank:
            from tqdm import tqdm

            seconds = time.monotonic() - self._start
            self._bar = tqdm.format_meter(done, total, seconds, prefix=text, ncols=80)
            self._bar_rank = rank
            if not self._is_notebook:
                print(f"\r{self._bar}", end="", file=sys.stderr)

    def note(self, text: str) -> None:
        """Say what is true only now; in a notebook it goes when the call ends."""
        self._note = text
        self._next_view = 0
        self.refresh()
        if not self._is_notebook:
            print(text, file=sys.stderr)

    def refresh(self) -> None:
        """In a notebook, show in one place what is new: the latest lines of each rank, the bar, the
        note.
        """
        now = time.monotonic()
        if self._is_notebook and now > self._next_view:
            self._next_view = now + _VIEW_SECONDS
            streams = {} if self.live else self._streams
            lines = "".join(_marked(rank, stream.latest()) for (rank, _), stream in streams.items())
            parts = filter(None, (lines.rstrip("\n"), self._bar, self._note))
            self._show_in_place("\n".join(parts))

    def finish(self) -> None:
        """Show what has not been shown, rank by rank, in the place of what passed."""
        if self._is_notebook:
            self._show_in_place("")
        elif self._bar:
            print(f"\r{'':80}", end="\r", file=sys.stderr)
        for (rank, name), stream in self._streams.items():
            self._show(rank, name, stream.lines(skip_head=self.live))

    def _show(self, rank: int, stream: str, lines: list[str]) -> None:
        """Show lines; the bars of tqdm, which writes to stderr, not in the red that a notebook
        gives to warnings.
        """
        bars = [line for line in lines if self._is_notebook and _BAR.search(line)]
        others = [line for line in lines if line not in bars]
        for name, some in (("stdout", bars), (stream, others)):
            if some:
                file = getattr(sys, name)
                # The stream's encoding may lack letters that a rank prints.
                encoding = getattr(file, "encoding", None) or "utf-8"
                text = _marked(rank, some).encode(encoding, "replace").decode(encoding)
                print(text, end="", file=file, flush=True)

    def last_words(self, rank: int) -> list[str]:
        """Take out the end of what the rank wrote to stderr; it is then shown only once."""
        stream = self._streams[rank, "stderr"]
        self._streams[rank, "stderr"] = _Stream(self._most)
        return stream.lines(skip_head=self.live)[-60:]

    def _show_in_place(self, text: str) -> None:
        """Show a text in place of the one before: as an update, because nbval does not compare
        those.
        """
        from IPython.display import display

        if text != self._shown:
            self._shown = text
            self._handle = self._handle or display({}, raw=True, display_id=True)
            if self._handle is not None:
                self._handle.update({"text/plain": text} if text else {}, raw=True)


def say(text: str) -> None:
    """Print a line, if there is somewhere to print it: a full disk behind stdout is no reason not
    to launch.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _marked(rank: int, lines: list[str]) -> str:
    return "".join(f"[rank {rank}] {line}\n" for line in lines)
