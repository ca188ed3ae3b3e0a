"""Draw steps as timelines with bars beside them: what each rank did with its time, as shares of the step."""

from collections.abc import Sequence
from dataclasses import replace

from course.measure.utilisation import TimedStep
from course.pictures.scene import WIDTH, Look, Scene, box, label
from course.pictures.style import FORWARD, GREY, IDLE
from course.pictures.timeline import WORK, stacked, time_text, with_axis
from course.table import Table
from course.timeline import Timeline
from labkit.timeline.spans import COMPUTING

RIGHT, BARS = 735.0, 150.0  # where the timelines end, and the pixels of a whole step in the bars beside them
WORDS = "computing", "waits for a message under way", "idle"
LOOKS = Look(fill=FORWARD), Look(fill=IDLE, edge=GREY, dashed=True), Look(fill=IDLE)


def draw_steps(steps: Sequence[TimedStep], titles: Sequence[str]) -> Scene:
    """Draw steps below each other on one time scale, each with its bars: the same looks mean the same in both."""
    end, shown, marks, table = max(step.seconds for step in steps), [], [], []
    unit = "s" if end >= 1 else "ms"
    for step in steps:  # keep the waits for messages under way; leave out other waits, and the messages
        work = [span for span in step.timeline.spans if span.kind in COMPUTING]
        waits = [span for span in step.waits_for_messages if span.seconds]
        shown.append(Timeline([*work, *waits], step.timeline.source))
    all_rows = stacked(shown, titles, unit, end, RIGHT)
    for step, rows in zip(steps, all_rows):
        for mark in rows.marks(f"{time_text(step.seconds, unit)}, {step.mean_shares.computing:.0%} computing"):
            means = WORDS[1] if mark.means == "waits" else mark.means
            marks.append(replace(mark, means=means))
        for rank, shares in enumerate(step.shares):
            x, y, key = RIGHT + 24, rows.y(rank), f"{rows.key}share{rank}"
            for part, (share, word, look) in enumerate(zip(shares, WORDS, LOOKS)):
                fact = f"rank {rank}: {share:.0%} {word}"
                marks.append(box(f"{key}.{part}", x, y, share * BARS, WORK, fact=fact, radius=0, **look))
                x += share * BARS
            marks.append(label(f"{key}.word", x + 31, y + WORK / 2, f"{round(shares[0], 6):.0%}", anchor="end"))
            table.append((rows.title, str(rank), *(f"{share:.0%}" for share in shares)))
        marks.append(label(f"{rows.key}computing", WIDTH, rows.top - 16, "computing", anchor="end"))
    return with_axis(all_rows, marks, Table(("", "rank", "computing", "communication", "idle"), table))
