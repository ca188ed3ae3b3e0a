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
# Per rank; until the first view; between views
_VIEW_LINES, _SOON_SECONDS, _VIEW_SECONDS = (20, 0.5, 0.2)
# How many lines are shown, the first and the last ones, and characters of each: in a notebook one
# scrolls past them.
_IN_TERMINAL, _IN_NOTEBOOK = (900, 100, 4000), (80, 20, 2000)


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
        # A bar that moves returns to the line's start
        self.rest = self.rest[max(0, self.rest.rfind(b"\r", 0, -1)) :]
        lines = [line for line in lines if not _EXPECTED.search(line)]
        if len(self.rest) > 1 << 20:  # a line without end: do not let it fill the memory
            lines, self.rest = [*lines, self.rest], b""
        fits = self.most_head - len(self.head)
        new = [self._text(line) for line in lines[:fits]]
        self.head += new
        self.num_lines += len(lines)
        self.tail.extend(lines[fits:])
        return new

    def lines(self, skip_head: bool = False) -> list[str]:
        """Return what is kept: the head, a word on what was cut, the tail."""
        shown = len(self.head) if skip_head else 0
        # A last line without newline; a bar that has gone leaves blanks
        if self._text(self.rest).strip():
            self.feed(b"\n")
        cut = self.num_lines - len(self.head) - len(self.tail)
        kept = f"the first {self.most_head} and the last {self.most_tail} of a rank are shown"
        note = f"... {cut:,} lines left out: {kept} ..."
        return self.head[shown:] + [note] * (cut > 0) + [self._text(line) for line in self.tail]

    def latest(self) -> list[str]:
        """Return the last lines so far, and the one that has not ended."""
        lines = [*self.head[-_VIEW_LINES:], *map(self._text, self.tail), self._text(self.rest)][
            -_VIEW_LINES:
        ]
        return lines if lines[-1].strip() else lines[:-1]

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
        self._handle, self._shown = None, ""  # of the place in the cell that shows what passes
        self.live, self._note, self._bar, self._bar_rank = live, "", "", num_ranks
        self._start = time.monotonic()
        self._next_view = self._start + _SOON_SECONDS
        self._most = _IN_NOTEBOOK if self._is_notebook else _IN_TERMINAL
        self._streams = {
            name: _Stream(self._most) for name in product(range(num_ranks), ["stdout", "stderr"])
        }

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        new = self._streams[rank, stream].feed(data)
        if self.live:
            self._show(rank, stream, new)

    def progress(self, rank: int, done: float, total: float, text: str) -> None:
        """Move the bar, which follows the lowest rank that reports progress."""
        if rank <= self._bar_rank:
            from tqdm import tqdm

            self._bar = tqdm.format_meter(
                done, total, time.monotonic() - self._start, prefix=text, ncols=80
            )
            self._bar_rank = rank
            if not self._is_notebook:
                print(f"\r{self._bar}", end="", file=sys.stderr)

    def note(self, text: str) -> None:
        """Say what is true only now; in a notebook it goes when the call ends."""
        self._note, self._next_view = text, 0
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
            self._show_in_place(
                "\n".join(filter(None, (lines.rstrip("\n"), self._bar, self._note)))
            )

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
        for name, some in (
            ("stdout", bars),
            (stream, [line for line in lines if line not in bars]),
        ):
            if some:
                text, file = _marked(rank, some), getattr(sys, name)
                # Which may lack letters that a rank prints
                encoding = getattr(file, "encoding", None) or "utf-8"
                print(
                    text.encode(encoding, "replace").decode(encoding), end="", file=file, flush=True
                )

    def last_words(self, rank: int) -> list[str]:
        """Take out the end of what the rank wrote to stderr; it is then shown only once."""
        stream, self._streams[rank, "stderr"] = self._streams[rank, "stderr"], _Stream(self._most)
        return stream.lines(skip_head=self.live)[-60:]

    def _show_in_place(self, text: str) -> None:
        """Show a text in place of the one before: as an update, because nbval does not compare
        those.
        """
        from IPython.display import display

        if text != self._shown:
            self._handle, self._shown = self._handle or display({}, raw=True, display_id=True), text
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
