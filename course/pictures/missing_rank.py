"""Draw a collective to which one rank does not come: who waits for whom, and what is reported."""

from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap

from course.pictures.collectives import CELL, NAME, ROW, TOP, rank_box
from course.pictures.parts import heading
from course.pictures.scene import WIDTH, Look, Mark, Scene, arrow, box, label
from course.pictures.style import FRAME, FRAME_FILL, INK, MUTED, PP, tint
from course.sizing.missing_rank import MissingRank
from course.table import Table

EXIT = "away"  # the key of the place where a rank is dragged to
EXIT_PLACE = 385.0, 0.0, 222.0, 27.0
STATES, WIDE, LANE = NAME + 10, 330.0, 26.0  # pixels: from the left, of a state, and from arrow to arrow
LETTERS = 118  # in a line of the report
REPORT = "The report of labkit's launch, simulated:"
WAITS, DONE = tint(PP, 0.25), FRAME_FILL


def with_exit(scenes: Sequence[Scene]) -> list[Scene]:
    """Return scenes of a collective in which each rank is a button, and can be dragged to a place beside the title."""
    return [replace(scene, marks=[*map(_as_button, scene.marks), *_exit()]) for scene in scenes]


def draw_missing_rank(missing: MissingRank) -> Scene:
    """Draw the ranks that wait, an arrow from each to the one that it waits for, and the report below them."""
    marks, rows, bottom = heading("0", 0, 0, missing.operation), [], TOP + missing.world_size * ROW
    for rank in range(missing.world_size):
        y, state = TOP + rank * ROW, state_text(missing, rank)
        rows.append((f"rank {rank}", state))
        fill = WAITS if rank in missing.waits else DONE
        look = dict(fact=f"Rank {rank}: {state}", edge=FRAME, dashed=rank == missing.away, drop=rank == missing.away)
        marks.append(box(f"state{rank}", STATES, y, WIDE, CELL, fill, state, f"rank{rank}", **look))
    marks += _arrows(missing)
    marks += [_rank(missing, rank) for rank in range(missing.world_size)]
    marks = [*_exit(missing.away), *marks]
    lines = [part for line in missing.report.splitlines() for part in wrap(line, LETTERS, subsequent_indent="      ")]
    marks.append(label("report", 0, bottom + 16, REPORT, bold=True))
    for number, line in enumerate(lines):
        indent = 14 * (len(line) - len(line.lstrip())) // 2
        marks.append(label(f"report{number}", 4 + indent, bottom + 42 + 19 * number, line.strip()))
    title = f"{missing.operation}: rank {missing.away} does not come"
    says = "; ".join(f"{rank} {state}" for rank, state in rows)
    height = bottom + 42 + 19 * len(lines) + 8
    table = Table(("rank", "state"), rows, f"{REPORT} {missing.report}")
    return Scene(title, says, marks, height, table=table, panels=[(0, 0, WIDTH, height)])


def state_text(missing: MissingRank, rank: int) -> str:
    """Say what one rank does."""
    if rank == missing.away:
        return "has returned, and never came here"
    if rank not in missing.waits:
        return "has done its part, and left"
    peer, does = missing.waits[rank]
    return f"waits to {'send to' if does == 'send' else 'receive from'} rank {peer}"


def _rank(missing: MissingRank, rank: int) -> Mark:
    """Return a rank's box in its row or, if it does not come, in the place where it was dragged to."""
    mark = _as_button(rank_box("0.", rank, 0, TOP + rank * ROW))
    if rank != missing.away:
        return mark
    x, y, wide, high = EXIT_PLACE
    fact = f"Rank {rank}: press it, or drag it to its row, to call it back"
    return replace(mark, x=x + wide - mark.width - 4, y=y + 3, height=high - 6, fact=fact)


def _arrows(missing: MissingRank) -> list[Mark]:
    """Return an arrow from each rank that waits to the one that it waits for, each in a lane of its own."""
    right, arrows = STATES + WIDE, []
    for lane, (rank, (peer, _)) in enumerate(sorted(missing.waits.items()), 1):
        x, middle = right + lane * LANE, CELL / 2
        start, end = (TOP + each * ROW + middle + side for each, side in ((rank, -6), (peer, 6)))
        tags = f"rank{rank}", f"rank{peer}"
        look = Look(fact=f"Rank {rank} {state_text(missing, rank)}", tags=tags, lights=tags)
        points = [(right, start), (x, start), (x, end), (right + 3, end)]
        arrows.append(arrow(f"wait{rank}", points, PP, **look))
    return arrows


def _exit(away: int | None = None) -> list[Mark]:
    """Return the place where a rank is dragged to; it is there to be touched, so a still picture is without it."""
    says = "Drag a rank here, or press it" if away is None else "does not come:"
    fact = "Drag a rank here, or press the rank: it does not come to the operation"
    fact = fact if away is None else f"Rank {away} does not come. Press to call it back"
    x, y, wide, high = EXIT_PLACE
    place = box(EXIT, x, y, wide, high, "#ffffff", edge=INK, dashed=True, fact=fact, drop=True, click=True, live=True)
    return [place, label(f"{EXIT}.says", x + 12, y + high / 2, says, ink=MUTED, live=True)]


def _as_button(mark: Mark) -> Mark:
    """Return the mark, or a rank's box as one that can be pressed and dragged."""
    rank = mark.key.partition(".rank")[2]
    if mark.shape != "box" or not rank.isdecimal():
        return mark
    fact = f"Rank {rank}: press it, or drag it away, and it does not come to the operation"
    return replace(mark, fact=fact, drag=True, drop=True, click=True)
