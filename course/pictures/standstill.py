"""Draw the way from "nothing moves" to a cause, as questions to ask one after the other."""

from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Scene, arrow, box, label
from course.pictures.style import IDLE, INK, tint
from course.table import Table

QUESTIONS = (
    ("Do two looks differ: a call more, a line more?", "yes", "slow, not stuck: who is awaited?", (11,)),
    ("Did all ranks begin, and are all still there?", "no", "a node never came, or a rank died", (12,)),
    ("Does a log have an error of the rank's own?", "yes", "swallowed, shapes differ, time-out too short", (8, 7, 4)),
    ("Does one rank stand on a line of its own?", "yes", "it strayed: batches, own value, gradient", (1, 6, 3)),
    ("Do ranks wait for each other: groups, sends?", "yes", "a circle: orders, both send, new_group", (5, 10, 9)),
    ("All on one line: who has a call more or fewer?", "count", "a collective that only some ranks call", (2,)),
)
"""What to ask, the answer that ends the search, what it means, and the cases of notebook 17 where it is so."""
ROW, HEIGHT, TOP = 62.0, 42.0, 62.0
ASKED, FOUND = 400.0, 420.0  # widths of the two columns
CAUSE = "#009E73"


def draw_questions() -> Scene:
    """Draw the questions down the left, and at the right what has been found where the search ends."""
    left = WIDTH - FOUND
    marks = []
    for number, (question, answer, meaning, cases) in enumerate(QUESTIONS):
        y = TOP + number * ROW
        middle = y + HEIGHT / 2
        says = f"{meaning} ({'case' if len(cases) == 1 else 'cases'} {', '.join(map(str, cases))})"
        marks.append(box(f"asked{number}", 0, y, ASKED, HEIGHT, IDLE, question, fact=question))
        marks.append(arrow(f"to{number}", [(ASKED, middle), (left, middle)], INK))
        marks.append(label(f"answer{number}", (ASKED + left) / 2 - 4, middle - 12, answer, anchor="middle"))
        marks.append(box(f"found{number}", left, y, FOUND, HEIGHT, tint(CAUSE, 0.25), says, fact=says))
        if number < len(QUESTIONS) - 1:
            marks.append(arrow(f"down{number}", [(ASKED / 2, y + HEIGHT), (ASKED / 2, y + ROW)], INK))
    table = Table(
        ("ask", "if", "then", "cases"),
        [(question, answer, meaning, ", ".join(map(str, cases))) for question, answer, meaning, cases in QUESTIONS],
    )
    says = "Six questions, from whether it stands still at all to who made a call more"
    return titled(
        "From nothing moves to a cause",
        says,
        marks,
        table,
        below="Nothing moves. Ask, from the top; the case numbers are those of notebook 17",
    )
