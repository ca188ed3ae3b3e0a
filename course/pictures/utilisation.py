"""Draw steps as timelines with bars beside them: what each rank did with its time, as shares of the step."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from course.measure.utilisation import TimedStep
from course.pictures.scene import WIDTH, Mark, Scene, Table, box, label
from course.pictures.style import FORWARD, GREY, IDLE
from course.pictures.timeline import WORK, Rows, stacked, time_text, with_axis
from labkit.timeline import Timeline
from labkit.timeline.spans import COMPUTING

RIGHT, BARS = 735.0, 150.0
"""Where the timelines end, and the pixels of a whole step in the bars beside them."""
WORDS = "computing", "waits for a message under way", "idle"
LOOKS: tuple[dict[str, Any], ...] = (dict(fill=FORWARD), dict(fill=IDLE, edge=GREY, dashed=True), dict(fill=IDLE))


def draw_steps(steps: Sequence[TimedStep], titles: Sequence[str]) -> Scene:
    """Draw steps below each other on one time scale, each with its bars: the same looks mean the same in both."""
    end, marks, facts, table = max(step.seconds for step in steps), [], [], []
    unit = "s" if end >= 1 else "ms"
    all_rows = stacked([_shown(step) for step in steps], unit, end, RIGHT)
    for step, rows, title in zip(steps, all_rows, titles, strict=True):
        source, computing = step.timeline.source, step.mean_shares.computing
        facts.append(f"{source}: {time_text(step.seconds, unit)}, {computing:.0%} computing")
        marks += [*rows.heading(title, facts[-1]), *(_as_in_bars(mark, step) for mark in rows.marks())]
        marks += _bars(step, rows)
        table += [(title, str(rank), *(f"{share:.0%}" for share in shares)) for rank, shares in enumerate(step.shares)]
    heads = "", "rank", "computing", "communication", "idle"
    return with_axis(all_rows, titles, facts, marks, Table(heads, table))


def _bars(step: TimedStep, rows: Rows) -> Iterable[Mark]:
    """Yield one bar per rank: computing, waiting for messages under way, and idle; with the percentage of the first."""
    left = RIGHT + 24
    for rank, shares in enumerate(step.shares):
        x, y, key = left, rows.y(rank), f"{rows.key}share{rank}"
        for part, (share, word, look) in enumerate(zip(shares, WORDS, LOOKS)):
            fact = f"rank {rank}: {share:.0%} {word}"
            yield box(f"{key}.{part}", x, y, share * BARS, WORK, fact=fact, radius=0, **look)
            x += share * BARS
        yield label(f"{key}.word", left + BARS + 31, y + WORK / 2, f"{round(shares[0], 6):.0%}", anchor="end")
    yield label(f"{rows.key}computing", WIDTH, rows.top - 16, "computing", anchor="end")


def _as_in_bars(mark: Mark, step: TimedStep) -> Mark:
    """Name waits as the bars do; an op that many waits interrupt goes without its label, which they would cover."""
    mark = replace(mark, means=WORDS[1]) if mark.means == "waits" else mark
    return replace(mark, text="") if mark.shape == "box" and step.plan.tp_size > 1 else mark


def _shown(step: TimedStep) -> Timeline:
    """Return the work, and the waits for messages that were under way; the messages are left out."""
    work = [span for span in step.timeline.spans if span.kind in COMPUTING]
    waits = [span for span in step.waits_for_messages if span.seconds]
    return Timeline([*work, *waits], step.timeline.source)
