"""The parts that many pictures have: a title, what the colours mean, the names of ranks, and what a rank has."""

from collections.abc import Iterable

from course.pictures.scene import LARGE, WIDTH, Mark, Scene, box, label, text_width
from course.pictures.style import FRAME, INK, MUTED
from course.table import Table

Place = tuple[float, float, float, float]  # x, y, width, height


def titled(
    title: str, says: str, marks: Iterable[Mark], table: Table, below: str = "", bottom: float = 0.0, left: float = 0.0,
    width: float = WIDTH,
) -> Scene:  # fmt: skip
    """Return a scene with its title above its marks, which begin at about y = 44, and a legend of them below.

    ``below`` is written below the title. ``bottom`` is where the marks end; by default, where the last one does.
    """
    marks = [*heading("head", 0, 0, title, below), *marks]
    bottom = max(bottom, *(mark.bottom for mark in marks))
    if words := legend(marks, left, bottom + 24, width):
        bottom = words[-1].y + 6
    return Scene(title, says, [*marks, *words], bottom + 8, width, table=table)


def heading(key: str, x: float, y: float, title: str, says: str = "", color: str = INK) -> list[Mark]:
    """Return a title below y and, below it, a line of what the picture says; both take 42 pixels."""
    marks = [label(f"{key}.title", x, y + 11, title, size=LARGE, bold=True, ink=color)]
    return marks + ([label(f"{key}.says", x, y + 32, says)] if says else [])


def legend(marks: Iterable[Mark], x: float, y: float, right: float = WIDTH) -> list[Mark]:
    """Return one box and its word for each meaning of a colour among the marks, in rows from y on."""
    found, left = [], x
    for means, mark in {mark.means: mark for mark in marks if mark.means}.items():
        if x > left and x + 20 + text_width(means) > right:
            x, y = left, y + 22
        color = mark.fill if mark.shape == "box" else mark.edge
        found.append(Mark(f"legend.{means}", "box", x, y - 7, 14, 14, color, mark.edge, 1.0, mark.dashed))
        found.append(label(f"legend.{means}.word", x + 20, y, means, ink=MUTED))
        x += 38 + text_width(means)
    return found


def rank_names(num_ranks: int, first: float, pitch: float) -> list[Mark]:
    """Return the ranks' names at the left, from the middle of the first row down; each lights what its rank has."""
    return [rank_name(rank, first + rank * pitch) for rank in range(num_ranks)]


def rank_name(rank: int, y: float) -> Mark:
    return label(f"rank{rank}", 0, y, f"rank {rank}", bold=True, fact=f"Rank {rank}", lights=(f"rank{rank}",))


def own_box(key: str, rank: int, place: Place, fill: str, text: str | tuple[str, ...], fact: str, **look) -> Mark:
    """Return the box of something that a rank has: it lights all that this rank has."""
    return box(key, *place, fill, text, f"rank{rank}", fact=f"Rank {rank}: {fact}", **{"edge": FRAME, **look})
